"""Craftax's environments (https://github.com/MichaelTMatthews/Craftax) as `JaxEnv`.

Craftax sets ``done`` at a time limit as at a death. The adapter asks whether the state after the
step would end an episode that has no limit: that is a termination.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.checks import EnvError
from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.libraries.from_gymnax import space_spec
from rlstack.jax_envs.libraries.infos import with_infos, without_names
from rlstack.jax_envs.libraries.limits import check_version, not_installed
from rlstack.references import nearest
from rlstack.types import PRNGKey, PyTree

_NEVER = 2**30  # steps
_NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)


def make_craftax(name: str, options: Mapping[str, Any]) -> Any:
    """Returns an environment of Craftax.

    Args:
      name: the environment's id, such as ``Craftax-Classic-Symbolic-v1``.
      options: fields of the environment's params, such as ``max_timesteps``; ``extras``, see
        `rlstack.jax_envs.libraries.infos.WithInfos`.

    Raises:
      ValueError: Craftax is not installed, has no such name, or does not take these options.
      EnvError: the adapter does not know the installed version of Craftax, or a time limit does not
        end the environment's episodes.
    """
    try:
        from craftax.craftax_env import make_craftax_env_from_name as make
    except ImportError as error:
        raise not_installed(f"craftax/{name}", "Craftax", "craftax", error) from error
    check_version(f"craftax/{name}", "craftax")
    if name not in _NAMES:
        raise ValueError(
            "JAX environment: the name after craftax/ must be an id of Craftax; got "
            f"{name!r}{nearest(name, _NAMES, 'craftax/')}"
        )
    env = make(name, auto_reset=False)
    params = env.default_params
    fields = {field.name for field in dataclasses.fields(params)}
    shown, options = options, without_names(options)
    unknown = sorted(options.keys() - fields)
    if unknown:
        raise ValueError(
            f"JAX environment craftax/{name}: options must be fields of its params "
            f"({', '.join(sorted(fields))}); got {', '.join(unknown)}."
        )
    _check_limit(name, env, params)
    drawn = make(name.replace("Symbolic", "Pixels"), auto_reset=False)
    return with_infos(CraftaxEnv(env, params.replace(**options), drawn), shown, f"craftax/{name}")


def _check_limit(name: str, env: Any, params: Any) -> None:
    """Checks that a state is terminal with the shortest limit, and not terminal without one.

    All arrays of the state are 1, since making a world takes long.

    Raises:
      EnvError: the limit makes no difference.
    """
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    state = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype),
        jax.eval_shape(lambda key: env.reset_env(key, params)[1], key),
    )
    short, endless = (
        bool(env.is_terminal(state, params.replace(max_timesteps=steps))) for steps in (1, _NEVER)
    )
    if not short or endless:
        raise EnvError(
            f"JAX environment craftax/{name}: a step limit must end an episode; the shortest "
            f"max_timesteps gives is_terminal {short}, and one that is never reached {endless}. "
            "The installed Craftax means something else by it: `rlstack doctor` shows versions."
        )


class CraftaxEnv:
    """One environment of Craftax; see `rlstack.jax_envs.environment.JaxEnv`."""

    def __init__(self, env: Any, params: Any, drawn: Any) -> None:
        """Stores an environment that does not reset itself, its params, and what draws it."""
        self._env, self._params = env, params
        self._unlimited = params.replace(max_timesteps=_NEVER)
        self._draw = jax.jit(drawn.get_obs)

    def render(self, state: PyTree) -> np.ndarray:
        """Returns what the environment of pixels would observe, uint8 [H, W, 3]."""
        return np.asarray(255 * self._draw(state)).astype(np.uint8)

    def observation_spec(self) -> PyTree:
        """Returns the spec of Craftax's observation space."""
        return space_spec(self._env.observation_space(self._params), "observation")

    def action_spec(self) -> PyTree:
        """Returns the spec of Craftax's actions, which are discrete."""
        return space_spec(self._env.action_space(self._params), "action")

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts an episode in a new world."""
        observation, state = self._env.reset_env(rng_key, self._params)
        return state, observation

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> Outcome:
        """Takes an action; an episode that ends only because of its time limit is truncated."""
        return self.step_with_info(rng_key, state, action)[0]

    def step_with_info(
        self, rng_key: PRNGKey, state: PyTree, action: PyTree
    ) -> tuple[Outcome, Mapping[str, Any]]:
        """Returns the result of `step`, and Craftax's info."""
        step = self._env.step_env(rng_key, state, action, self._params)
        observation, after, reward, done, info = step
        terminated = jnp.asarray(self._env.is_terminal(after, self._unlimited), bool)
        over = jnp.asarray(done, bool) | self._env.is_terminal(after, self._params)
        return Outcome(after, observation, reward, terminated, over & ~terminated), info
