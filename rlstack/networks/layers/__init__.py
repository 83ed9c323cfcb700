"""Layers, and the choice of the form in which each is computed."""
