"""Experiments and the topologies that run them."""
