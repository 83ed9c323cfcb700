"""Launchpad as a launcher: the graph as a Launchpad program, and Launchpad's own manager."""
