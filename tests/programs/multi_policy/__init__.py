"""Tests of several policies in one run."""
