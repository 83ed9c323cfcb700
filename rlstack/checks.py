"""Checks of configs, with error messages of one form, and the errors that several packages raise.

Worker processes of environments import this module, so it must not import JAX.
"""

from __future__ import annotations

from collections.abc import Iterable


class Checked:
    """Base of frozen dataclasses that check the ranges of their fields in ``__post_init__``."""

    def require(self, field: str, holds: bool, rule: str) -> None:
        """Raises a ValueError that names the field, its rule and its value, unless ``holds``."""
        if not holds:
            raise ValueError(
                f"{type(self).__name__}: {field} must be {rule}; got {getattr(self, field)!r}."
            )

    def require_at_least(self, least: float, *fields: str) -> None:
        """Raises the same error for the first field that is less than ``least`` or NaN."""
        for field in fields:
            self.require(field, getattr(self, field) >= least, f"at least {least:g}")

    def require_one_of(self, field: str, names: Iterable[str]) -> None:
        """Raises the same error unless the field is one of ``names``."""
        names = tuple(names)
        self.require(field, getattr(self, field) in names, f"one of {', '.join(names)}")


class EnvError(ValueError):
    """An environment breaks the rules of its interface, so restarting it does not help."""


class EnvCrash(RuntimeError):  # noqa: N818 (it crashed; the message has the error)
    """An environment raised an exception or does not answer; the message names the environment."""


class WrongKindError(TypeError, ValueError):
    """An object that the user gave, or an action of the environment, is of the wrong kind.

    It is a TypeError as in Python, and a ValueError like the other mistakes in a config, which
    commands report in one line.
    """
