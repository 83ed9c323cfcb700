"""Makes an environment in JAX from its name or builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlstack.checks import WrongKindError
from rlstack.envs.seats.showing import JOINT
from rlstack.imports.versions import PREFIXED
from rlstack.jax_envs.environment import BatchedEnv, ChangedRewards, JaxEnv
from rlstack.jax_envs.game import BatchedGame, JaxGame, JointGame, is_game
from rlstack.jax_envs.showing import SHOWN, showing
from rlstack.references import import_named, load_object

JaxEnvBuilder = Callable[..., JaxEnv | JaxGame]
_REWARDS = "reward_noise", "reward_scale"

NAMED = {"Seaquest-MinAtar": "rlstack.jax_envs.seaquest:Seaquest"}  # own ones, beside gymnax's ids


def make_jax_env(
    name_or_builder: str | JaxEnvBuilder, options: Mapping[str, Any] | None = None
) -> JaxEnv | JaxGame:
    """Returns the environment.

    Args:
      name_or_builder: an id of gymnax such as ``"CartPole-v1"``, one of `NAMED`, a name of Brax
        after ``brax/`` such as ``"brax/ant"``, one of Craftax after ``craftax/``, one of JaxMARL
        after ``jaxmarl/``, ``"module:callable"`` of a function or class that makes a `JaxEnv` or a
        game of several seats, or such a callable itself.
      options: keyword arguments of the builder. For gymnax: fields of the environment's params,
        such as ``max_steps_in_episode``, and arguments of ``gymnax.make``. For Brax:
        ``episode_length``, and arguments of the environment, such as ``backend``. For Craftax:
        fields of the environment's params.

    Raises:
      ValueError: there is no such name, or it does not take these options.
      WrongKindError: the callable returned something that is not a `JaxEnv`.
    """
    options = dict(options or {})
    builder = resolve(name_or_builder)
    if isinstance(builder, str):
        prefixed = builder.startswith(PREFIXED)
        library, _, name = builder.partition("/") if prefixed else ("gymnax", "", builder)
        adapter = f"rlstack.jax_envs.libraries.from_{library}:make_{library}"
        return load_object(adapter)(name, options)
    try:
        env = builder(**options)
    except TypeError as error:
        raise ValueError(f"JAX environment {name_or_builder}: {error}.") from error
    if not isinstance(env, JaxEnv):
        raise WrongKindError(
            f"JAX environment {name_or_builder}: the builder must return a "
            "rlstack.jax_envs.environment.JaxEnv, with observation_spec, action_spec, reset and "
            f"step; got {type(env).__name__}. Environments in Python need another env.type."
        )
    return env


def make_batch(
    name_or_builder: str | JaxEnvBuilder,
    options: Mapping[str, Any] | None = None,
    levels: int = 0,
) -> BatchedEnv:
    """Returns environments with the time rules, or the seats of games; see `make_jax_env`.

    With ``levels``, actions choose among so many levels, see `BatchedEnv`.

    All have two more options, ``reward_noise`` and ``reward_scale`` of
    `rlstack.jax_envs.environment.ChangedRewards`. Games of several seats have another three:
    ``seat_index`` and ``critic_state`` of `rlstack.jax_envs.showing.showing`, and ``joint``, with
    which a row is a game.

    Raises:
      ValueError, WrongKindError: as `make_jax_env` and `showing` say.
      EnvError: the environment does not fit its specs.
    """
    options = dict(options or {})
    seen = {name: options.pop(name) for name in (*SHOWN, JOINT) if name in options}
    rewards = {name: options.pop(name) for name in _REWARDS if name in options}
    env: Any = make_jax_env(name_or_builder, options)
    if rewards:
        env = ChangedRewards(env, **rewards)
    if is_game(env):
        if levels:
            raise ValueError(
                f"JAX environment {name_or_builder}: levels must be 0 for a game of several seats, "
                f"which begin together; got {levels}. Use an environment of one player."
            )
        made = JointGame if seen.pop(JOINT, False) else BatchedGame
        return made(showing(env, **seen))
    if seen:
        raise ValueError(
            f"JAX environment {name_or_builder}: {', '.join(seen)} must be left out, because it is "
            "no game of several seats."
        )
    return BatchedEnv(env, levels=levels)


def resolve(name_or_builder: str | JaxEnvBuilder) -> str | JaxEnvBuilder:
    """Returns the callable that a name stands for; a name of a library stays as it is.

    Raises:
      ValueError: there is no such callable.
      WrongKindError: the argument is neither a name nor a callable.
    """
    if isinstance(name_or_builder, str):
        name = NAMED.get(name_or_builder, name_or_builder)
        return _load(name) if ":" in name else name
    if not callable(name_or_builder):
        raise WrongKindError(
            "JAX environment: name_or_builder must be a name or a callable that builds an "
            f"environment; got {type(name_or_builder).__name__}."
        )
    return name_or_builder


def _load(name: str) -> Any:
    module_name, attribute = name.split(":", 1)
    try:
        module = import_named(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"JAX environment: {name!r} must name an importable module; got: {error}."
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(
            f"JAX environment: {name!r} must name a callable; {module_name} has no callable "
            f"{attribute!r}."
        )
    return found
