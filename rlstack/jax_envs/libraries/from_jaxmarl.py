"""JaxMARL's environments (https://github.com/FLAIROX/JaxMARL) as games of several seats.

JaxMARL's ``step`` resets an environment in the step that ends an episode, and ``dones`` do not tell
a time limit from a termination. The adapter calls ``step_env``, which does not reset, and calls it
again without the time limit: what is then done is terminated. XLA computes what both calls share
once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.jax_envs.game import GameOutcome
from rlstack.jax_envs.libraries.from_gymnax import space_spec
from rlstack.jax_envs.libraries.infos import with_infos, without_names
from rlstack.jax_envs.libraries.limits import check_limit, check_version, not_installed
from rlstack.references import nearest
from rlstack.specs import ACTION_MASK
from rlstack.types import PRNGKey, PyTree

_LIMIT = "max_steps"
_NEVER = 2**30  # steps


def make_jaxmarl(name: str, options: Mapping[str, Any]) -> Any:
    """Returns a game of JaxMARL.

    Args:
      name: the game's id.
      options: keyword arguments of ``jaxmarl.make``; ``extras``, see
        `rlstack.jax_envs.libraries.infos.WithInfos`; and ``pad``, with which agents may have
        vectors of several lengths, see `Padded`.

    Raises:
      ValueError: JaxMARL is not installed, has no such id, or does not take these options.
      EnvError: the agents have different spaces, the version of JaxMARL is not known, or a time
          limit does not end its games.
    """
    try:
        import jaxmarl
        from jaxmarl.registration import registered_envs
    except ImportError as error:
        raise not_installed(f"jaxmarl/{name}", "JaxMARL", "jaxmarl", error) from error
    check_version(f"jaxmarl/{name}", "jaxmarl")
    if name not in registered_envs:
        raise ValueError(
            "JAX environment: the name after jaxmarl/ must be an id of JaxMARL; got "
            f"{name!r}{nearest(name, registered_envs)}"
        )
    shown, options = options, without_names(options)
    pads = options.pop("pad", False)
    try:
        env: Any = jaxmarl.make(name, **options)
    except TypeError as error:
        raise ValueError(
            f"JAX environment jaxmarl/{name}: options must be arguments of jaxmarl.make; {error}."
        ) from error
    _check_arguments(env, name, options)
    env = Padded(env) if pads else env
    if getattr(env, _LIMIT, None) is not None:
        kind = tuple(sorted((key, repr(value)) for key, value in options.items() if key != _LIMIT))
        # Some count the steps before the first one, so that a limit of 1 would allow two.
        check_limit(f"jaxmarl/{name}", kind, JaxMARLGame(_with_limit(env, 0), name))
    return with_infos(JaxMARLGame(env, name), shown, f"jaxmarl/{name}")


def _check_arguments(env: Any, name: str, options: Mapping[str, Any]) -> None:
    """Raises a ValueError for unknown arguments of a game of particles, which ignores them."""
    kinds = type(env).__mro__
    if not any(kind.__name__ == "SimpleMPE" for kind in kinds):
        return
    known = {x for kind in kinds[:-1] for x in inspect.signature(kind).parameters}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"JAX environment jaxmarl/{name}: options must be arguments of the game; it has no "
            f"{unknown[0]!r}{nearest(unknown[0], known)}"
        )


class JaxMARLGame:
    """One environment of JaxMARL; see `rlstack.jax_envs.game.JaxGame`.

    Where the environment says which actions are legal, and actions are one choice, an observation
    is a dict of ``observation`` and ``action_mask``. For a critic there are the joined observations
    of all agents.
    """

    def __init__(self, env: Any, name: str) -> None:
        """Stores the environment.

        Raises:
          EnvError: the agents have different spaces.
        """
        self._env, self._name = env, f"jaxmarl/{name}"
        self.seats = tuple(str(agent) for agent in env.agents)
        self._agents = list(env.agents)
        self._unlimited = env
        if getattr(env, _LIMIT, None) is not None:
            self._unlimited = _with_limit(env, _NEVER)
        self._action_spec = self._of_all(
            "action", [space_spec(env.action_space(agent), "action") for agent in self._agents]
        )
        observations, state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        self._observation_spec = self._of_all(
            "observation", [_spec_of(observations[agent]) for agent in self._agents]
        )
        if isinstance(self._action_spec, specs.DiscreteArray):
            with contextlib.suppress(NotImplementedError):
                masks = jax.eval_shape(env.get_avail_actions, state)
                mask = self._of_all("mask", [_spec_of(masks[agent]) for agent in self._agents])
                self._observation_spec = {
                    "observation": self._observation_spec,
                    ACTION_MASK: mask,
                }

    def observation_spec(self) -> PyTree:
        """Returns the specs of what one agent sees."""
        return self._observation_spec

    def action_spec(self) -> PyTree:
        """Returns the specs of one agent's action."""
        return self._action_spec

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        observations, state = self._env.reset(rng_key)
        return state, self._observe(observations, state)

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> GameOutcome:
        """Takes the actions of all agents; a game that ends only by its limit is truncated."""
        return self.step_with_info(rng_key, state, action)[0]

    def step_with_info(
        self, rng_key: PRNGKey, state: PyTree, action: PyTree
    ) -> tuple[GameOutcome, Mapping[str, Any]]:
        """Returns the result of `step`, and JaxMARL's info."""
        actions = {
            agent: jax.tree.map(lambda x, seat=seat: x[seat], action)
            for seat, agent in enumerate(self._agents)
        }
        observations, after, rewards, dones, info = self._env.step_env(rng_key, state, actions)
        endless = self._unlimited.step_env(rng_key, state, actions)[3]
        terminated = jnp.asarray(endless["__all__"], bool) | self._stacked(endless).astype(bool)
        outcome = GameOutcome(
            after,
            self._observe(observations, after),
            self._stacked(rewards).astype(jnp.float32),
            terminated,
            jnp.asarray(dones["__all__"], bool),
        )
        return outcome, info

    def _observe(self, observations: Mapping[str, Any], state: PyTree) -> PyTree:
        seen = self._stacked(observations)
        if not isinstance(self._observation_spec, Mapping):
            return seen
        masks = self._stacked(self._env.get_avail_actions(state))
        return {"observation": seen, ACTION_MASK: masks}

    def _stacked(self, by_agent: Mapping[str, Any]) -> PyTree:
        """Returns what all agents have as arrays ``[S, ...]``."""
        return jax.tree.map(lambda *x: jnp.stack(x), *(by_agent[agent] for agent in self._agents))

    def _of_all(self, what: str, found: list[Any]) -> Any:
        """Returns the specs that all agents have in common."""
        for agent, spec in zip(self._agents, found, strict=True):
            if spec != found[0]:
                raise EnvError(
                    f"{self._name}: the {what} space must be the same for all agents; "
                    f"{self._agents[0]} has {found[0]}, and {agent} has {spec}. Use "
                    "--env.options pad True if these are vectors or choices, or an environment "
                    "whose agents share their spaces."
                )
        return found[0]


class Padded:
    """An environment of JaxMARL that pads each agent's spaces to the longest ones.

    Zeros follow shorter observations. Of actions that are numbers, an agent's own are the first; of
    choices, those after its own are illegal.
    """

    def __init__(self, env: Any) -> None:
        """Finds the spaces.

        Raises:
          EnvError: the observations are no vectors, or the actions of different kinds.
        """
        self._env = env
        self._spaces = {agent: env.action_space(agent) for agent in env.agents}
        shapes = [env.observation_space(agent).shape for agent in env.agents]
        kinds = {(type(space), len(space.shape)) for space in self._spaces.values()}
        if {len(shape) for shape in shapes} != {1} or len(kinds) > 1:
            raise EnvError(
                f"{env.name}: with pad, observations must be vectors, and actions of one kind; got "
                f"observations {shapes} and actions {list(self._spaces.values())}. Leave out pad."
            )
        self._length = max(shape[0] for shape in shapes)
        self._chooses = hasattr(env.action_space(env.agents[0]), "n")
        self._widest = max(self._spaces.values(), key=self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _size(self, space: Any) -> int:
        return int(space.n if self._chooses else space.shape[0])

    def action_space(self, agent: str) -> Any:
        """Returns the largest space of all agents."""
        del agent
        return self._widest

    def get_avail_actions(self, state: PyTree) -> dict[str, Any]:
        """Returns the choices that each agent has."""
        if not self._chooses:
            raise NotImplementedError
        del state
        choices = jnp.arange(self._size(self._widest))
        return {agent: choices < self._size(space) for agent, space in self._spaces.items()}

    def reset(self, rng_key: PRNGKey) -> tuple[Any, Any]:
        """Starts an episode."""
        observations, state = self._env.reset(rng_key)
        return self._longest(observations), state

    def step_env(self, rng_key: PRNGKey, state: PyTree, actions: Mapping[str, Any]) -> Any:
        """Steps with the agents' own part of the actions."""
        if not self._chooses:
            actions = {x: actions[x][: self._size(space)] for x, space in self._spaces.items()}
        observations, *others = self._env.step_env(rng_key, state, actions)
        return self._longest(observations), *others

    def _longest(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        return {agent: jnp.pad(x, (0, self._length - len(x))) for agent, x in observations.items()}


def _with_limit(env: Any, steps: int) -> Any:
    """Returns a copy with another time limit, which the environment within may have."""
    twin = object.__new__(type(env))  # `copy` would call the __getattr__ of some too early
    twin.__dict__.update(vars(env))
    if _LIMIT in vars(env):
        setattr(twin, _LIMIT, steps)
    else:
        twin._env = _with_limit(env._env, steps)
    return twin


def _spec_of(x: Any) -> PyTree:
    """Returns the specs of arrays."""
    return jax.tree.map(lambda leaf: specs.Array(tuple(leaf.shape), leaf.dtype), x)
