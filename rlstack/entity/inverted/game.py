"""The interfaces of games that own their loop and of their agents; errors; random agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rlstack.entity.environment import Actions, Environment, Observation
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import ActionSpace, ObsSpace


class GameError(RuntimeError):
    """The game failed. The exception that it raised is chained."""


class GameLost(GameError):  # noqa: N818 (the message has the error)
    """The connection to the game is lost, or the game no longer follows the protocol.

    Its episodes end as truncated, and the game is started again. Raised by a game, or by the proxy
    of a game that runs in another process.
    """


class GameTimeout(GameError):  # noqa: N818
    """The game, or an agent that the game waited for, took too long."""


class GameClosed(GameError):  # noqa: N818
    """The environment was closed during a wait."""


@dataclasses.dataclass(frozen=True)
class ScoredObservation(Observation):
    """An observation of a game that keeps its own score.

    The reward is the increase of ``score`` since the same agent's previous observation, 0 at the
    first one. The game therefore leaves ``reward`` at 0 and ``done`` at False. It ends an episode
    by ``game_over``; that observation may set ``truncated``.
    """

    score: float = 0.0
    """The agent's score since its game began."""


class GameAgent(Protocol):
    """The agent that a game asks for actions: one player in consecutive games.

    Optional method: ``idle()``, which `act_all` calls at ticks when only other agents act.
    """

    def act(self, observation: ScoredObservation) -> Actions | None:
        """Returns an action of every type; None means that the game must end its loop."""

    def game_over(self, observation: ScoredObservation) -> None:
        """Receives the last observation of a game; the next observation begins another game."""


class Game(Protocol):
    """A program with its own loop.

    It must use its agents from one thread at a time. Optional methods: ``interrupt()``, called from
    another thread when the loop has to end, and ``close()``, called once after the last loop.
    """

    @property
    def obs_space(self) -> ObsSpace:
        """The observation space of every agent."""

    @property
    def action_space(self) -> ActionSpace:
        """The action types of every agent."""

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Plays one or more games. Returns between games, or when an agent returns None."""


class AgentGroup(Protocol):
    """Agents of one game; their actions can be requested together."""

    def ask(
        self, observations: Mapping[int, ScoredObservation], sequential: bool
    ) -> Mapping[int, Actions] | None:
        """Requests actions and waits for them.

        Args:
          observations: the observations, by agent number.
          sequential: True if the game asks its agents one after the other, so that another call in
              the same tick may ask other agents.

        Returns:
          The actions by agent number; None means that the game must end its loop.
        """

    def game_over(self, number: int, observation: ScoredObservation) -> None:
        """Shows an agent the last observation of its game."""


class GroupAgent:
    """One agent of an `AgentGroup`; a `GameAgent`.

    Attributes:
      group: the group.
      number: the agent's number, from 0.
    """

    def __init__(self, group: AgentGroup, number: int):
        self.group, self.number = group, number

    def act(self, observation: ScoredObservation) -> Actions | None:
        """Requests this agent's actions and waits for them."""
        answers = self.group.ask({self.number: observation}, sequential=True)
        return None if answers is None else answers[self.number]

    def game_over(self, observation: ScoredObservation) -> None:
        """Ends this agent's game."""
        self.group.game_over(self.number, observation)


def act_all(
    agents: Sequence[GameAgent], observations: Sequence[ScoredObservation | None]
) -> list[Actions | None] | None:
    """Asks several agents together. A game should ask all agents that act at a tick in one call.

    Args:
      agents: all agents of the game.
      observations: the observation of each agent; None for an agent that does not act at this tick.

    Returns:
      The actions of each agent, None for an agent that was not asked. A single None means that the
      game must end its loop.

    Raises:
      ValueError: ``observations`` does not have one entry for each agent.
    """
    if len(agents) != len(observations):
        raise ValueError(
            f"act_all: there must be one observation, or None, for each of the {len(agents)} "
            f"agents; got {len(observations)}."
        )
    answers: list[Actions | None] = [None] * len(agents)
    groups: dict[int, tuple[AgentGroup, dict[int, ScoredObservation], dict[int, int]]] = {}
    for place, (agent, observation) in enumerate(zip(agents, observations, strict=True)):
        if observation is None:
            getattr(agent, "idle", lambda: None)()
        elif isinstance(agent, GroupAgent):
            _, asked, places = groups.setdefault(id(agent.group), (agent.group, {}, {}))
            asked[agent.number], places[agent.number] = observation, place
        else:
            answers[place] = agent.act(observation)
            if answers[place] is None:
                return None
    for group, asked, places in groups.values():
        answered = group.ask(asked, sequential=False)
        if answered is None:
            return None
        for number, place in places.items():
            answers[place] = answered[number]
    return answers


class RandomAgent:
    """Chooses uniformly among the legal choices; a `GameAgent`."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, seed: int = 0):
        self._codec = PaddedCodec(obs_space, action_space, "RandomAgent")
        self._rng = np.random.default_rng(seed)

    def act(self, observation: ScoredObservation) -> Actions:
        """Returns random legal actions."""
        padded, context = self._codec.encode(observation)
        choices: dict[str, np.ndarray] = {}
        for name, spec in self._codec.action_spec.items():
            legal = padded["action_mask"][name].reshape(*spec.shape, -1)
            drawn = self._rng.random(legal.shape)
            choices[name] = np.where(legal, drawn, -1.0).argmax(-1).astype(np.int32)
        return self._codec.decode(context, choices)

    def game_over(self, observation: ScoredObservation) -> None:
        """Does nothing."""


class EnvironmentGame:
    """An `rlstack.entity.Environment` as a game that asks one agent; a `Game`."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.obs_space = environment.obs_space
        self.action_space = environment.action_space

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Plays episodes until the agent returns None."""
        (agent,) = agents
        while True:
            score, observation = 0.0, self.environment.reset()
            while not observation.over:
                actions = agent.act(_scored(observation, score))
                if actions is None:
                    return
                observation = self.environment.act(actions)
                score += observation.reward
            agent.game_over(_scored(observation, score))


def _scored(observation: Observation, score: float) -> ScoredObservation:
    fields = {f.name: getattr(observation, f.name) for f in dataclasses.fields(Observation)}
    fields |= {"reward": 0.0, "done": False, "truncated": observation.cut}
    return ScoredObservation(**fields, score=score)
