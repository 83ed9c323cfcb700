"""The agent of a finished run as a player of games: a `rlstack.entity.inverted.GameAgent`."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np

from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.configs.acting import InferencerConfig
from rlstack.entity.environment import Actions, Observation
from rlstack.entity.inverted.game import ScoredObservation
from rlstack.entity.inverted.remote_game import START_TIMEOUT, RemoteGame
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.validator import Validator
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.restored import Which, chosen_checkpoint, counts_at, read_params
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep


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
        """Creates the player.

        Args:
          inferencer: computes the actions; shared by the players of a team.
          number: this player's row in the inferencer's table of agent states.
          codec: the layout of observations and actions as arrays.
          validator: checks observations.
          sees_others_ticks: True if the player also sees the ticks at which only others act; must
            be the same as in training.
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
          EnvError: the observation does not fit the spaces of the game.
        """
        self._validator.check(observation)
        padded, context = self._codec.encode(observation)
        reward = 0.0 if self._last is None else observation.score - self._last.score
        self._last = observation
        choices = self._infer(padded, reward)
        return self._codec.decode(context, {name: rows[0] for name, rows in choices.items()})

    def idle(self) -> None:
        """Updates the agent's state at a tick that asks only other players; `act_all` calls it.

        Synchronous pools show an agent such ticks too, so its recurrent state expects them.
        """
        if self._sees_others_ticks:
            shown = self._last or self._blank
            self._infer(self._codec.encode(dataclasses.replace(shown, actions={}))[0], 0.0)

    def game_over(self, observation: ScoredObservation) -> None:
        """Resets the player for the next game."""
        del observation
        self.forget()

    def forget(self) -> None:
        """Starts a new game with the next observation; for loops that end in mid-game."""
        self._is_first = True
        self._last = None

    def _infer(self, padded: PyTree, reward: float) -> PyTree:
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
    params: Which = "last",
    greedy: bool = True,
    seed: int = 0,
) -> list[RunAgent]:
    """Returns several players with the same params, each with its own recurrent state.

    Args:
      run_dir: the directory of a run.
      obs_space: the observation space of the game, as in training.
      action_space: the action space of the game, as in training.
      num_agents: number of players.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: True if players take the best action; False to sample as in training.
      seed: seed of the sampling.

    Raises:
      ValueError: there is no run or no checkpoint, or the run was trained on other spaces.
    """
    experiment = read_config(directory := RunDir.open(run_dir))
    name = f"the agent of {run_dir}"
    codec = PaddedCodec(obs_space, action_space, name)
    spec = EnvSpec(codec.observation_spec, codec.action_spec)
    path = chosen_checkpoint(directory, experiment, params)
    restored = read_params(path, experiment, spec)
    after = counts_at(path, experiment)
    agent = make_agent(experiment, spec, greedy=greedy, after=after)
    key = jax.random.PRNGKey(seed)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams(restored), num_agents, key)
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


class _Counted:
    """A player who ends the loop after a number of games, and keeps their scores."""

    def __init__(self, player: RunAgent, games: int):
        self.scores: list[float] = []
        self._player, self._games = player, games

    def act(self, observation: ScoredObservation) -> Actions | None:
        """Returns the player's actions; None once all games were played."""
        return None if len(self.scores) >= self._games else self._player.act(observation)

    def idle(self) -> None:
        """Tells the player about a tick at which only others act."""
        self._player.idle()

    def game_over(self, observation: ScoredObservation) -> None:
        """Records the score."""
        self.scores.append(observation.score)
        self._player.game_over(observation)


def play_program(
    run_dir: str | os.PathLike[str],
    command: str,
    *,
    games: int = 1,
    agents: int = 1,
    greedy: bool = True,
    seed: int = 0,
    step_timeout: float = 60.0,
) -> list[list[float]]:
    """Starts a game in another process, in any language, and lets the agent of a run play it.

    Args:
      run_dir: the directory of a run; the newest checkpoint is used.
      command: starts the game, see `rlstack.entity.inverted.SocketGame`.
      games: number of games of each player.
      agents: number of players of the game.
      greedy: True if players take the best action; False to sample as in training.
      seed: seed of the game and of the sampling.
      step_timeout: longest time in seconds between the actions and the game's next observation.

    Returns:
      The scores of each player's games.

    Raises:
      ValueError: there is no run or no checkpoint, or the run was trained on other spaces.
      EnvError: the game does not follow the protocol.
      GameError: the game did not start, or ended too early.
    """
    game = RemoteGame(command, "", agents, seed, step_timeout, START_TIMEOUT)
    try:
        team = team_from_run(
            run_dir, game.obs_space, game.action_space, agents, greedy=greedy, seed=seed
        )
        players = [_Counted(player, games) for player in team]
        game.play(players)
    finally:
        game.close()
    return [player.scores for player in players]
