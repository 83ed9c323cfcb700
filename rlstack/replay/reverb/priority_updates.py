"""Priorities that a reader of the Reverb replay sends to the server."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.prioritized import PRIORITY_FLOOR, checked_priorities
from rlstack.replay.reverb.binding import Client
from rlstack.replay.reverb.client import (
    ITEMS,
    LARGEST_PRIORITY,
    CallThread,
    SharedMaxima,
    put_number,
    result_of,
)

_GROWTH = 1.01  # growth of the largest priority before it is sent to writers


class PriorityUpdates:
    """Sends a reader's priorities to the server (Schaul et al. 2016)."""

    def __init__(
        self,
        cfg: ReplayConfig,
        client: Client,
        address: str,
        calls: CallThread,
        maxima: SharedMaxima,
        *,
        at_once: bool,
    ):
        """Stores the arguments; sends nothing yet.

        Args:
          cfg: the rules of the table.
          client: a client of the server.
          address: the server's address.
          calls: the thread that makes the calls, which may block.
          maxima: contains the largest priority.
          at_once: whether ``update`` waits until the update is done.
        """
        self._cfg, self._client, self._address = cfg, client, address
        self._calls, self._maxima, self._at_once = calls, maxima, at_once
        self._told = 1.0  # the largest priority sent to writers
        self._pending: Future[None] | None = None

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys, if the sampler uses priorities."""
        keys, priorities = checked_priorities("ReverbReplayBuffer", keys, priorities)
        if self._cfg.sampler != "prioritized" or not keys.size:
            return
        priorities = np.maximum(priorities, PRIORITY_FLOOR)
        self._maxima.saw_priority(float(priorities.max()))
        pairs = list(zip(keys.tolist(), priorities.tolist(), strict=True))
        self._await()  # so that at most one update is pending
        self._pending = self._calls.submit(self._send, pairs)
        if self._at_once:
            self._await()

    def _send(self, pairs: list[tuple[int, float]]) -> None:
        self._client.MutatePriorities(ITEMS, pairs, [])
        largest = self._maxima.largest_priority
        if largest > self._told * (1.0 if self._at_once else _GROWTH):
            put_number(self._client, LARGEST_PRIORITY, largest)
            self._told = largest

    def _await(self) -> None:
        """Waits for the pending update."""
        if self._pending is not None:
            where = "ReverbReplayBuffer.update_priorities"
            result_of(self._pending, where, self._address, self._cfg.timeout_seconds)
            self._pending = None
