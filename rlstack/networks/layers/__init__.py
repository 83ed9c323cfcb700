"""Layers, and the choice of how each is computed."""
