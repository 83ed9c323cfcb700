"""What a run tells Prometheus."""
