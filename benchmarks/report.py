"""Measures two programs against each other and reports the result.

The programs are measured in alternation, because a machine's speed drifts. The result is the median
of the ratios of neighbouring measurements; the quartiles show how reliable it is.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Rate = Callable[[], float]  # runs a piece of work and returns steps per second


class Comparison(NamedTuple):
    """Rates of two programs, measured in alternation; entries i of both are neighbours in time."""

    ours: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ours divided by reference, for each pair of neighbours."""
        return [ours / other for ours, other in zip(self.ours, self.reference, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def medians(self) -> dict[str, float]:
        """The median rate of each side."""
        return {
            "ours": statistics.median(self.ours),
            "reference": statistics.median(self.reference),
        }

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios; minimum and maximum if there are fewer than four."""
        ratios = sorted(self.ratios)
        if len(ratios) < 4:
            return ratios[0], ratios[-1]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high


def alternate(ours: Rate, reference: Rate, repeats: int) -> Comparison:
    """Measures both ``repeats`` times in alternation; each goes first every other time.

    Raises:
      ValueError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"alternate: repeats must be at least 1; got {repeats}.")
    pairs = []
    for i in range(repeats):
        if i % 2:
            second = reference()
            pairs.append((ours(), second))
        else:
            pairs.append((ours(), reference()))
    return Comparison(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def rate(steps: int, work: Callable[[], object]) -> float:
    """Runs the work, which makes ``steps`` steps; returns steps per second."""
    start = time.perf_counter()
    work()
    return steps / (time.perf_counter() - start)


def at_once(works: Sequence[Callable[[], object]]) -> None:
    """Runs each piece of work in a thread of its own; returns when all have ended."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Timed(NamedTuple):
    """A method to time."""

    target: object
    method: str
    label: str  # the times of methods with the same label add up
    wait: Callable[[Any], object] = id  # waits for a result that is computed asynchronously


class Timers:
    """Measures where time goes, by wrapping methods of single objects temporarily."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, *methods: Timed) -> Iterator[None]:
        """Times calls of the methods within the block.

        The wrappers are attributes of the objects, so callers that bound a method before the block
        are not timed. A timed call inside another counts for both.
        """
        # Remembers attributes of the object itself, which must be restored after the block.
        own = [getattr(m.target, "__dict__", {}).get(m.method) for m in methods]
        for timed in methods:
            self._seconds.setdefault(timed.label, 0.0)
            setattr(timed.target, timed.method, self._wrap(timed))
        try:
            yield
        finally:
            for (target, name, *_), before in zip(methods, own, strict=True):
                if before is None:
                    delattr(target, name)
                else:
                    setattr(target, name, before)

    def _wrap(self, timed: Timed) -> Callable[..., Any]:
        method = getattr(timed.target, timed.method)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            timed.wait(result)
            self._seconds[timed.label] += time.perf_counter() - start
            return result

        return wrapper

    def shares(self, total: float) -> dict[str, float]:
        """Returns each label's fraction of ``total`` seconds, and that of the "rest"."""
        shares = {label: seconds / total for label, seconds in self._seconds.items()}
        return {**shares, "rest": 1.0 - sum(shares.values())}


class Result(NamedTuple):
    """The result of a benchmark, by the names of its settings."""

    name: str
    ratios: dict[str, float]  # ours divided by reference, medians
    medians: dict[str, dict[str, float]]  # steps per second of each side
    spread: dict[str, tuple[float, float]]  # quartiles of the ratios
    where: dict[str, dict[str, dict[str, float]]]  # fractions of the time of each side

    @staticmethod
    def empty(name: str) -> Result:
        """Returns a result without settings."""
        return Result(name, {}, {}, {}, {})

    def add(
        self, setting: str, comparison: Comparison, where: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Adds the result of one setting."""
        self.ratios[setting] = round(comparison.ratio, 4)
        self.medians[setting] = {k: round(v, 1) for k, v in comparison.medians.items()}
        low, high = comparison.spread
        self.spread[setting] = round(low, 4), round(high, 4)
        self.where[setting] = {
            side: {label: round(share, 3) for label, share in shares.items()}
            for side, shares in where.items()
        }

    def update(self, other: Mapping[str, Any]) -> None:
        """Adds the settings of another result, given as its parsed JSON line."""
        self.ratios.update(other["ratios"])
        self.medians.update(other["medians"])
        self.spread.update(other["spread"])
        self.where.update(other["where"])

    def line(self) -> str:
        """Returns the JSON object that a benchmark prints as its last line."""
        return json.dumps(self._asdict(), allow_nan=False)

    def verdict(self, setting: str, target: float) -> str:
        """Returns a line that says whether a ratio has reached its target."""
        ratio = self.ratios[setting]
        verdict = "reached" if ratio >= target else "MISSED"
        return f"{setting}: {ratio:.2f}, target {target:g}: {verdict}"

    def table(self, target: float) -> str:
        """Returns the result as a table for people; ratios under the target are marked."""
        width = max([len(setting) for setting in self.ratios], default=7)
        lines = [f"{'setting':{width}}  {'ours/s':>10}  {'reference/s':>11}  ratio  quartiles"]
        for setting, ratio in self.ratios.items():
            medians, (low, high) = self.medians[setting], self.spread[setting]
            mark = "" if ratio >= target else f"  under {target:g}"
            lines.append(
                f"{setting:{width}}  {medians['ours']:10,.0f}  {medians['reference']:11,.0f}  "
                f"{ratio:5.2f}  {low:.2f}-{high:.2f}{mark}"
            )
            for side, shares in self.where[setting].items():
                if not shares:  # they cannot be measured
                    continue
                parts = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
                lines.append(f"{'':{width}}  {side}: {parts}")
        return "\n".join(lines)
