"""A thread in the Reverb server's process that makes batches of its items."""

from __future__ import annotations

from typing import Any

from rlstack.replay.base import ReplayConfig
from rlstack.replay.reverb.fetcher import Fetcher, wait_while
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.rows import Drawn, draw
from rlstack.replay.reverb.rules import TableInfo, in_flight, is_plentiful
from rlstack.replay.reverb.turns import Turns

_LINGER = 0.005  # seconds that a batch waits for others that go with it


class BatchMaker(Fetcher):
    """Samples items and lays them out as batches, while fewer batches are here than are wanted.

    One thread does both: two would fight over the interpreter, which sampling lets go and takes
    again for each item.
    """

    def __init__(self, client: Any, address: str, packing: Packing, cfg: ReplayConfig):
        """Starts the thread.

        Args:
          client: of the server, in its process.
          address: the server's.
          packing: of the items.
          cfg: the table.
        """
        self._client, self._address, self._packing, self._cfg = client, address, packing, cfg
        self._turns: Turns | None = None
        self._batches: list[Drawn] = []
        self._enough = 0  # batches that somebody waits for; fewer are nothing to wake him for
        super().__init__()

    @property
    def count(self) -> int:
        """Batches that are here."""
        return len(self._batches)

    def take(self, most: int, seconds: float) -> list[Drawn]:
        """Takes the oldest batches, those that are there in time, and has as many made anew."""
        with self.changed:
            self.want(most)
            self._wait_for(1, seconds)
            if self._batches:
                self._wait_for(most, min(_LINGER, seconds))
            taken, self._batches = self._batches[:most], self._batches[most:]
            self.want(most)
            return taken

    def _wait_for(self, count: int, seconds: float) -> None:
        """Waits for so many batches; hold ``changed``."""
        self._enough = count
        self.changed.wait_for(lambda: self._closed or self.error or self.count >= count, seconds)

    def _prepare(self) -> None:
        def early(info: TableInfo) -> bool:
            return info.inserts < self._cfg.min_size

        wait_while(early, self._client, self._address, lambda: self._closed)

    def _fetch(self) -> None:
        """Makes one batch."""
        cfg = self._cfg
        with self.changed:
            if self._closed:
                return
            if self._turns is None:
                self._turns = Turns(self._client, in_flight(cfg), 2 if is_plentiful(cfg) else 1)
        rows = self._turns.take(cfg.batch_size)
        # Other memory each time: the last batch may still be on its way.
        batch = draw(self._packing, rows, odds=cfg.sampler == "prioritized", reuse=False)
        with self.changed:
            self._batches.append(batch)
            if self.count >= self._enough:
                self.changed.notify_all()

    def _interrupt(self) -> None:
        with self.changed:
            turns = self._turns
        if turns is not None:
            turns.close()
