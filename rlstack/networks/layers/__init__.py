"""Layers in the forms that run fastest where they are traced."""
