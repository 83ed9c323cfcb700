"""``SyncEnv`` and ``AsyncEnv``: batches of environments behind one interface.

Both show ``rlstack.types.TimeStep`` rows with dm_env's meaning of time and reset themselves on the
step after LAST. They check what comes in, so that a mistake is an error at the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.envs.base import Backend, PoolConfig, action_checks, rows_of
from rlstack.envs.registry import make_backend
from rlstack.types import EnvSpec, PyTree, TimeStep

Builder = str | Callable[..., Any]


class _Pool:
    """What both pools share: construction, checks of actions, closing."""

    is_sync: bool

    def __init__(self, name_or_builder: Builder, type_: str, config: PoolConfig):
        self._backend: Backend | None = make_backend(name_or_builder, type_, config)
        self.spec: EnvSpec = self._backend.spec
        self.num_envs = config.size
        self.env_ids = np.arange(config.size, dtype=np.int32)
        self.env_ids.setflags(write=False)
        self._config = config
        self._nest, self._checks = action_checks(self._backend, copy=not self.is_sync)
        self._failed = False

    def _open(self, where: str) -> Backend:
        if self._backend is None:
            raise RuntimeError(f"{where}: the pool must be open; it was closed.")
        if self._failed:
            raise RuntimeError(f"{where}: the pool failed earlier. Close it and make a new one.")
        return self._backend

    def _checked(self, actions: PyTree, rows: int) -> list[np.ndarray]:
        leaves = [actions] if self._nest.bare else self._nest.flatten(actions, "Env pool: action")
        return [check(leaf, rows) for check, leaf in zip(self._checks, leaves, strict=True)]

    def stats(self) -> dict[str, int]:
        """Returns counters since construction, such as ``restarts`` of worker processes."""
        return self._open("stats").stats()

    def close(self) -> None:
        """Ends threads and processes and frees memory; safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SyncEnv(_Pool):
    """Steps all environments together; row i is environment i.

    Attributes:
      spec: what one environment takes and gives, without a batch axis.
      num_envs: number of environments, B below.
      env_ids: ``[B]`` int32, 0 to B - 1.
      is_sync: True.
    """

    is_sync = True

    def __init__(
        self,
        name_or_builder: Builder,
        size: int,
        type: str = "auto",
        *,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        num_workers: int | None = None,
        num_threads: int | None = None,
        **limits: Any,
    ):
        """Builds the environments; nothing is shown before ``reset``.

        Args:
          name_or_builder: an EnvPool or Gymnasium id, ``"package.module:callable"``, or a callable
            that returns a ``gymnasium.Env`` or a ``dm_env.Environment``. A builder with a ``seed``
            parameter is given the environment's seed; dm_env knows no other way.
          size: number of environments.
          type: ``"cpp"`` (EnvPool), ``"for_loop"``, ``"thread"``, ``"process"``, or ``"auto"``:
            cpp for a name that EnvPool has, else for_loop.
          seed: environment i is seeded with ``seed + i``.
          options: keywords for ``envpool.make``, ``gymnasium.make`` or the builder.
          num_workers: threads or processes; by default as many as there are cores, or up to 32
            for ``"thread"``.
          num_threads: the same, in EnvPool's word.
          **limits: ``max_restarts``, ``step_timeout`` and ``start_timeout`` of ``PoolConfig``.

        Raises:
          ValueError: unknown name or type, or a size, seed or option out of range.
          TypeError: a builder that is not callable or builds something else.
        """
        workers = _workers(num_workers, num_threads)
        super().__init__(
            name_or_builder,
            type,
            PoolConfig(size, size, seed, dict(options or {}), workers, **limits),
        )
        self._started = False

    def reset(self) -> TimeStep:
        """Starts a new episode everywhere and returns its FIRST steps, ``[B, ...]``."""
        backend = self._open("SyncEnv.reset")
        self._failed = True  # unless the next two lines succeed
        backend.reset()
        timestep = backend.recv()[1]
        self._failed, self._started = False, True
        return timestep

    def step(self, actions: PyTree) -> TimeStep:
        """Steps every environment and returns ``[B, ...]`` rows in order of id.

        The arrays belong to the caller: later steps do not change them.

        Args:
          actions: ``[B, ...]`` in the structure of ``spec.action``. Rows of environments that
            are at LAST are ignored. Real numbers are clipped to their bounds.

        Raises:
          ValueError, TypeError: actions of a wrong structure, shape, dtype or range; nothing has
            been stepped.
          RuntimeError: before ``reset``, after ``close``, or when an environment failed.
        """
        backend = self._backend
        if backend is None or self._failed or not self._started:
            self._open("SyncEnv.step")
            raise RuntimeError("SyncEnv.step: reset must come first.")
        checked = self._checked(actions, self.num_envs)
        self._failed = True
        backend.send(None, checked)
        timestep = backend.recv()[1]
        self._failed = False
        return timestep


class AsyncEnv(_Pool):
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
        workers = _workers(num_workers, num_threads)
        config = PoolConfig(size, wait_num, seed, dict(options or {}), workers, **limits)
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


def _workers(num_workers: int | None, num_threads: int | None) -> int | None:
    if num_workers is not None and num_threads is not None and num_workers != num_threads:
        raise ValueError(
            "Env pool: num_workers and num_threads are two words for one number; "
            f"got {num_workers} and {num_threads}."
        )
    return num_workers if num_workers is not None else num_threads
