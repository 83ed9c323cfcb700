"""A thread that takes items from a Reverb server, as many as are wanted."""

from __future__ import annotations

import threading
import time
from typing import Any

from rlstack.replay.base import ReplayConfig
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.server import ITEMS, table_info

_ASK = 0.02  # seconds between questions whether min_size is reached


KEY, PROBABILITY, SIZE, DATA = 0, 1, 2, 4  # what Reverb gives of an item; the table's size


class Row(list):
    """An item as Reverb gives it, and what a fifo must know of it."""

    __slots__ = ("env_id", "times", "version")
    env_id: int
    version: int
    times: int  # batches it has been in


class Fetcher:
    """Holds items that were sampled and not yet handed out, oldest first.

    The thread asks for items only while fewer are here than are wanted, so that it does not fight
    over the interpreter with a learner that has what it needs. Prefetching is done by Reverb's own
    threads, which need no interpreter.

    Attributes:
      rows: the items; hold ``changed`` to touch them.
      error: what ended the thread, or None.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        packing: Packing,
        cfg: ReplayConfig,
        *,
        prefetch: int,
        group: int,
    ):
        """Starts the thread.

        Args:
          client: of the server.
          address: the server's.
          packing: of the items.
          cfg: the table.
          prefetch: items that Reverb fetches ahead; 0 for exactly those wanted, when wanted.
          group: items that are taken before they are shown.
        """
        self._client, self._address, self._packing = client, address, packing
        self._prefetch, self._min_size = prefetch, cfg.min_size
        self._fifo, self._context = cfg.sampler == "fifo", cfg.context
        self.rows: list[list] = []  # Rows, if the sampler is fifo
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self._wanted = 0
        self._closed = False
        self._sampler: Any = None
        self._group = group
        self._thread = threading.Thread(target=self._run, name="reverb-fetcher", daemon=True)
        self._thread.start()

    def want(self, count: int) -> None:
        """Asks for so many items to be here; hold ``changed``."""
        self._wanted = count
        if count > len(self.rows):
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            self._wait_for_min_size()
            while self._wait_until_wanted():
                self._fetch()
        except Exception as error:
            with self.changed:
                if not self._closed:
                    self.error = error
                self.changed.notify_all()

    def _wait_for_min_size(self) -> None:
        # Without prefetching, whoever wants items has looked.
        while self._prefetch and not self._closed:
            try:
                if table_info(self._client, self._address, 1.0).inserts >= self._min_size:
                    return
            except TimeoutError:
                pass  # the server may come back
            time.sleep(_ASK)

    def _wait_until_wanted(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self._closed or self._wanted > len(self.rows))
            return not self._closed

    def _fetch(self) -> None:
        """Takes items until there are as many as wanted."""
        with self.changed:
            missing = self._wanted - len(self.rows)
            if self._closed or missing <= 0:
                return
            if not self._prefetch:
                self._sampler = self._client.NewSampler(ITEMS, missing, missing)
            elif self._sampler is None:
                self._sampler = self._client.NewSampler(ITEMS, -1, self._prefetch)
            sampler = self._sampler
        get = sampler.GetNextTrajectory  # waits without the interpreter's lock
        while missing > 0:
            # Where items are scarce, each is shown at once; elsewhere that would only take time.
            rows = [get() for _ in range(min(missing, self._group))]
            if self._fifo:
                rows = [self.row(row) for row in rows]
            with self.changed:
                self.rows += rows
                missing -= len(rows)
                if self._prefetch:
                    missing = self._wanted - len(self.rows)
                if missing <= 0 or self._group == 1:
                    self.changed.notify_all()
        if not self._prefetch:
            sampler.Close()

    def row(self, fields: list, times: int = 0) -> Row:
        """Returns a fifo's item with what must be known of it."""
        row = Row(fields)
        row.env_id, row.version = self._packing.head(fields[DATA], self._context)
        row.times = times
        return row

    def close(self) -> None:
        """Ends the thread, unless it waits for a server that is away."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            sampler = self._sampler
        if sampler is not None:
            sampler.Close()  # takes up to 3 s when the server is in this process, else no time
        self._thread.join(timeout=2.0)
