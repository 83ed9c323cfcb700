"""Environments of PettingZoo as games of several seats; needs the extra ``pettingzoo``.

``EnvConfig("rlstack.envs.seats.pettingzoo:Parallel", num_envs=24, options={"game":
"mpe2.simple_spread_v3"})``. The environment's own options are further options. Environments whose
agents act in turn are ``rlstack.envs.seats.pettingzoo:AEC``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs.adapters import FromZero, action_cast, leaf_spaces, narrow_spec, space_spec
from rlstack.envs.auto_reset import FIRST, LAST, MID
from rlstack.envs.nest import Nest, Tree
from rlstack.envs.seats.game import Seats
from rlstack.envs.seats.protocol import GameStep
from rlstack.envs.seats.turns import Ending, Turn, Turns, playable
from rlstack.imports import versions
from rlstack.references import load_object


class _Adapter:
    """The common part of the adapters of both PettingZoo interfaces.

    Attributes:
      seats: the possible agents.
      observation_spec, action_spec: the specs of one seat.
      state_spec: the spec of the environment's state, if it has one.
    """

    def __init__(self, env: Any, game: str) -> None:
        self._env = env
        self._agents = list(env.possible_agents)
        self.seats = tuple(str(agent) for agent in self._agents)
        self.observation_spec = _common_spec(env, game, acting=False)
        self.action_spec = _common_spec(env, game, acting=True)
        shown = Nest(self.observation_spec)
        self._nothing = playable(shown.unflatten([_nothing(spec) for spec in shown.leaves]))
        self._cast = _Cast(env, game)
        seen = f"{game}: observation"
        space = env.observation_space(self._agents[0])
        self._seen = FromZero(Nest(leaf_spaces(space, f"{seen}_space")), seen)
        state = getattr(env, "state_space", None)
        if state is not None:
            self.state_spec = _specs_of(state, f"{game}: state_space")
            where = f"{game}: state"
            self._state_seen = FromZero(Nest(leaf_spaces(state, f"{where}_space")), where)

    def state(self) -> Tree:
        """Returns the state of the environment; see `GameWithState`."""
        return self._state_seen(self._env.state())

    @property
    def render_modes(self) -> tuple[str, ...]:
        """The values of the environment's option ``render_mode``."""
        metadata = getattr(self._env, "metadata", None) or {}
        return tuple(metadata.get("render_modes", ()))

    def render(self) -> Any:
        """Returns a picture, if the environment has the option ``render_mode`` "rgb_array"."""
        return self._env.render() if getattr(self._env, "render_mode", None) else None

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


class ParallelGame(_Adapter):
    """A ``pettingzoo.ParallelEnv``; its possible agents are the seats.

    An agent that ends before the others is LAST then, with discount 0 if it is terminated and 1 if
    it is truncated. Its row stays: until the game is over it is FIRST with observations of zeros
    (of a mask, the first action is legal), and its actions are ignored, so no transition is made.
    An agent that joins later is FIRST up to the step in which it joins; if it ended before, it
    plays again. The game is over when no agent is left.

    The state for a critic, with the option ``critic_state=game``, is that of ``env.state()``.
    """

    def __init__(self, game: str, seed: int = 0, **options: Any):
        """Makes the environment.

        Args:
          game: a module of environments such as "mpe2.simple_spread_v3", or "module:callable" of a
            function that returns a parallel environment.
          seed: the seed of the first reset.
          **options: keyword arguments of the environment.

        Raises:
          ValueError: there is no such environment.
          EnvError: the environment's agents have different spaces.
        """
        super().__init__(_function(game)(**options), game)
        self._seed = seed
        self._first = True

    def reset(self) -> list[Tree]:
        """Starts an episode; the first one has the seed."""
        observations, _ = self._env.reset(seed=self._seed if self._first else None)
        self._first = False
        return self._of_all(observations)

    def step(self, actions: Sequence[Tree]) -> GameStep:
        """Passes on the actions of the agents that play."""
        given = dict(zip(self._agents, actions, strict=True))
        playing = set(self._env.agents)
        found = self._env.step({agent: self._cast(given[agent]) for agent in self._env.agents})
        observations, rewards, terminations, _, infos = found
        left = playing - set(self._env.agents)
        return GameStep(
            self._of_all(observations),
            [float(rewards.get(agent, 0.0)) for agent in self._agents],
            [float(not terminations.get(agent, False)) for agent in self._agents],
            not self._env.agents,
            [_numbers(infos.get(agent)) for agent in self._agents],
            [
                FIRST if agent not in playing else LAST if agent in left else MID
                for agent in self._agents
            ],
        )

    def _of_all(self, observations: Mapping[Any, Tree]) -> list[Tree]:
        """Returns the observation of each agent."""
        return [
            self._seen(observations[agent]) if agent in observations else self._nothing
            for agent in self._agents
        ]


class AECGame(_Adapter):
    """A ``pettingzoo.AECEnv``, whose agents act in turn; its possible agents are the seats.

    The reward of a turn is what the environment gives the agent since its last one. An agent that
    is terminated has discount 0, one that is truncated discount 1. In a synchronous pool, an agent
    that joins later is FIRST with observations of zeros up to the step in which it joins.

    The state for a critic, with the option ``critic_state=game``, is that of ``env.state()``.
    """

    def __init__(self, game: str, seed: int = 0, **options: Any):
        """Makes the environment.

        Args:
          game: a module of environments such as "pettingzoo.classic.tictactoe_v3", or
            "module:callable" of a function that returns an AEC environment.
          seed: the seed of the first reset.
          **options: keyword arguments of the environment.

        Raises:
          ValueError: there is no such environment.
          EnvError: the environment's agents have different spaces.
        """
        super().__init__(_function(game, "env")(**options), game)
        self._seed: int | None = seed

    def reset(self) -> Turn:
        """Starts an episode; the first one has the seed."""
        self._env.reset(seed=self._seed)
        self._seed = None
        return self._next_turn()

    def observe(self, seat: int) -> Tree:
        """Returns what the agent sees; nothing if it does not play."""
        if not self.plays(seat):
            return self._nothing
        return self._seen(self._env.observe(self._agents[seat]))

    def plays(self, seat: int) -> bool:
        """Returns whether the agent has joined, and its game has not ended."""
        return self._agents[seat] in self._env.agents

    def step(self, action: Tree) -> Turn:
        """Passes on the action of the agent whose turn it is."""
        self._env.step(self._cast(action))
        return self._next_turn()

    def _next_turn(self) -> Turn:
        """Steps agents that have ended, as the interface asks for, up to the next turn."""
        ended: dict[int, Ending] = {}
        while self._env.agents:
            agent = self._env.agent_selection
            seat = self._agents.index(agent)
            seen, reward, terminated, truncated, info = self._env.last()
            if not (terminated or truncated):
                return Turn(seat, float(reward), ended)
            ending = float(reward), float(not terminated), _numbers(info)
            ended[seat] = Ending(self._seen(seen), *ending)
            self._env.step(None)
        return Turn(None, 0.0, ended)


Parallel = Seats(ParallelGame)
AEC = Turns(AECGame)


def _nothing(spec: specs.Array) -> np.ndarray:
    """Returns what an agent that does not play sees: 0, or what is next to it in its space."""
    zeros = np.zeros(spec.shape, spec.dtype)
    if not isinstance(spec, specs.BoundedArray):
        return zeros
    return np.clip(zeros, spec.minimum, spec.maximum)


class _Cast:
    """Casts an action to what the environment takes."""

    def __init__(self, env: Any, name: str) -> None:
        spaces = leaf_spaces(env.action_space(env.possible_agents[0]), f"{name}: action_space")
        self._name, self._nest = name, Nest(spaces)
        self._casts = [action_cast(space) for space in self._nest.leaves]

    def __call__(self, action: Tree) -> Tree:
        leaves = self._nest.flatten(action, f"{self._name}: action")
        return self._nest.unflatten(
            [to(np.asarray(leaf)) for to, leaf in zip(self._casts, leaves, strict=True)]
        )


def _common_spec(env: Any, name: str, acting: bool) -> Tree:
    """Returns the spec that all agents have in common."""
    what = f"{name}: {'action' if acting else 'observation'}_space"
    space_of = env.action_space if acting else env.observation_space
    head, *others = env.possible_agents
    for agent in others:
        if space_of(agent) != space_of(head):
            raise EnvError(
                f"{what}: must be the same for all agents; {head} has {space_of(head)}, and "
                f"{agent} has {space_of(agent)}. Pad them, as SuperSuit's "
                "pad_observations_v0 and pad_action_space_v0 do."
            )
    return _specs_of(space_of(head), what, acting)


def _specs_of(space: Any, what: str, acting: bool = False) -> Tree:
    nest = Nest(leaf_spaces(space, what))
    return nest.unflatten([narrow_spec(space_spec(s, acting), what) for s in nest.leaves])


def _function(game: str, name: str = "parallel_env") -> Callable[..., Any]:
    """Returns the function of this name that makes an environment."""
    if wrong := versions.unknown("pettingzoo") or versions.unknown("mpe2"):
        raise EnvError(f"PettingZoo {game}: {wrong}")
    if ":" in game:
        return load_object(game)
    try:
        return getattr(importlib.import_module(game), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"PettingZoo: game must be a module with a function {name}, or "
            f'"module:callable"; got {game!r}: {error}. pip install "rlstack[pettingzoo]" '
            "installs PettingZoo and MPE."
        ) from error


def _numbers(info: Any) -> Mapping[str, Any]:
    return info if isinstance(info, Mapping) else {}
