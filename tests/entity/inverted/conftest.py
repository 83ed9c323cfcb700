"""Checks that no process, thread or shared memory is left, as in tests/envs/conftest.py."""

from tests.envs.conftest import nothing_left  # noqa: F401
