"""Entries of a library's ``info`` as the extras of its environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.game import is_game
from rlstack.types import PRNGKey, PyTree

OPTION = "extras"  # of an environment: the names of the entries


class InfoState(NamedTuple):
    """The state of an environment, and what its ``info`` said of the step that led to it."""

    env: PyTree
    shown: dict[str, PyTree]


class WithInfos:
    """An environment or game that shows entries of ``info`` as extras, 0 at FIRST.

    In a game, an entry of dicts by agent, or of arrays ``[S, ...]`` of S seats, is each seat's own.
    All seats see any other entry.
    """

    def __init__(self, env: Any, names: Sequence[str], where: str) -> None:
        """Stores an adapter of a library.

        Args:
          env: a `rlstack.jax_envs.environment.JaxEnv` or a game. Its method ``step_with_info`` has
            the arguments of ``step`` and returns the outcome and the library's ``info``.
          names: the entries to show.
          where: the name of the environment, for errors.

        Raises:
          ValueError: ``info`` has no such entry.
        """
        self._env = env
        self._names = [names] if isinstance(names, str) else list(names)
        self._seats = tuple(env.seats) if is_game(env) else ()
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        seats = (len(self._seats),) if self._seats else ()
        action = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct((*seats, *spec.shape), spec.dtype), env.action_spec()
        )
        state, _ = jax.eval_shape(env.reset, key)
        _, info = jax.eval_shape(env.step_with_info, key, state, action)
        if unknown := [name for name in self._names if name not in info]:
            raise ValueError(
                f"JAX environment {where}: the option {OPTION} must name entries of its info, any "
                f"of {', '.join(map(str, info)) or 'none'}; got {', '.join(map(str, unknown))}."
            )
        self._shapes = jax.eval_shape(self._chosen, info)

    def __getattr__(self, name: str) -> Any:
        # `seats` and the like; methods below take states, which are other ones here.
        if "_env" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(self._env, name)

    def extras_spec(self) -> PyTree:
        """Returns the specs of the chosen entries, of one seat in games."""
        lead = 1 if self._seats else 0
        return {
            name: jax.tree.map(lambda x: specs.Array(x.shape[lead:], np.dtype(x.dtype)), entry)
            for name, entry in self._shapes.items()
        }

    def extras(self, state: InfoState) -> PyTree:
        """Returns the chosen entries at the step that led to a state."""
        return state.shown

    def reset(self, rng_key: PRNGKey) -> tuple[InfoState, PyTree]:
        """Starts an episode."""
        state, observation = self._env.reset(rng_key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._shapes)
        return InfoState(state, zeros), observation

    def step(self, rng_key: PRNGKey, state: InfoState, action: PyTree) -> Any:
        """Takes an action, or in a game those of all seats."""
        outcome, info = self._env.step_with_info(rng_key, state.env, action)
        return outcome._replace(state=InfoState(outcome.state, self._chosen(info)))

    def render(self, state: InfoState) -> np.ndarray | None:
        """Draws a state with the library; returns None if the library cannot draw."""
        draw = getattr(self._env, "render", None)
        return None if draw is None else draw(state.env)

    def _chosen(self, info: Mapping[str, Any]) -> dict[str, PyTree]:
        found = {name: info[name] for name in self._names}
        return {name: self._by_seat(entry) for name, entry in found.items()}

    def _by_seat(self, entry: Any) -> PyTree:
        seats = self._seats
        if not seats:
            return jax.tree.map(jnp.asarray, entry)
        if isinstance(entry, Mapping) and set(entry) == set(seats):
            return jax.tree.map(lambda *x: jnp.stack(x), *(entry[seat] for seat in seats))

        def spread(x: Any) -> Any:
            x = jnp.asarray(x)
            own = x.ndim > 0 and x.shape[0] == len(seats)
            return x if own else jnp.broadcast_to(x, (len(seats), *x.shape))

        return jax.tree.map(spread, entry)


def with_infos(env: Any, options: Mapping[str, Any], where: str) -> Any:
    """Returns an environment that shows what the option ``extras`` names; itself without one."""
    names = options.get(OPTION, ())
    return WithInfos(env, names, where) if names else env


def without_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options for the library."""
    return {name: value for name, value in options.items() if name != OPTION}
