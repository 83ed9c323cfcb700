"""Parallel environments of PettingZoo as games of several seats; needs the extra ``pettingzoo``.

``EnvConfig("rlstack.envs.seats.pettingzoo:Parallel", num_envs=24, options={"game":
"mpe2.simple_spread_v3"})``. The environment's own options are further options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstack.checks import EnvError
from rlstack.envs.adapters import action_cast, leaf_spaces, narrow_spec, space_spec
from rlstack.envs.nest import Nest, Tree
from rlstack.envs.seats.game import Seats
from rlstack.envs.seats.protocol import GameStep
from rlstack.references import load_object


class ParallelGame:
    """A ``pettingzoo.ParallelEnv``; its possible agents are the seats.

    An agent that ends before the others keeps its row: it gets discount 0, then reward 0 and
    observations of zeros, and its actions are ignored, until the game is over. So its returns end
    where it ended. An agent that joins later has discount 0 up to the step in which it joins, so
    its returns begin there; if it ended before, it plays again. The game is over when no agent is
    left. An agent that is truncated together with all that are left has discount 1.

    The state for a critic, with the option ``critic_state=game``, is that of ``env.state()``.
    """

    def __init__(self, game: str, seed: int = 0, **options: Any):
        """Makes the environment.

        Args:
          game: a module of environments such as "mpe2.simple_spread_v3", or "module:callable" of a
            function that returns a parallel environment.
          seed: of its first reset.
          **options: of the environment.

        Raises:
          ValueError: there is no such environment.
          EnvError: it has no equal spaces for all agents.
        """
        self._env = _function(game)(**options)
        self._name, self._seed = game, seed
        self.seats = tuple(str(agent) for agent in self._env.possible_agents)
        self._agents = list(self._env.possible_agents)
        self.observation_spec = self._spec(self._env.observation_space, acting=False)
        state = getattr(self._env, "state_space", None)
        if state is not None:
            what = f"{game}: state_space"
            nest = Nest(leaf_spaces(state, what))
            leaves = [narrow_spec(space_spec(leaf, False), what) for leaf in nest.leaves]
            self.state_spec = nest.unflatten(leaves)
        self.action_spec = self._spec(self._env.action_space, acting=True)
        spaces = leaf_spaces(self._env.action_space(self._agents[0]), f"{game}: action_space")
        self._action = Nest(spaces)
        self._casts = [action_cast(space) for space in self._action.leaves]
        specs = Nest(self.observation_spec)
        self._nothing = specs.unflatten([np.zeros(s.shape, s.dtype) for s in specs.leaves])
        self._ended: set[Any] = set()
        self._first = True

    def reset(self) -> list[Tree]:
        """Starts an episode; the first one has the seed."""
        observations, _ = self._env.reset(seed=self._seed if self._first else None)
        self._first, self._ended = False, set()
        return [observations.get(agent, self._nothing) for agent in self._agents]

    def step(self, actions: Sequence[Tree]) -> GameStep:
        """Passes on the actions of the agents that play."""
        given = dict(zip(self._agents, actions, strict=True))
        playing = set(self._env.agents)
        found = self._env.step({agent: self._cast(given[agent]) for agent in self._env.agents})
        observations, rewards, terminations, _, infos = found
        last = not self._env.agents
        self._ended -= set(self._env.agents) - playing
        for agent in rewards:
            if terminations[agent] or (agent not in self._env.agents and not last):
                self._ended.add(agent)
        return GameStep(
            [observations.get(agent, self._nothing) for agent in self._agents],
            [float(rewards.get(agent, 0.0)) for agent in self._agents],
            [float(agent in playing and agent not in self._ended) for agent in self._agents],
            last,
            [_numbers(infos.get(agent)) for agent in self._agents],
        )

    def state(self) -> Tree:
        """Returns the state of the environment; see `GameWithState`."""
        return self._env.state()

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _cast(self, action: Tree) -> Tree:
        leaves = self._action.flatten(action, f"{self._name}: action")
        return self._action.unflatten(
            [to(np.asarray(leaf)) for to, leaf in zip(self._casts, leaves, strict=True)]
        )

    def _spec(self, space_of: Callable[[Any], Any], acting: bool) -> Tree:
        """Returns the spec that all agents have in common."""
        what = f"{self._name}: {'action' if acting else 'observation'}_space"
        head = space_of(self._agents[0])
        for agent in self._agents[1:]:
            if space_of(agent) != head:
                raise EnvError(
                    f"{what}: must be the same for all agents; {self._agents[0]} has {head}, and "
                    f"{agent} has {space_of(agent)}. Pad them, as SuperSuit's "
                    "pad_observations_v0 and pad_action_space_v0 do."
                )
        nest = Nest(leaf_spaces(head, what))
        return nest.unflatten([narrow_spec(space_spec(s, acting), what) for s in nest.leaves])


Parallel = Seats(ParallelGame)


def _function(game: str) -> Callable[..., Any]:
    """Returns the function that makes a parallel environment."""
    if ":" in game:
        return load_object(game)
    try:
        return importlib.import_module(game).parallel_env
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"ParallelGame: game must be a module with parallel environments of PettingZoo, or "
            f'"module:callable"; got {game!r}: {error}. pip install "rlstack[pettingzoo]" '
            "installs PettingZoo and MPE."
        ) from error


def _numbers(info: Any) -> Mapping[str, Any]:
    return info if isinstance(info, Mapping) else {}
