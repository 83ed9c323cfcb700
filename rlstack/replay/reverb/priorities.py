"""Priorities of items on a Reverb server (Schaul et al. 2016, https://arxiv.org/abs/1511.05952)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from rlstack.replay.base import ReplayConfig
from rlstack.replay.prioritized import PRIORITY_FLOOR, checked_priorities, importance_weights
from rlstack.replay.reverb.calls import Calls, Shared, result_of
from rlstack.replay.reverb.tables import ITEMS, LARGEST_PRIORITY, put_number

_GROWTH = 1.01  # factor by which the largest priority must have grown for writers to be told
_WHERE = "ReverbReplayBuffer.update_priorities"


class Priorities:
    """What a reader does with priorities; nothing, unless the sampler is prioritized."""

    def __init__(
        self,
        cfg: ReplayConfig,
        client: Any,
        address: str,
        calls: Calls,
        shared: Shared,
        *,
        at_once: bool,
    ):
        """Makes them for one reader.

        Args:
          cfg: the table.
          client: of the server.
          address: the server's.
          calls: who makes calls that may block.
          shared: holds the largest priority.
          at_once: whether an update is done when ``update`` returns.
        """
        self._cfg, self._client, self._address = cfg, client, address
        self._calls, self._shared, self._at_once = calls, shared, at_once
        self._told = 1.0  # the largest priority that writers were told
        self._under_way: Future | None = None

    def weights(self, count: int, odds: np.ndarray | None, samples: int) -> np.ndarray:
        """Returns importance weights (section 3.4), [B] float32.

        Args:
          count: items.
          odds: how much likelier than on average each item was drawn, N * P, [B]; None for not.
          samples: items sampled before.
        """
        if odds is None:
            return np.ones(count, np.float32)
        return importance_weights(self._cfg, odds, samples)

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys."""
        keys, priorities = checked_priorities("ReverbReplayBuffer", keys, priorities)
        if self._cfg.sampler != "prioritized" or not keys.size:
            return
        priorities = np.maximum(priorities, PRIORITY_FLOOR)
        self._shared.saw_priority(float(priorities.max()))
        pairs = list(zip(keys.tolist(), priorities.tolist(), strict=True))
        self._await()  # at most one is under way
        self._under_way = self._calls.submit(self._send, pairs)
        if self._at_once:
            self._await()

    def _send(self, pairs: list[tuple[int, float]]) -> None:
        self._client.MutatePriorities(ITEMS, pairs, [])
        largest = self._shared.largest_priority
        if largest > self._told * (1.0 if self._at_once else _GROWTH):
            put_number(self._client, LARGEST_PRIORITY, largest)
            self._told = largest

    def _await(self) -> None:
        """Waits for the update under way."""
        if self._under_way is not None:
            result_of(self._under_way, _WHERE, self._address, self._cfg.timeout_seconds)
            self._under_way = None
