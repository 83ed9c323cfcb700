"""Correctness and throughput on JAX's default device, such as a GPU."""
