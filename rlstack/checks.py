"""Configs that say what is wrong with them, all in the same words."""

from __future__ import annotations

from collections.abc import Iterable


class Checked:
    """A frozen dataclass whose ``__post_init__`` checks the ranges of its fields."""

    def require(self, field: str, holds: bool, rule: str) -> None:
        """Raises a ValueError that names the field, its rule and what came, unless that holds."""
        if not holds:
            raise ValueError(
                f"{type(self).__name__}: {field} must be {rule}; got {getattr(self, field)!r}."
            )

    def require_at_least(self, least: float, *fields: str) -> None:
        """Raises the same for the first of the fields that is less, or no number at all."""
        for field in fields:
            self.require(field, getattr(self, field) >= least, f"at least {least:g}")

    def require_one_of(self, field: str, names: Iterable[str]) -> None:
        """Raises the same unless the field is one of these."""
        names = tuple(names)
        self.require(field, getattr(self, field) in names, f"one of {', '.join(names)}")
