"""``SyncEnv`` steps all environments together; ``AsyncEnv`` does not wait for all of them.

Pools return rows of ``rlstack.types.TimeStep``, as dm_env defines a time step. Environments reset
themselves on the step after LAST. Pools check their arguments, so that a mistake raises an error in
the call that makes it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from rlstack.envs.adapters import EnvBuilder, Options
from rlstack.envs.auto_reset import builder_name
from rlstack.envs.backend import (
    Backend,
    MaskCount,
    PoolConfig,
    StepCheck,
    action_checks,
    check_ids,
)
from rlstack.envs.factory import make_backend
from rlstack.specs.masks import COUNTER
from rlstack.types import EnvSpec, PyTree, TimeStep

Self = TypeVar("Self", bound="Pool")


class Pool:
    """The common part of both pools: construction, checks of actions, closing."""

    is_sync: bool

    def __init__(self, name_or_builder: str | EnvBuilder, type_: str, config: PoolConfig):
        self._backend: Backend | None = make_backend(name_or_builder, type_, config)
        self.spec: EnvSpec = self._backend.spec
        self.num_envs = config.size
        self.env_ids = np.arange(config.size, dtype=np.int32)
        self.env_ids.setflags(write=False)
        self._config = config
        self._nest, self._checks = action_checks(self._backend, copy=not self.is_sync)
        name = builder_name(name_or_builder)
        self._check = StepCheck(name, self.spec, config.check_finite)
        self._masks = MaskCount(name, self.spec)
        self._failed = False

    def _open(self, where: str) -> Backend:
        if self._backend is None:
            raise RuntimeError(f"{where}: the pool must be open; it was closed.")
        if self._failed:
            raise RuntimeError(
                f"{where}: the pool must be usable; it failed earlier. Close it and make a new one."
            )
        return self._backend

    def _received(self, backend: Backend) -> tuple[np.ndarray, TimeStep]:
        env_ids, timestep = backend.recv()
        self._check(env_ids, timestep)
        if self._masks.total is not None:
            self._masks(env_ids, timestep)
        return env_ids, timestep

    def _checked(self, actions: PyTree, rows: int) -> list[np.ndarray]:
        leaves = [actions] if self._nest.bare else self._nest.flatten(actions, "Env pool: action")
        return [check(leaf, rows) for check, leaf in zip(self._checks, leaves, strict=True)]

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns numbers to log about the episodes that these environments ended last.

        The numbers are those in the ``info`` of an episode's last step, or for entities in the
        ``metrics`` of its last observation. Call it after ``recv`` has returned the last steps and
        before these environments return another one.

        Args:
          env_ids: ``[n]`` ids of environments.

        Returns:
          By name: the values, one for each of the episodes that have this number.
        """
        return self._open("episode_metrics").episode_metrics(env_ids)

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the ``info`` of the last step of each of these environments.

        The pool must have been made with ``step_info``. Call it after ``recv`` and before these
        environments return another step. After a FIRST, the numbers are those of an earlier step.
        """
        return self._open("step_infos").step_infos(env_ids)

    @property
    def functions(self) -> Any:
        """The environments as pure functions; None if they are not written in JAX.

        They are a `rlstack.jax_envs.environment.BatchedEnv` and the keys ``[B, ...]`` of the first
        `BatchedEnv.reset`.
        """
        return getattr(self._backend, "functions", None)

    @property
    def render_fps(self) -> float | None:
        """The steps in a second of these environments, for people; None if they do not say."""
        return getattr(self._backend, "render_fps", None)

    def render(self, env_id: int) -> np.ndarray | str | None:
        """Returns how an environment looks after its newest step.

        Returns:
          uint8 ``[H, W, 3]``, or text; None if the pool does not show its environments. Only those
          written in JAX are shown: environments in Python are rendered by themselves.
        """
        draw = getattr(self._open("render"), "render", None)
        return None if draw is None else draw(env_id)

    def stats(self) -> dict[str, int]:
        """Returns counters since construction, such as ``restarts`` of worker processes.

        Where there are action masks, ``masks_without_choice`` counts those without a legal action.
        """
        found = (self._backend or self._open("stats")).stats()  # also of a pool that failed
        return found if self._masks.total is None else {**found, COUNTER: self._masks.total}

    @property
    def last_restart(self) -> str:
        """Why a worker process was restarted last; empty if none was."""
        return str(getattr(self._backend, "last_restart", ""))

    def close(self) -> None:
        """Ends threads and processes and frees memory; safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SyncEnv(Pool):
    """Steps all environments together; row i belongs to environment i.

    Attributes:
      spec: the specs of one observation and one action, without a batch axis.
      num_envs: number of environments, B below.
      env_ids: ``[B]`` int32, 0 to B - 1.
      is_sync: True.
    """

    is_sync = True

    def __init__(
        self,
        name_or_builder: str | EnvBuilder,
        size: int,
        type: str = "auto",
        *,
        seed: int = 0,
        options: Options | None = None,
        num_workers: int | None = None,
        num_threads: int | None = None,
        **limits: Any,
    ):
        """Builds the environments; call ``reset`` to get the first rows.

        Args:
          name_or_builder: an EnvPool or Gymnasium id, ``"package.module:callable"``,
            ``"rust:PATH"`` of a program that has all environments (docs/rust.md), or a callable
            that returns a ``gymnasium.Env`` or a ``dm_env.Environment``. A builder with a ``seed``
            parameter receives the environment's seed, which is the only way to seed a dm_env.
          size: number of environments.
          type: ``"cpp"`` (EnvPool), ``"for_loop"``, ``"thread"``, ``"process"``, or ``"auto"``:
            cpp if EnvPool has the name, else for_loop. ``"jax"`` takes environments written in JAX,
            see `rlstack.jax_envs`.
          seed: environment i is seeded with ``seed + i``.
          options: keyword arguments of ``envpool.make``, ``gymnasium.make`` or the builder.
          num_workers: number of threads or processes; by default one per core, or up to 32 for
            ``"thread"``.
          num_threads: EnvPool's name of ``num_workers``.
          **limits: ``max_restarts``, ``restart_window``, ``step_timeout``, ``start_timeout``,
            ``check_finite``, ``step_info``, ``first_index`` and ``levels`` of ``PoolConfig``.

        Raises:
          ValueError: unknown name or type, or a size, seed or option out of range.
          TypeError: the builder is not callable, or ``type`` is cpp and it is not a name.
        """
        super().__init__(
            name_or_builder,
            type,
            PoolConfig(
                size,
                size,
                seed,
                dict(options or {}),
                _workers(num_workers, num_threads),
                **limits,
            ),
        )
        self._started = self._in_flight = False

    def reset(self) -> TimeStep:
        """Starts a new episode in every environment and returns the FIRST steps, ``[B, ...]``."""
        backend = self._open("SyncEnv.reset")
        self._failed = True  # unless all of the following succeeds
        if self._in_flight:
            backend.recv()
        backend.reset()
        timestep = self._received(backend)[1]
        self._failed, self._started, self._in_flight = False, True, False
        return timestep

    def step(self, actions: PyTree) -> TimeStep:
        """Steps every environment and returns rows ``[B, ...]`` in order of id.

        It calls ``send`` and ``recv``; their documentation lists arguments and errors.
        """
        self.send(actions)
        return self.recv()

    def send(self, actions: PyTree) -> None:
        """Starts a step of every environment; returns before it ends unless the type is for_loop.

        Args:
          actions: ``[B, ...]`` in the structure of ``spec.action``. Rows of environments that
            are at LAST are ignored. Real numbers are clipped to their bounds.

        Raises:
          ValueError, TypeError: the actions have a wrong structure, shape, dtype or range. No
            environment has been stepped.
          RuntimeError: called before ``reset``, after ``close``, twice without ``recv``, or after
            an environment failed.
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
        """Waits for every environment and returns rows ``[B, ...]`` in order of id.

        The arrays belong to the caller: later steps do not change them.

        Raises:
          RuntimeError: called without ``send``, after ``close``, or an environment failed.
          EnvError: a reward or an observation is not finite, or an integer is outside of its space.
        """
        if not self._in_flight or self._backend is None or self._failed:
            self._open("SyncEnv.recv")
            raise RuntimeError("SyncEnv.recv: send must come first.")
        self._failed = True
        timestep = self._received(self._backend)[1]
        self._failed, self._in_flight = False, False
        return timestep


class AsyncEnv(Pool):
    """Steps some environments while others are still in a step.

    ``async_reset`` puts all environments in flight, ``recv`` returns the first ``wait_num`` that
    are ready, and ``send`` puts received ones in flight again. Rows are in order of completion; the
    ids say which environment each row belongs to.

    Attributes:
      spec: the specs of one observation and one action, without a batch axis.
      num_envs: number of environments.
      wait_num: number of rows that one ``recv`` returns, B below.
      env_ids: ``[num_envs]`` int32, 0 to num_envs - 1.
      is_sync: False.
    """

    is_sync = False

    def __init__(
        self,
        name_or_builder: str | EnvBuilder,
        size: int,
        wait_num: int,
        type: str = "auto",
        *,
        seed: int = 0,
        options: Options | None = None,
        num_workers: int | None = None,
        num_threads: int | None = None,
        **limits: Any,
    ):
        """Builds the environments; call ``async_reset`` to start them.

        Args:
          name_or_builder: an id or a builder, as for ``SyncEnv``.
          size: number of environments.
          wait_num: number of rows that one ``recv`` waits for, at most ``size``.
          type: ``"cpp"``, ``"thread"``, ``"process"``, ``"jax"``, or ``"auto"``: cpp if EnvPool has
            the name, else thread. ``"for_loop"`` is an error, because a loop cannot run ahead of
            its caller.
          seed: environment i is seeded with ``seed + i``.
          options: keyword arguments of ``envpool.make``, ``gymnasium.make`` or the builder.
          num_workers: number of threads or processes; by default one per core, or up to 32 for
            ``"thread"``.
          num_threads: EnvPool's name of ``num_workers``.
          **limits: ``max_restarts``, ``restart_window``, ``step_timeout``, ``start_timeout``,
            ``check_finite``, ``step_info``, ``first_index`` and ``levels`` of ``PoolConfig``.

        Raises:
          ValueError: unknown name or type, or a number or option out of range.
          TypeError: the builder is not callable, or ``type`` is cpp and it is not a name.
        """
        if type == "for_loop":
            raise ValueError(
                "AsyncEnv: type must be 'cpp', 'thread' or 'process', because a loop cannot run "
                "ahead of its caller; got 'for_loop'. Use SyncEnv."
            )
        num_workers = _workers(num_workers, num_threads)
        config = PoolConfig(size, wait_num, seed, dict(options or {}), num_workers, **limits)
        super().__init__(name_or_builder, "async" if type == "auto" else type, config)
        self.wait_num = wait_num
        self._in_flight = np.zeros(size, bool)
        self._count = 0
        self._started = False

    def async_reset(self) -> None:
        """Starts a new episode in every environment, without waiting for the first steps.

        Raises:
          RuntimeError: environments are in flight.
        """
        backend = self._open("AsyncEnv.async_reset")
        if self._count:
            raise RuntimeError(
                f"AsyncEnv.async_reset: no environment may be in flight; {self._count} are. "
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
          EnvError: a reward or an observation is not finite, or an integer is outside of its space.
        """
        backend = self._open("AsyncEnv.recv")
        if self._count < self.wait_num:
            way_out = "Send more" if self._started else "Call async_reset first"
            raise RuntimeError(
                f"AsyncEnv.recv: at least wait_num={self.wait_num} environments must be in flight; "
                f"{self._count} are. {way_out}."
            )
        self._failed = True
        env_ids, timestep = self._received(backend)
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
          ValueError, TypeError: ids or actions have a wrong structure, shape, dtype or range, or an
            id is in flight. Nothing has been sent.
          RuntimeError: called before ``async_reset``, or after ``close``.
        """
        backend = self._open("AsyncEnv.send")
        if not self._started:
            raise RuntimeError("AsyncEnv.send: async_reset and recv must come first.")
        ids = check_ids(env_ids, self.num_envs)
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
    """Returns the number given by either name, or None."""
    if num_workers is not None and num_threads is not None and num_workers != num_threads:
        raise ValueError(
            "Env pool: num_workers and num_threads are two names of one number and must be equal; "
            f"got {num_workers} and {num_threads}. Give one of them."
        )
    return num_workers if num_workers is not None else num_threads
