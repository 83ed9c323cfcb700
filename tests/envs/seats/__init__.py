"""Tests of games of several seats."""
