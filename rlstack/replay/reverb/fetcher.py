"""Threads that take items from a Reverb server, as many as are wanted."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from rlstack.replay.base import ReplayConfig
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.rows import Drawn, draw, make_row
from rlstack.replay.reverb.rules import TableInfo, is_early, is_plentiful
from rlstack.replay.reverb.tables import ITEMS, table_info

_ASK = 0.02  # seconds between questions whether min_size is reached


class Fetcher:
    """Holds what was sampled and not yet handed out, oldest first; a base.

    The thread asks for items only while fewer are here than are wanted, so that it does not fight
    over the interpreter with a learner that has what it needs.

    Attributes:
      changed: to be held, and notified, where anything here is touched.
      error: what ended the thread, or None.
    """

    def __init__(self) -> None:
        """Starts the thread; what `_fetch` needs must be there."""
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self._wanted = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reverb-fetcher", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Items that are here."""
        raise NotImplementedError

    def want(self, count: int) -> None:
        """Asks for so many items to be here; hold ``changed``."""
        self._wanted = count
        if count > self.count:
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            self._prepare()
            while self._wait_until_wanted():
                self._fetch()
        except Exception as error:
            with self.changed:
                if not self._closed:
                    self.error = error
                self.changed.notify_all()

    def _wait_until_wanted(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self._closed or self._wanted > self.count)
            return not self._closed

    def _prepare(self) -> None:
        """Waits, in the thread, for what fetching needs."""

    def _fetch(self) -> None:
        """Takes items until there are as many as wanted."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """Wakes the thread where it waits for the server."""

    def close(self) -> None:
        """Ends the thread, unless it waits for a server that is away."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._interrupt()
        self._thread.join(timeout=2.0)


class ItemFetcher(Fetcher):
    """Takes items one by one.

    Prefetching is done by Reverb's own threads, which need no interpreter.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        packing: Packing,
        cfg: ReplayConfig,
        room: int,
        *,
        prefetch: int,
        rows: list[Any],
    ):
        """Starts the thread.

        Args:
          client: of the server.
          address: the server's.
          packing: of the items.
          cfg: the table.
          room: items that the table holds.
          prefetch: items that Reverb fetches ahead; 0 for exactly those wanted, when wanted.
          rows: where the items go; Rows, if the sampler is fifo.
        """
        self._client, self._address, self._packing = client, address, packing
        self._prefetch, self._cfg, self._room = prefetch, cfg, room
        self._rows = rows
        self._sampler: Any = None
        # Where items are scarce, each is shown at once; elsewhere that would only take time.
        self._group = cfg.batch_size if is_plentiful(cfg) else 1
        super().__init__()

    @property
    def count(self) -> int:
        """Items that are here."""
        return len(self._rows)

    def drawn(self, taken: list[list]) -> Drawn:
        """Makes a batch of rows."""
        return draw(self._packing, taken, odds=self._cfg.sampler == "prioritized")

    def _prepare(self) -> None:
        if self._prefetch:  # else whoever wants items has looked
            early = functools.partial(is_early, self._cfg, self._room)
            wait_while(early, self._client, self._address, lambda: self._closed)

    def _fetch(self) -> None:
        """Takes items until there are as many as wanted."""
        with self.changed:
            missing = self._wanted - len(self._rows)
            if self._closed or missing <= 0:
                return
            if not self._prefetch:
                self._sampler = self._client.NewSampler(ITEMS, missing, missing)
            elif self._sampler is None:
                self._sampler = self._client.NewSampler(ITEMS, -1, self._prefetch)
            sampler = self._sampler
        get = sampler.GetNextTrajectory  # waits without the interpreter's lock
        while missing > 0:
            rows = [get() for _ in range(min(missing, self._group))]
            if self._cfg.sampler == "fifo":
                rows = [make_row(self._packing, self._cfg, row) for row in rows]
            with self.changed:
                self._rows += rows
                missing -= len(rows)
                if self._prefetch:
                    missing = self._wanted - len(self._rows)
                if missing <= 0 or self._group == 1:
                    self.changed.notify_all()
        if not self._prefetch:
            sampler.Close()

    def _interrupt(self) -> None:
        with self.changed:
            sampler = self._sampler
        if sampler is not None:
            sampler.Close()  # takes up to 3 s when the server is in this process, else no time


def wait_while(
    early: Callable[[TableInfo], bool], client: Any, address: str, closed: Callable[[], bool]
) -> None:
    """Waits until the table may be sampled, or nobody wants to."""
    while not closed():
        try:
            if not early(table_info(client, address, 1.0)):
                return
        except TimeoutError:
            pass  # the server may come back
        time.sleep(_ASK)
