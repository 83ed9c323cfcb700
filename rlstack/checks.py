"""Checks of configs, with error messages of one form."""

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
