"""Boards as text, for the ``__str__`` of a game."""

from __future__ import annotations

from collections.abc import Mapping


def grid(width: int, height: int, marks: Mapping[tuple[int, int], str], empty: str = ".") -> str:
    """Returns a board as text, y upwards, with ``marks`` by (x, y); marks outside are left out."""
    rows = (
        " ".join(marks.get((x, y), empty) for x in range(width)) for y in reversed(range(height))
    )
    return "\n".join(rows)
