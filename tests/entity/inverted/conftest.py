"""Nothing is left behind, as tests/envs/conftest.py has it; and games that tests use."""

from tests.envs.conftest import nothing_left  # noqa: F401
