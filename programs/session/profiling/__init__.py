"""Profiles of a run: each node measures its phases, and a summary names what limits the speed."""
