"""Files that run a training job on a cluster: ``rlstack cluster``.

Each module writes one kind of file from a `Job` (`job.py`). The package does not import JAX.
"""
