"""Environments stepped one after another in the caller's thread: the pool for debugging."""

from __future__ import annotations

import numpy as np

from rlstack.envs.adapters import EnvBuilder
from rlstack.envs.auto_reset import (
    TimestepBuffer,
    build_all,
    builder_name,
    close_all,
    empty_buffer,
)
from rlstack.envs.backend import PoolConfig, spec_fields
from rlstack.envs.episode_metrics import by_name
from rlstack.envs.watch import Limit, Watch
from rlstack.types import TimeStep


class ForLoopBackend:
    """A loop over environments; see ``rlstack.envs.backend.Backend``.

    Every method passes on the exceptions of the environments, and raises an error if one of them
    does not return within ``step_timeout``. The pool has then failed.
    """

    def __init__(self, builder: EnvBuilder, config: PoolConfig):
        """Builds the environments."""
        seeds = {i: config.seed + i for i in range(config.size)}
        self._watch = Watch(builder_name(builder))
        self._limit = Limit(config.step_timeout, "step_timeout")
        with self._watch.calls(
            "the builder", Limit(config.start_timeout, "start_timeout")
        ) as watch:
            self._envs = build_all(
                builder,
                config.options,
                seeds,
                config.step_info,
                config.first_index,
                config.levels,
                watch,
            )
        head = self._envs[0]
        self._shown = head.shown
        self.spec, self.action_dtypes, self.action_offsets = spec_fields(head.shown, head.action)
        self._size = config.size
        self._announced = [(i, env) for i, env in self._envs.items() if env.announces]
        self._buffer = self._fresh_buffer()
        self._metrics: dict[int, dict[str, float]] = {}  # id -> numbers of the last episode

    def _fresh_buffer(self) -> TimestepBuffer:
        return empty_buffer(self._shown.leaves, self._size)

    def reset(self) -> None:
        """Starts a new episode in every environment."""
        self._buffer = self._fresh_buffer()
        with self._watch.calls("a reset", self._limit) as watch:
            for watch.at, env in self._announced:
                env.announce(None, together=True)
            for watch.at, env in self._envs.items():
                env.reset(self._buffer, watch.at)

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps all environments; ``env_ids`` is ignored."""
        del env_ids
        self._buffer = self._fresh_buffer()
        with self._watch.calls("a step", self._limit) as watch:
            for i, env in self._announced:
                watch.at = i
                env.announce([a[i] for a in actions], together=True)
            for i, env in self._envs.items():
                watch.at = i
                metrics = env.step([a[i] for a in actions], self._buffer, i)
                if metrics is not None:
                    self._metrics[i] = metrics

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns all rows."""
        step_type, reward, discount, leaves = self._buffer
        ids = np.arange(self._size, dtype=np.int32)
        return ids, TimeStep(step_type, reward, discount, *self._shown.unflatten(leaves))

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers of the last episodes of these environments, by name."""
        return by_name(self._metrics.get(i, {}) for i in env_ids.tolist())

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the info of the last step of each of these environments."""
        return [self._metrics.get(i, {}) for i in env_ids.tolist()]

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, always 0: a failing environment fails the pool."""
        return {"restarts": 0}

    def close(self) -> None:
        """Closes the environments."""
        envs, self._envs, self._announced = self._envs, {}, []
        with self._watch.calls("close", self._limit) as watch:
            close_all(envs, watch)
