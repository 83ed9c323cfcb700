"""Samplers of Reverb's that take turns, so that one is filled while the other is emptied."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rlstack.replay.reverb.tables import ITEMS

_FIRST = 16  # items that a sampler asks for at first, then for twice as many each time
_STREAM = 10_000  # items after which it begins anew


class Turns:
    """Items of a table in the server's own process.

    There a sampler fills its queue at one go, and begins to only when the last item of the burst
    before has been taken. So the reader of one sampler and that sampler's own thread work by turns
    and wait for each other; those of two work side by side, if the reader goes to the other one
    where a burst ends: 0.20 ms for 128 small items instead of 0.38 (two cores). Where bursts end
    follows from Reverb's constants, if there is always another item to sample. Were they others,
    taking turns would help less and harm nothing.
    """

    def __init__(self, client: Any, in_flight: int, samplers: int):
        """Begins to sample.

        Args:
          client: of the server.
          in_flight: items that are sampled ahead.
          samplers: that take turns. More than one may keep items while the other waits for some:
            not for tables that can run out of items.
        """
        size = max(1, in_flight // samplers)
        self._samplers = [client.NewSampler(ITEMS, -1, size) for _ in range(samplers)]
        gets = [sampler.GetNextTrajectory for sampler in self._samplers]
        self._turns = itertools.cycle([(get, _bursts(size)) for get in gets])
        self._get, self._left = gets[0], 0

    def take(self, count: int) -> list[Any]:
        """Returns so many items; waits for them without the interpreter's lock."""
        items: list[Any] = []
        while count:
            if not self._left:
                self._get, bursts = next(self._turns)
                self._left = next(bursts)
            now, get = min(self._left, count), self._get
            items += [get() for _ in range(now)]
            self._left -= now
            count -= now
        return items

    def close(self) -> None:
        """Ends waiting, with an error; takes up to 3 s."""
        for sampler in self._samplers:
            sampler.Close()


def _bursts(most: int) -> Iterator[int]:
    """Yields how many items a sampler has fetched whenever it waits to be emptied."""
    held = 0
    while True:
        left, size = _STREAM, _FIRST
        while left:
            size = min(size, most, left)
            if held + size > most:
                yield held
                held = 0
            held += size
            left -= size
            size *= 2
