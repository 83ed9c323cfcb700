"""Files that run a training job on a cluster, and the jobs that they start."""
