"""What both kinds of pool share, and ``SyncEnv``: all environments step together.

Pools show ``rlstack.types.TimeStep`` rows with dm_env's meaning of time and reset themselves on the
step after LAST. They check what comes in, so that a mistake is an error at the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.envs.base import Backend, PoolConfig, action_checks
from rlstack.envs.registry import make_backend
from rlstack.types import EnvSpec, PyTree, TimeStep

Builder = str | Callable[..., Any]


class Pool:
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


class SyncEnv(Pool):
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
        super().__init__(
            name_or_builder,
            type,
            PoolConfig(
                size,
                size,
                seed,
                dict(options or {}),
                workers(num_workers, num_threads),
                **limits,
            ),
        )
        self._started = self._in_flight = False

    def reset(self) -> TimeStep:
        """Starts a new episode everywhere and returns its FIRST steps, ``[B, ...]``."""
        backend = self._open("SyncEnv.reset")
        self._failed = True  # unless the next lines succeed
        if self._in_flight:
            backend.recv()
        backend.reset()
        timestep = backend.recv()[1]
        self._failed, self._started, self._in_flight = False, True, False
        return timestep

    def step(self, actions: PyTree) -> TimeStep:
        """Steps every environment and returns ``[B, ...]`` rows in order of id.

        It is ``send`` and ``recv`` in one; see there.
        """
        self.send(actions)
        return self.recv()

    def send(self, actions: PyTree) -> None:
        """Steps every environment, without waiting where the kind of pool can work meanwhile.

        Args:
          actions: ``[B, ...]`` in the structure of ``spec.action``. Rows of environments that
            are at LAST are ignored. Real numbers are clipped to their bounds.

        Raises:
          ValueError, TypeError: actions of a wrong structure, shape, dtype or range; nothing has
            been stepped.
          RuntimeError: before ``reset``, after ``close``, twice without ``recv``, or when an
            environment failed.
        """
        backend = self._backend
        if backend is None or self._failed or not self._started or self._in_flight:
            self._open("SyncEnv.step")
            rule = (
                "recv must come before the next send"
                if self._in_flight
                else "reset must come first"
            )
            raise RuntimeError(f"SyncEnv.step: {rule}.")
        checked = self._checked(actions, self.num_envs)
        self._failed = True
        backend.send(None, checked)
        self._failed, self._in_flight = False, True

    def recv(self) -> TimeStep:
        """Waits for every environment and returns ``[B, ...]`` rows in order of id.

        The arrays belong to the caller: later steps do not change them.

        Raises:
          RuntimeError: without a ``send`` before, after ``close``, or when an environment failed.
        """
        if not self._in_flight or self._backend is None or self._failed:
            self._open("SyncEnv.recv")
            raise RuntimeError("SyncEnv.recv: send must come first.")
        self._failed = True
        timestep = self._backend.recv()[1]
        self._failed, self._in_flight = False, False
        return timestep


def workers(num_workers: int | None, num_threads: int | None) -> int | None:
    """Returns the number under either of its names, None for neither."""
    if num_workers is not None and num_threads is not None and num_workers != num_threads:
        raise ValueError(
            "Env pool: num_workers and num_threads are two words for one number; "
            f"got {num_workers} and {num_threads}."
        )
    return num_workers if num_workers is not None else num_threads
