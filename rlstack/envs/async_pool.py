"""``AsyncEnv``: environments that are ready do not wait for those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstack.envs.base import PoolConfig, rows_of
from rlstack.envs.pool import Builder, Pool, workers
from rlstack.types import PyTree, TimeStep


class AsyncEnv(Pool):
    """Steps some environments while others are still busy.

    ``async_reset`` puts all in flight, ``recv`` returns the first ``wait_num`` that are ready, and
    ``send`` puts received ones in flight again. Rows are in order of completion, so go by the ids.

    Attributes:
      spec: what one environment takes and gives, without a batch axis.
      num_envs: number of environments.
      wait_num: rows that one ``recv`` returns, B below.
      env_ids: ``[num_envs]`` int32, 0 to num_envs - 1.
      is_sync: False.
    """

    is_sync = False

    def __init__(
        self,
        name_or_builder: Builder,
        size: int,
        wait_num: int,
        type: str = "auto",
        *,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        num_workers: int | None = None,
        num_threads: int | None = None,
        **limits: Any,
    ):
        """Builds the environments; see ``SyncEnv`` for the arguments they share.

        Args:
          name_or_builder: an id or a builder.
          size: number of environments.
          wait_num: how many rows one ``recv`` waits for, at most ``size``.
          type: ``"cpp"``, ``"thread"``, ``"process"``, or ``"auto"``: cpp for a name that EnvPool
            has, else thread. A loop cannot run ahead of its caller, so ``"for_loop"`` is refused.
          seed: environment i is seeded with ``seed + i``.
          options: keywords for ``envpool.make``, ``gymnasium.make`` or the builder.
          num_workers: threads or processes; by default as many as there are cores.
          num_threads: the same, in EnvPool's word.
          **limits: ``max_restarts``, ``step_timeout`` and ``start_timeout`` of ``PoolConfig``.

        Raises:
          ValueError: unknown name or type, or a number or option out of range.
          TypeError: a builder that is not callable or builds something else.
        """
        if type == "for_loop":
            raise ValueError(
                "AsyncEnv: type must be 'cpp', 'thread' or 'process', because a loop cannot run "
                "ahead of its caller; got 'for_loop'. Use SyncEnv."
            )
        num_workers = workers(num_workers, num_threads)
        config = PoolConfig(size, wait_num, seed, dict(options or {}), num_workers, **limits)
        super().__init__(name_or_builder, "async" if type == "auto" else type, config)
        self.wait_num = wait_num
        self._in_flight = np.zeros(size, bool)
        self._count = 0
        self._started = False

    def async_reset(self) -> None:
        """Starts a new episode everywhere, without waiting for it.

        Raises:
          RuntimeError: environments are in flight; receive them first.
        """
        backend = self._open("AsyncEnv.async_reset")
        if self._count:
            raise RuntimeError(
                f"AsyncEnv.async_reset: nothing may be in flight; {self._count} environments are. "
                "Receive them first."
            )
        backend.reset()
        self._in_flight[:] = True
        self._count = self.num_envs
        self._started = True

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for ``wait_num`` environments and returns ``(env_ids [B] int32, rows [B, ...])``.

        The arrays belong to the caller.

        Raises:
          RuntimeError: fewer than ``wait_num`` are in flight, the pool is closed, or an
            environment failed.
        """
        backend = self._open("AsyncEnv.recv")
        if self._count < self.wait_num:
            way_out = "send more" if self._started else "call async_reset first"
            raise RuntimeError(
                f"AsyncEnv.recv: at least wait_num={self.wait_num} environments must be in flight; "
                f"{self._count} are. Way out: {way_out}."
            )
        self._failed = True
        env_ids, timestep = backend.recv()
        self._failed = False
        self._in_flight[env_ids] = False
        self._count -= self.wait_num
        return env_ids, timestep

    def send(self, env_ids: np.ndarray, actions: PyTree) -> None:
        """Steps received environments; row i of ``actions`` goes to ``env_ids[i]``.

        Args:
          env_ids: ``[n]`` distinct ids, none of them in flight.
          actions: ``[n, ...]`` in the structure of ``spec.action``, copied here.

        Raises:
          ValueError, TypeError: ids or actions of a wrong structure, shape, dtype or range, or an
            id in flight; nothing has been sent.
          RuntimeError: before ``async_reset``, or after ``close``.
        """
        backend = self._open("AsyncEnv.send")
        if not self._started:
            raise RuntimeError("AsyncEnv.send: async_reset and recv must come first.")
        ids = rows_of(env_ids, self.num_envs)
        busy = self._in_flight[ids]
        if busy.any():
            raise ValueError(
                f"AsyncEnv.send: env_ids must have been received; {ids[busy].tolist()} are in "
                "flight. Receive them first."
            )
        checked = self._checked(actions, ids.size)
        backend.send(ids, checked)
        self._in_flight[ids] = True
        self._count += ids.size
