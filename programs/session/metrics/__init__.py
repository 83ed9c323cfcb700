"""What a run tells Prometheus while it trains (``--program.metrics``).

The package does not import JAX.
"""
