"""A finished run's agent as whom a game asks: `rlstack.entity.inverted.GameAgent`."""

from __future__ import annotations

import os

import jax
import numpy as np

from programs.components import make_agent
from programs.restored import newest_checkpoint, read_config, read_params
from programs.run_dir import RunDir
from rlstack.entity.inverted.agents import Actions, ScoredObservation
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.tables import Table
from rlstack.entity.validator import Validator
from rlstack.inferencer import FixedParams, Inferencer, InferencerConfig
from rlstack.types import EnvSpec, StepType, TimeStep


class RunAgent:
    """One player, with the newest params of a run; its recurrent state lasts for a game."""

    def __init__(self, inferencer: Inferencer, number: int, table: Table, validator: Validator):
        """Plays as environment ``number`` of those that ``inferencer`` knows."""
        self._inferencer, self._ids = inferencer, np.array([number], np.int32)
        self._table, self._validator = table, validator
        self._score: float | None = None  # None between games

    def act(self, observation: ScoredObservation) -> Actions:
        """Returns the agent's actions.

        Raises:
          EnvError: the observation is wrong.
        """
        self._validator.check(observation)
        padded, roster = self._table.observe(observation)
        is_first = self._score is None
        reward = 0.0 if self._score is None else observation.score - self._score
        self._score = observation.score
        timestep = TimeStep(
            np.array([StepType.FIRST if is_first else StepType.MID], np.int32),
            np.array([reward], np.float32),
            np.ones(1, np.float32),
            jax.tree.map(lambda x: x[None], padded),
        )
        action = self._inferencer.inference(self._ids, timestep).agent_output.action
        return self._table.act(roster, {name: rows[0] for name, rows in action.items()})

    def game_over(self, observation: ScoredObservation) -> None:
        """Forgets the game."""
        del observation
        self._score = None


def team_from_run(
    run_dir: str | os.PathLike[str],
    obs_space: ObsSpace,
    action_space: ActionSpace,
    num_agents: int,
    *,
    greedy: bool = True,
    seed: int = 0,
) -> list[RunAgent]:
    """Returns several players with the same params, each with a recurrent state of its own.

    Args:
      run_dir: of the run; its newest checkpoint is taken.
      obs_space: of the game, as the run was trained on.
      action_space: the same.
      num_agents: how many players.
      greedy: whether they take their best actions, or sample as in training.
      seed: of the sampling.

    Raises:
      ValueError: it is no run, has no checkpoint, or was trained on other spaces.
    """
    experiment = read_config(directory := RunDir.open(run_dir))
    name = f"the agent of {run_dir}"
    table = Table(obs_space, action_space, name)
    spec = EnvSpec(table.observation_spec, table.action_spec)
    params = read_params(newest_checkpoint(directory, experiment), experiment, spec)
    agent = make_agent(experiment, spec, greedy=greedy)
    key = jax.random.PRNGKey(seed)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params), num_agents, key)
    validator = Validator(obs_space, action_space, name)
    return [RunAgent(inferencer, i, table, validator) for i in range(num_agents)]


def from_run(
    run_dir: str | os.PathLike[str],
    obs_space: ObsSpace,
    action_space: ActionSpace,
    *,
    greedy: bool = True,
    seed: int = 0,
) -> RunAgent:
    """Returns one player; see `team_from_run`."""
    return team_from_run(run_dir, obs_space, action_space, 1, greedy=greedy, seed=seed)[0]
