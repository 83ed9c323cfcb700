"""A pool of environments written in JAX, with one jitted step; see `rlstack.envs.backend`."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.checks import EnvError
from rlstack.envs.backend import PoolConfig, spec_fields
from rlstack.envs.episode_metrics import by_name
from rlstack.envs.nest import Nest, StepNest
from rlstack.jax_envs.environment import BatchedEnv, BatchState, Numbered
from rlstack.jax_envs.factory import JaxEnvBuilder, make_batch, resolve
from rlstack.jax_envs.game import BatchedGame
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.types import PRNGKey, PyTree, TimeStep


class _Compiled(NamedTuple):
    """A batch of environments with its jitted functions."""

    env: BatchedEnv
    reset: Callable[..., Any]
    step: Callable[..., Any]
    step_rows: Callable[..., Any]  # steps some rows of the batch
    metrics: Callable[..., Any]  # numbers of the episodes that end in a state


class _Options(dict[str, Any]):
    """Options as a key: equal if their texts are, so that 1 and True differ."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._text())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options) and self._text() == other._text()

    def _text(self) -> str:
        return repr(sorted(self.items()))


# Each evaluation makes a pool, which must not be compiled again.
@functools.lru_cache(maxsize=8)
def _compiled(builder: str | JaxEnvBuilder, options: _Options, levels: int) -> _Compiled:
    env = make_batch(builder, options, levels)

    def step_rows(
        state: BatchState, rows: np.ndarray, action: PyTree
    ) -> tuple[BatchState, TimeStep]:
        after, timestep = env.step(jax.tree.map(lambda x: x[rows], state), action)
        return jax.tree.map(lambda old, new: old.at[rows].set(new), state, after), timestep

    metrics = jax.jit(env.episode_metrics)
    return _Compiled(
        env, CompiledQuickly(env.reset), jax.jit(env.step), jax.jit(step_rows), metrics
    )


class JaxBackend:
    """Environments that JAX steps in the caller's thread, all at once.

    An asynchronous pool steps environments when it receives their actions, and returns them in the
    same order.
    """

    def __init__(self, name_or_builder: str | JaxEnvBuilder, config: PoolConfig):
        """Builds the environments; environment i has the seed ``config.seed + i``.

        Raises:
          EnvError: the environments are seats of games, which step together, and the pool is not
            synchronous.
        """
        options = _Options(config.options)
        compiled = _compiled(resolve(name_or_builder), options, config.levels)
        env = compiled.env
        if isinstance(env, BatchedGame) and config.wait_num != config.size:
            raise EnvError(
                f"JAX game {env.name}: all seats of a game step together, so a batch must "
                f"have all {config.size} rows; got wait_num={config.wait_num}. Use wait_num 0."
            )
        self._wait = config.wait_num
        self._action = Nest(env.spec.action)
        self.spec, self.action_dtypes, self.action_offsets = spec_fields(
            StepNest(env.spec.observation, env.spec.extras), self._action
        )
        self._ids = np.arange(config.size, dtype=np.int32)
        keys = env.keys([config.seed + i for i in range(config.size)])
        self._first: PRNGKey | Numbered = keys
        if config.first_index is not None and env.has_index:
            self._first = Numbered(keys, self._ids + config.first_index)
        self._state: BatchState | None = None
        self._ready: deque[tuple[np.ndarray, TimeStep]] = deque()
        self._env, self._reset, self._step = env, compiled.reset, compiled.step
        self._step_rows, self._metrics = compiled.step_rows, compiled.metrics
        self._ended: dict[int, dict[str, float]] = {}  # numbers of the newest episode by its row

    def reset(self) -> None:
        """Starts a new episode in every environment."""
        rng_key = self._first if self._state is None else self._state.rng_key
        self._ready.clear()
        self._state, timestep = self._reset(rng_key)
        self._put(self._ids, timestep)

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        action = self._action.unflatten(actions)
        if env_ids is None:
            self._state, timestep = self._step(self._state, action)
        else:
            self._state, timestep = self._step_rows(self._state, env_ids, action)
        self._put(self._ids if env_ids is None else env_ids, timestep)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns ``wait_num`` rows, those first that were sent first."""
        parts, missing = [], self._wait
        while missing:
            ids, rows = self._ready.popleft()
            if len(ids) > missing:
                rest = jax.tree.map(lambda x, n=missing: x[n:], rows)
                self._ready.appendleft((ids[missing:], rest))
                ids, rows = ids[:missing], jax.tree.map(lambda x, n=missing: x[:n], rows)
            parts.append((ids, rows))
            missing -= len(ids)
        if len(parts) == 1:
            return parts[0]
        together = jax.tree.map(lambda *x: np.concatenate(x), *(rows for _, rows in parts))
        return np.concatenate([ids for ids, _ in parts]), together

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers of the last episodes of these environments, by name."""
        return by_name(self._ended.get(i, {}) for i in env_ids.tolist())

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns no numbers, because environments in JAX give none."""
        return [{} for _ in env_ids]

    @property
    def functions(self) -> tuple[BatchedEnv, PRNGKey | Numbered]:
        """See `rlstack.envs.pool.Pool.functions`."""
        return self._env, self._first

    @property
    def render_fps(self) -> float | None:
        """See `rlstack.envs.pool.Pool.render_fps`."""
        return self._env.render_fps

    def render(self, env_id: int) -> np.ndarray | str | None:
        """Returns a picture of an environment after its newest step, or text, or None."""
        return None if self._state is None else self._env.render(self._state, env_id)

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, always 0: nothing here can be restarted."""
        return {"restarts": 0}

    def close(self) -> None:
        """Frees the states."""
        self._state = None
        self._ready.clear()

    def _put(self, env_ids: np.ndarray, timestep: TimeStep) -> None:
        rows = jax.tree.map(np.asarray, timestep)
        if self._env.metric_names and (ended := env_ids[rows.last()]).size:
            found = {name: np.asarray(x) for name, x in self._metrics(self._state).items()}
            self._ended.update({i: {n: x[i].item() for n, x in found.items()} for i in ended})
        self._ready.append((env_ids.copy(), rows))
