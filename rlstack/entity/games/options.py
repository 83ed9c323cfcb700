"""Checks of the games' options."""

from __future__ import annotations


def require(game: str, **ranges: tuple[int, int] | tuple[int, int, int]) -> None:
    """Raises a ValueError unless each option, (value, least[, most]), is in its range."""
    for name, (value, least, *most) in ranges.items():
        if value < least or (most and value > most[0]):
            rule = f"in {least}..{most[0]}" if most else f"at least {least}"
            raise ValueError(f"{game}: {name} must be {rule}; got {value}.")
