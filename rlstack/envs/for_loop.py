"""Environments stepped one after the other by the caller: the pool for debugging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.envs.base import PoolConfig, described
from rlstack.envs.episode import Rows, build, close_all
from rlstack.types import TimeStep


class ForLoopBackend:
    """A loop over environments; see ``rlstack.envs.base.Backend``. What they raise, it raises."""

    def __init__(self, builder: Callable[..., Any], config: PoolConfig):
        """Builds the environments here."""
        seeds = {i: config.seed + i for i in range(config.size)}
        self._episodes = build(builder, config.options, seeds)
        head = self._episodes[0]
        self._observed = head.observed
        self.spec, self.action_dtypes, self.action_offsets = described(head.observed, head.acted)
        self._size = config.size
        self._told = [(i, e) for i, e in self._episodes.items() if e.announces]
        self._rows = self._fresh()

    def _fresh(self) -> Rows:
        return Rows(self._observed.leaves, self._size)

    def reset(self) -> None:
        """Starts a new episode everywhere."""
        self._rows = self._fresh()
        for _, episode in self._told:
            episode.announce(None, together=True)
        for i, episode in self._episodes.items():
            episode.reset(self._rows, i)

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps all environments; a loop has no use for ids."""
        del env_ids
        self._rows = self._fresh()
        for i, episode in self._told:
            episode.announce([a[i] for a in actions], together=True)
        for i, episode in self._episodes.items():
            episode.step([a[i] for a in actions], self._rows, i)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns all rows."""
        rows = self._rows
        observation = self._observed.unflatten(rows.leaves)
        ids = np.arange(self._size, dtype=np.int32)
        return ids, TimeStep(rows.step_type, rows.reward, rows.discount, observation)

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, always 0: a failing environment fails the pool."""
        return {"restarts": 0}

    def close(self) -> None:
        """Closes the environments."""
        episodes, self._episodes, self._told = self._episodes, {}, []
        close_all(episodes)
