"""A thread that takes items from a Reverb server, as many as are wanted."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from rlstack.replay.reverb_packing import Packing
from rlstack.replay.reverb_server import ITEMS, table_info

_ASK = 0.02  # seconds between questions whether min_size is reached


@dataclasses.dataclass
class Row:
    """An item that was sampled."""

    key: int
    odds: float  # N * P, at the time it was sampled
    data: np.ndarray  # [T+1, step_bytes]
    env_id: int = -1
    version: int = -1
    times: int = 0  # batches it has been in


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
        *,
        prefetch: int,
        min_size: int,
        with_heads: bool,
    ):
        """Starts the thread.

        Args:
          client: of the server.
          address: the server's.
          packing: of the items.
          prefetch: items that Reverb fetches ahead; 0 for exactly those wanted, when wanted.
          min_size: items that must have been inserted before the first is taken.
          with_heads: whether to read environments and versions at once.
        """
        self._client, self._address, self._packing = client, address, packing
        self._prefetch, self._min_size, self._with_heads = prefetch, min_size, with_heads
        self.rows: list[Row] = []
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self._wanted = 0
        self._closed = False
        self._sampler: Any = None
        self._thread = threading.Thread(target=self._run, name="reverb-fetcher", daemon=True)
        self._thread.start()

    def want(self, count: int) -> None:
        """Asks for so many items to be here; hold ``changed``."""
        if count != self._wanted:
            self._wanted = count
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
        while missing:
            row = self._row(sampler.GetNextTrajectory())  # without the interpreter's lock
            with self.changed:
                self.rows.append(row)
                if self._prefetch:
                    missing = max(0, self._wanted - len(self.rows))
                else:
                    missing -= 1
                if not missing:
                    self.changed.notify_all()
        if not self._prefetch:
            sampler.Close()

    def _row(self, fields: list) -> Row:
        key, probability, size, _, data = fields
        row = Row(int(key), float(probability) * float(size), data)
        if self._with_heads:
            row.env_id, row.version = self._packing.head(data)
        return row

    def close(self) -> None:
        """Ends the thread, unless it waits for a server that is away."""
        with self.changed:
            self._closed = True
            if self._sampler is not None:
                self._sampler.Close()
            self.changed.notify_all()
        self._thread.join(timeout=2.0)
