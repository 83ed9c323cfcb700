"""Curves of logs over a whole run in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

Point = tuple[float, float, float]  # frames, wall time in Unix seconds, value
_AXES = ("env_frames", "wall_time")


class Curves:
    """The curve of each log of a run.

    A curve has at most `limit` points: when it is full, each two neighbours become one, with the
    mean of their values. It always ends with the newest value.

    Attributes:
      version: grows with each change.
      began: Unix time of the first line; NaN if there is none.
    """

    def __init__(self, limit: int = 500) -> None:
        """Starts without curves.

        Args:
          limit: maximum number of points of a curve, even.

        Raises:
          ValueError: `limit` is odd or below 2.
        """
        if limit < 2 or limit % 2:
            raise ValueError(f"Curves: limit must be even and at least 2; got {limit}.")
        self.version = 0
        self.began = math.nan
        self._limit = limit
        self._curves: dict[str, _Curve] = {}

    def take(self, line: Mapping[str, float]) -> None:
        """Adds the values of one line of logs, which has env_frames and wall_time."""
        frames, wall_time = (line[name] for name in _AXES)
        if math.isnan(self.began):
            self.began = wall_time
        for name, value in line.items():
            if name not in _AXES:
                curve = self._curves.get(name)
                if curve is None:
                    curve = self._curves[name] = _Curve()
                curve.add((frames, wall_time, value), self._limit)
        self.version += 1

    def clear(self) -> None:
        """Removes everything: the file of the logs has been rewritten."""
        self._curves.clear()
        self.began = math.nan
        self.version += 1

    def names(self) -> list[str]:
        """Returns the names of the logs, sorted."""
        return sorted(self._curves)

    def points(self, name: str) -> list[Point]:
        """Returns the curve of a log, oldest point first; [] if there is none.

        The value of a point is the mean of the logs that it stands for, without those that are not
        finite. It is NaN if none is finite.
        """
        curve = self._curves.get(name)
        return [] if curve is None else curve.shown()


class _Curve:
    def __init__(self) -> None:
        self._points: list[Point] = []
        self._size = 1  # logs in a point
        self._part: list[Point] = []  # logs that are not yet a point, fewer than _size

    def add(self, point: Point, limit: int) -> None:
        self._part.append(point)
        if len(self._part) < self._size:
            return
        self._points.append(_merged(self._part))
        self._part = []
        if len(self._points) >= limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_merged(pair) for pair in pairs]
            self._size *= 2

    def shown(self) -> list[Point]:
        return [*self._points, *([_merged(self._part)] if self._part else [])]


def _merged(points: list[Point] | tuple[Point, Point]) -> Point:
    """Returns the mean value at the place of the last point."""
    finite = [value for _, _, value in points if math.isfinite(value)]
    frames, wall_time, _ = points[-1]
    return frames, wall_time, sum(finite) / len(finite) if finite else math.nan
