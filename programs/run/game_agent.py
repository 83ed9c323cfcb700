"""A finished run's agent as whom a game asks: `rlstack.entity.inverted.GameAgent`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from programs.build.components import make_agent
from programs.build.restored import newest_checkpoint, read_config, read_params
from programs.tracking.run_dir import RunDir
from rlstack.acting.inferencer import Inferencer, InferencerConfig
from rlstack.acting.params import FixedParams
from rlstack.entity.environment import Actions, Observation
from rlstack.entity.inverted.game import ScoredObservation
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.validator import Validator
from rlstack.types import EnvSpec, StepType, TimeStep


class RunAgent:
    """One player, with the newest params of a run; its recurrent state lasts for a game."""

    def __init__(
        self,
        inferencer: Inferencer,
        number: int,
        codec: PaddedCodec,
        validator: Validator,
        sees_others_ticks: bool = True,
    ):
        """Plays as environment ``number`` of those that ``inferencer`` knows.

        Args:
          inferencer: who acts.
          number: of the environment.
          codec: how observations are laid out.
          validator: of observations.
          sees_others_ticks: whether, as it was trained, it also sees ticks at which others act.
        """
        self._inferencer, self._ids = inferencer, np.array([number], np.int32)
        self._codec, self._validator = codec, validator
        self._sees_others_ticks = sees_others_ticks
        self._blank = Observation({}, global_features=[0.0] * codec.num_global)
        self._last: ScoredObservation | None = None  # None between games
        self._is_first = True

    def act(self, observation: ScoredObservation) -> Actions:
        """Returns the agent's actions.

        Raises:
          EnvError: the observation is wrong.
        """
        self._validator.check(observation)
        padded, context = self._codec.encode(observation)
        reward = 0.0 if self._last is None else observation.score - self._last.score
        self._last = observation
        choices = self._infer(padded, reward)
        return self._codec.decode(context, {name: rows[0] for name, rows in choices.items()})

    def idle(self) -> None:
        """Lets a tick pass at which the game asks others alone; `act_all` says so.

        Synchronous pools show an agent such ticks too, so its recurrent state knows of them.
        """
        if self._sees_others_ticks:
            shown = self._last or self._blank
            self._infer(self._codec.encode(dataclasses.replace(shown, actions={}))[0], 0.0)

    def game_over(self, observation: ScoredObservation) -> None:
        """Forgets the game."""
        del observation
        self.forget()

    def forget(self) -> None:
        """Begins anew with the next observation, for loops that end in the middle of a game."""
        self._is_first = True
        self._last = None

    def _infer(self, padded: Any, reward: float) -> Any:
        kind = StepType.FIRST if self._is_first else StepType.MID
        self._is_first = False
        timestep = TimeStep(
            np.array([kind], np.int32),
            np.array([reward], np.float32),
            np.ones(1, np.float32),
            jax.tree.map(lambda x: x[None], padded),
        )
        return self._inferencer.inference(self._ids, timestep).agent_output.action


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
    codec = PaddedCodec(obs_space, action_space, name)
    spec = EnvSpec(codec.observation_spec, codec.action_spec)
    params = read_params(newest_checkpoint(directory, experiment), experiment, spec)
    agent = make_agent(experiment, spec, greedy=greedy)
    key = jax.random.PRNGKey(seed)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params), num_agents, key)
    validator = Validator(obs_space, action_space, name)
    is_sync = experiment.env.wait_num == 0
    return [RunAgent(inferencer, i, codec, validator, is_sync) for i in range(num_agents)]


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
