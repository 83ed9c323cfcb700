"""Boards as text."""

from __future__ import annotations

from collections.abc import Mapping


def grid(width: int, height: int, marks: Mapping[tuple[int, int], str], empty: str = ".") -> str:
    """Returns a board, y upwards, with ``marks`` by (x, y); those outside are left out."""
    rows = (
        " ".join(marks.get((x, y), empty) for x in range(width)) for y in reversed(range(height))
    )
    return "\n".join(rows)
