"""Checks that a library is installed, in a known version, and that its time limits are as known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.checks import EnvError
from rlstack.imports import versions
from rlstack.jax_envs.environment import JaxEnv
from rlstack.jax_envs.game import JaxGame, is_game
from rlstack.random.compiled_quickly import CompiledQuickly

_proved: set[object] = set()


def check_version(name: str, distribution: str) -> None:
    """Refuses a version of a library that the adapters do not know.

    Raises:
      EnvError: the adapters do not know the installed version.
    """
    if wrong := versions.unknown(distribution):
        raise EnvError(f"JAX environment {name}: {wrong}")


def check_limit(name: str, kind: object, env: JaxEnv | JaxGame) -> None:
    """Checks that an episode with the shortest time limit ends after one step.

    It compiles only what tells the end, once in a process for each kind of environment.

    Args:
      name: the name of the environment, for the error.
      kind: a hashable key; environments of equal name and kind are checked only once.
      env: an adapter of a library, with the shortest limit.

    Raises:
      EnvError: the episode did not end.
    """
    if (name, kind) in _proved:
        return
    seats = (len(env.seats),) if is_game(env) else ()
    action = jax.tree.map(
        lambda spec: np.zeros((*seats, *spec.shape), spec.dtype), env.action_spec()
    )

    def ends(rng_key: jax.Array) -> jax.Array:
        state, _ = env.reset(rng_key)
        outcome: Any = env.step(rng_key, state, action)
        if is_game(env):
            return jnp.asarray(outcome.over)
        return jnp.asarray(outcome.terminated) | outcome.truncated

    if not CompiledQuickly(ends)(np.zeros(2, np.uint32)):
        raise EnvError(
            f"JAX environment {name}: a step limit must end an episode; with the shortest limit "
            "the first step did not. The installed version of its library means something else by "
            "its limit: `rlstack doctor` shows versions."
        )
    _proved.add((name, kind))


def not_installed(name: str, library: str, extra: str, error: ImportError) -> ValueError:
    """Returns a ValueError that names the missing library and the extra that installs it.

    Args:
      name: name of the environment, as the user gave it.
      library: name of the library, for the message.
      extra: name of rlstack's extra that installs the library.
      error: the error of the import.
    """
    return ValueError(
        f"JAX environment: {name} needs {library}, which cannot be imported: {error}. "
        f"pip install 'rlstack[{extra}]', or name a callable as module:callable."
    )
