"""A game that owns its loop and asks for actions: what it asks, and what it shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlstack.entity.environment import Action, Environment, Observation
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.tables import Table

Actions = Mapping[str, Action]


@dataclasses.dataclass(frozen=True)
class ScoredObservation(Observation):
    """An observation of a game that keeps its own score.

    The reward is not the game's business: it is how much ``score`` grew since the same agent's
    previous observation, 0 at its first. So ``reward`` stays 0, and ``done`` False: that a game is
    over is said by ``game_over``, where ``truncated`` may be set.
    """

    score: float = 0.0
    """What the agent has earned since its game began."""


class GameAgent(Protocol):
    """Whom a game asks. One object is one player, in one game after the other.

    Optional: ``idle()``, called by `act_all` at ticks at which only others are asked.
    """

    def act(self, observation: ScoredObservation) -> Actions | None:
        """Returns the actions, of every type; None means that the game must end its loop."""

    def game_over(self, observation: ScoredObservation) -> None:
        """Takes note of the last observation; the next one begins another game."""


class Game(Protocol):
    """A program with a loop of its own.

    It talks to its agents from one thread at a time. Optional: ``interrupt()``, called from
    another thread when the loop is to end, and ``close()``, called once at the very end.
    """

    @property
    def obs_space(self) -> ObsSpace:
        """What every agent sees."""

    @property
    def action_space(self) -> ActionSpace:
        """What every agent does."""

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Plays one game or many; returns between games, or as soon as an agent answers None."""


class Team(Protocol):
    """Agents that are asked together, because whoever decides for them sits elsewhere."""

    def ask(
        self, observations: Mapping[int, ScoredObservation], alone: bool
    ) -> Mapping[int, Actions] | None:
        """Asks agents by number; ``alone`` if others may be asked at the same tick."""

    def end(self, number: int, observation: ScoredObservation) -> None:
        """Ends one agent's game."""


class TeamAgent:
    """One of a team's agents; a `GameAgent`.

    Attributes:
      team: whose it is.
      number: which it is, from 0.
    """

    def __init__(self, team: Team, number: int):
        self.team, self.number = team, number

    def act(self, observation: ScoredObservation) -> Actions | None:
        """Asks for this agent's actions, and waits for them."""
        answers = self.team.ask({self.number: observation}, alone=True)
        return None if answers is None else answers[self.number]

    def game_over(self, observation: ScoredObservation) -> None:
        """Ends this agent's game."""
        self.team.end(self.number, observation)


def act_all(
    agents: Sequence[GameAgent], observations: Sequence[ScoredObservation | None]
) -> list[Actions | None] | None:
    """Asks several agents at once, which is how those of one tick are to be asked.

    Args:
      agents: all agents of the game.
      observations: what each sees; None for an agent that does not act at this tick.

    Returns:
      Actions by agent, None for those that were not asked; or None alone if one of the agents says
      that the game must end its loop.
    """
    if len(agents) != len(observations):
        raise ValueError(
            f"act_all: there must be one observation, or None, for each of the {len(agents)} "
            f"agents; got {len(observations)}."
        )
    answers: list[Actions | None] = [None] * len(agents)
    teams: dict[int, tuple[Team, dict[int, int]]] = {}  # to each number its place here
    for place, (agent, observation) in enumerate(zip(agents, observations, strict=True)):
        if observation is None:
            getattr(agent, "idle", lambda: None)()
            continue
        if isinstance(agent, TeamAgent):
            places = teams.setdefault(id(agent.team), (agent.team, {}))[1]
            places[agent.number] = place
            continue
        answers[place] = agent.act(observation)
        if answers[place] is None:
            return None
    for team, places in teams.values():
        asked = {number: observations[place] for number, place in places.items()}
        answered = team.ask(asked, alone=False)  # type: ignore[arg-type]  # none is None
        if answered is None:
            return None
        for number, place in places.items():
            answers[place] = answered[number]
    return answers


class RandomAgent:
    """Chooses uniformly among what is legal; a `GameAgent`."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, seed: int = 0):
        self._table = Table(obs_space, action_space, "RandomAgent")
        self._rng = np.random.default_rng(seed)

    def act(self, observation: ScoredObservation) -> Actions:
        """Returns random legal actions."""
        padded, roster = self._table.observe(observation)
        choices: dict[str, Any] = {}
        for name, spec in self._table.action_spec.items():
            legal = padded["action_mask"][name].reshape(*spec.shape, -1)
            drawn = self._rng.random(legal.shape)
            choices[name] = np.where(legal, drawn, -1.0).argmax(-1).astype(np.int32)
        return self._table.act(roster, choices)

    def game_over(self, observation: ScoredObservation) -> None:
        """Learns nothing from it."""


class EnvironmentGame:
    """An ordinary environment as a game that asks one agent; a `Game`."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.obs_space = environment.obs_space
        self.action_space = environment.action_space

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Plays episodes until the agent answers None."""
        (agent,) = agents
        while True:
            score, observation = 0.0, self.environment.reset()
            while not (observation.done or observation.truncated):
                actions = agent.act(_scored(observation, score))
                if actions is None:
                    return
                observation = self.environment.act(actions)
                score += observation.reward
            agent.game_over(_scored(observation, score))


def _scored(observation: Observation, score: float) -> ScoredObservation:
    fields = {f.name: getattr(observation, f.name) for f in dataclasses.fields(Observation)}
    return ScoredObservation(**{**fields, "reward": 0.0, "done": False}, score=score)
