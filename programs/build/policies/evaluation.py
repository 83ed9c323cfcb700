"""Evaluation of several policies: each that learns, in games with the others, all greedy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.evaluator import Evaluation, Evaluator, joined
from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.configs.acting import InferencerConfig
from rlstack.envs.opponents import LEARNER, Seating, SyncEnvWithOpponents
from rlstack.envs.pool import SyncEnv
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import Pool
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.policies.history import HistoryFollower
from rlstack.programs.build.policies.members import Division, Member, make_games
from rlstack.programs.build.policies.player import fixed_agent
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.build.seeds import role_key, role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.types import EnvSpec, Params, PRNGKey, PyTree, TimeStep


class _Newest:
    """The params that an evaluation uses, as a source for an Inferencer."""

    params: Params = None

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        return (0, self.params) if newer_than < 0 else None


class Follower:
    """Plays some rows of an evaluation; an `rlstack.envs.opponents.Opponent`.

    Attributes:
      agent: the agent of the policy.
    """

    def __init__(self, agent: Agent, params: Params, rows: int, rng_key: PRNGKey) -> None:
        """Makes the inferencer.

        Args:
          agent: the agent of the policy.
          params: the policy's params, if they never change.
          rows: number of rows.
          rng_key: the acting key; every evaluation starts with this key.
        """
        self.agent, self._params = agent, jax.tree.map(jnp.asarray, params)
        self._source = _Newest()
        self._inferencer = Inferencer(InferencerConfig(), agent, self._source, rows, rng_key)
        self._fresh = self._inferencer.save()

    def begin(self, params: Params = None) -> None:
        """Begins an evaluation with the given params; None for those of the constructor."""
        self._source.params = self._params if params is None else params
        self._inferencer.load(self._fresh)

    def __call__(self, seats: np.ndarray | None, timestep: TimeStep) -> PyTree:
        """Returns actions."""
        return self._inferencer.inference(seats, timestep).agent_output.action


def follower(
    member: Member, spec: EnvSpec, rows: int, versions: Versions | None = None
) -> Follower | HistoryFollower:
    """Makes the follower of a policy, which chooses its actions in evaluations of other policies.

    A learning policy acts as in its own evaluation; any other one acts as its config says.

    Args:
      member: the policy.
      spec: the spec of the environments.
      rows: number of rows that the policy plays.
      versions: the earlier versions, for a policy that plays them.

    Raises:
      ValueError: the policy's agent does not fit the environments.
    """
    if versions is not None:
        return HistoryFollower(member, versions, spec, rows)
    rng_key = role_key(member.experiment.seed, "evaluator", 1)
    if member.kind == "learning":
        return Follower(make_agent(member.experiment, spec, evaluating=True), (), rows, rng_key)
    agent, params = fixed_agent(member, spec)
    return Follower(agent, params, rows, rng_key)


AnyFollower = Follower | HistoryFollower
_ITSELF = "the other policies"


class SetEvaluator:
    """Evaluates each policy that learns, one after the other.

    A policy plays ``evaluator.num_envs`` rows; the other policies of the set play the other seats
    of the same games. With drawn seats, the policies move by one seat from game to game.
    """

    def __init__(
        self,
        experiment: Experiment,
        division: Division,
        spec: EnvSpec,
        versions: Mapping[str, Versions],
    ) -> None:
        """Makes an evaluator for each policy that learns.

        Args:
          experiment: the experiment, which holds the settings of evaluation.
          division: the experiment's policies and their seats.
          spec: the spec of the environments.
          versions: the earlier versions of each policy of kind "history", by policy name.

        Raises:
          ValueError: the number of a policy's rows is not a multiple of its seats per game.
        """
        self._experiment, self._division, self._spec = experiment, division, spec
        self._versions = versions
        self._drawn = experiment.seating == "drawn"
        self._evaluators: dict[str, Evaluator] = {}
        self._followers: dict[tuple[str, int], AnyFollower] = {}
        for member in division.learning:
            rows = experiment.evaluator.num_envs
            if rows % len(member.seats):
                raise ValueError(
                    f"Experiment: evaluator.num_envs must be a multiple of the {len(member.seats)} "
                    f"seats that {member.name} plays in each game; got {rows}."
                )
            self._evaluators[member.name] = make_evaluator(member.experiment, spec)

    def evaluate(
        self,
        params: Mapping[str, Params],
        progress: Callable[[int, int], None] | None = None,
        brief: bool = False,
    ) -> Evaluation:
        """Evaluates params of each policy that learns.

        Args:
          params: the params of the policies that learn, by name.
          progress: called after each step with the number of finished episodes and of all episodes.
          brief: True to play only one episode in each environment.
        """
        parts: list[Evaluation] = []
        for number, member in enumerate(self._division.learning):

            def show(ended: int, total: int, number: int = number) -> None:
                if progress is not None:
                    progress(number * total + ended, len(self._evaluators) * total)

            found = evaluate(
                member.experiment,
                self._evaluators[member.name],
                params[member.name],
                show,
                make_pool=functools.partial(self.make_pool, member, params),
                brief=brief,
            )
            names = (member.name,) * len(found.returns)
            parts.append(found._replace(opponents=(), policies=names))
        return joined(parts)

    def make_pool(self, member: Member, params: Mapping[str, Params], first: int = 0) -> Pool:
        """Makes the games of one policy's evaluation; the other policies play in them.

        Args:
          member: the policy that is evaluated.
          params: the params of the policies that learn, by name.
          first: see `rlstack.programs.build.environments.make_evaluation_env`.
        """
        experiment, num_seats = self._experiment, self._division.num_seats
        games = experiment.evaluator.num_envs // len(member.seats)
        cfg = dataclasses.replace(experiment.evaluation_env, num_envs=games * num_seats)
        seed = role_seed(experiment.seed, "evaluator") + first
        index = first if experiment.evaluator.by_index else None
        pool = make_games(cfg, num_seats, seed, first_index=index)
        others = [other for other in self._division.members.values() if other.name != member.name]
        if not others:
            return pool
        assert isinstance(pool, SyncEnv)
        players = self._players(others, games)
        against = np.zeros(experiment.evaluator.num_envs, np.int32)
        followers = [
            self._follower(other, int((players == i).sum()), params)
            for i, other in enumerate(others)
        ]
        return SyncEnvWithOpponents(pool, Seating(players, against), followers, [_ITSELF])

    def _players(self, others: list[Member], games: int) -> np.ndarray:
        """Returns who plays each row: the number of another policy, or LEARNER."""
        one = np.full(self._division.num_seats, LEARNER, np.int32)
        for i, other in enumerate(others):
            one[list(other.seats)] = i
        return np.concatenate([np.roll(one, game if self._drawn else 0) for game in range(games)])

    def _follower(self, member: Member, rows: int, params: Mapping[str, Params]) -> AnyFollower:
        """Returns what plays these rows for a policy, at the beginning of an evaluation."""
        made = self._followers.get((member.name, rows))
        if made is None:
            made = follower(member, self._spec, rows, self._versions.get(member.name))
            self._followers[member.name, rows] = made
        made.begin(params.get(member.name))
        return made
