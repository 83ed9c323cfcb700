"""The Evaluator: whole episodes with the agent of evaluation, no replay."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.configs.acting import EvaluatorConfig, InferencerConfig
from rlstack.types import Array, Logs, Params, PRNGKey, StepType

_log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """The results of an evaluation."""

    returns: np.ndarray  # [episodes] float64, undiscounted
    lengths: np.ndarray  # [episodes] int64, in steps
    opponents: tuple[str, ...] = ()  # [episodes] the opponent of each; empty without opponents
    cut: int = 0  # number of episodes that were longer than max_steps
    # By name: the environments' numbers of these episodes, each [n], n <= episodes.
    metrics: Mapping[str, Array] = MappingProxyType({})
    policies: tuple[str, ...] = ()  # [episodes] the policy of each; empty for one policy


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Returns several evaluations as one."""
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    return Evaluation(
        np.concatenate([part.returns for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        tuple(name for part in parts for name in part.opponents),
        sum(part.cut for part in parts),
        {name: np.hstack([part.metrics.get(name, ()) for part in parts]) for name in names},
        tuple(name for part in parts for name in part.policies),
    )


def by_opponent(evaluation: Evaluation) -> dict[str, float]:
    """Returns the mean return against each opponent; empty without opponents."""
    names = np.array(evaluation.opponents)
    return {
        name: float(evaluation.returns[names == name].mean())
        for name in dict.fromkeys(evaluation.opponents)
    }


def by_policy(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Returns the returns of the episodes of each policy; empty for one policy."""
    names = np.array(evaluation.policies)
    return {name: evaluation.returns[names == name] for name in dict.fromkeys(evaluation.policies)}


def as_logs(evaluation: Evaluation) -> Logs:
    """Returns mean returns by name: over all episodes, against each opponent, of each policy.

    The means of the environments' own numbers are ``evaluator/episode/NAME``. If episodes were cut,
    their number is among the logs.
    """
    logs: dict[str, Any] = {"evaluator/episode_return": evaluation.returns.mean()}
    if evaluation.cut:
        logs["evaluator/cut_episodes"] = np.asarray(evaluation.cut)
    for name, mean in by_opponent(evaluation).items():
        logs[f"evaluator/return_against/{name}"] = np.asarray(mean)
    for name, returns in by_policy(evaluation).items():
        logs[f"{name}/evaluator/episode_return"] = returns.mean()
    for name, values in evaluation.metrics.items():
        logs[f"evaluator/episode/{name}"] = np.asarray(np.mean(values))
    return logs


class Row(NamedTuple):
    """The data of one step of all environments that an evaluation needs to count episodes."""

    step_type: Array  # [B] int32
    reward: Array  # [B] float32
    # The numbers of the episodes that end in these rows ([n] int32), each [n], by name.
    metrics: Callable[[Array], Mapping[str, Array]]


def _no_metrics(env_ids: Array) -> Mapping[str, Array]:
    del env_ids
    return {}


class _EvaluatedParams:
    """The params under evaluation, as a source for the Inferencer."""

    params: Params = None

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        return (0, self.params) if newer_than < 0 else None


class Evaluator:
    """Plays whole episodes.

    Every environment contributes the same number of episodes. Counting the first episodes that end
    would favour short ones.
    """

    def __init__(self, cfg: EvaluatorConfig, agent: Agent, rng_key: PRNGKey) -> None:
        """Prepares to evaluate.

        Args:
          cfg: the number of episodes and of environments.
          agent: built with the policy of evaluation, greedy except for ``cfg.epsilon``.
          rng_key: the acting key; every evaluation starts with this key.
        """
        self.agent = agent
        self._num_envs = cfg.num_envs
        self._episodes_per_env = cfg.episodes // cfg.num_envs
        self._max_steps = cfg.max_steps
        self._source = _EvaluatedParams()
        self._inferencer = Inferencer(
            InferencerConfig(), agent, self._source, cfg.num_envs, rng_key
        )
        self._fresh = self._inferencer.save()

    def with_key(self, rng_key: PRNGKey) -> Evaluator:
        """Returns an evaluator with another acting key, which shares the compiled functions.

        Only one of them may evaluate at a time.
        """
        other = copy.copy(self)
        other._fresh = {**self._fresh, "rng_key": rng_key}
        return other

    def brief(self) -> Evaluator:
        """Returns an evaluator that plays one episode in each environment.

        It shares the compiled functions. Only one of them may evaluate at a time.
        """
        other = copy.copy(self)
        other._episodes_per_env = 1
        return other

    def evaluate(
        self, params: Params, env: Any, progress: Callable[[int, int], None] | None = None
    ) -> Evaluation:
        """Plays ``episodes`` episodes.

        For comparable results, evaluate params in environments of the same seed.

        Args:
          params: the params to evaluate.
          env: a `rlstack.envs.SyncEnv` of ``num_envs``, perhaps with opponents; the caller closes
            it.
          progress: called after each step with the number of ended episodes and of all episodes.

        Raises:
          ValueError: the pool does not have ``num_envs`` environments.
        """
        if env.num_envs != self._num_envs:
            raise ValueError(
                f"Evaluator.evaluate: the pool must have num_envs ({self._num_envs}) environments; "
                f"got {env.num_envs}."
            )
        tally = _EpisodeStats(self._num_envs, self._episodes_per_env, self._max_steps)
        metrics: dict[str, list[Array]] = {}
        playing = self._play(params, env)
        row = next(playing)
        while True:
            ended = tally.add(row)
            if ended:
                for name, values in row.metrics(np.array(ended, np.int32)).items():
                    metrics.setdefault(name, []).append(values)
            if progress is not None:
                progress(tally.ended, tally.total)
            if tally.ended == tally.total:
                break
            if tally.only_cut_remain:  # an environment is reset with all others or by itself
                tally.start_again()
                row = playing.send(True)
            else:
                row = playing.send(False)
        if tally.cut:
            _log.warning(
                "evaluation: %d of %d episodes were cut after evaluator.max_steps (%d) steps and "
                "count with their returns so far; raise it if episodes are longer",
                tally.cut,
                tally.total,
                self._max_steps,
            )
        met = [
            name for name in getattr(env, "opponents", ()) for _ in range(self._episodes_per_env)
        ]
        returns, lengths = np.concatenate(tally.returns), np.concatenate(tally.lengths)
        found = {name: np.concatenate(values) for name, values in metrics.items()}
        return Evaluation(returns, lengths, tuple(met), tally.cut, found)

    def _play(self, params: Params, env: Any) -> Generator[Row, bool, None]:
        """Plays in all environments.

        Yields:
          One step of every environment, the first step of an episode at first. Sent True, it starts
          new episodes in all environments.
        """
        self._source.params = params
        self._inferencer.load(self._fresh)
        metrics = getattr(env, "episode_metrics", _no_metrics)  # other pools may have none
        timestep = env.reset()
        while True:
            restart = yield Row(timestep.step_type, timestep.reward, metrics)
            if restart:
                timestep = env.reset()
            else:
                action = self._inferencer.inference(None, timestep).agent_output.action
                timestep = env.step(action)


class _EpisodeStats:
    """The episodes of one evaluation.

    Attributes:
      returns: undiscounted returns of the episodes that count, one list for each environment.
      lengths: lengths of the same episodes in steps, one list for each environment.
      ended: number of episodes that count so far.
      total: number of episodes to play.
      cut: number of episodes that were cut.
    """

    def __init__(self, num_envs: int, episodes_per_env: int, max_steps: int) -> None:
        self.returns: list[list[float]] = [[] for _ in range(num_envs)]
        self.lengths: list[list[int]] = [[] for _ in range(num_envs)]
        self.ended, self.total, self.cut = 0, num_envs * episodes_per_env, 0
        self._episodes_per_env, self._max_steps = episodes_per_env, max_steps
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._absent = np.zeros(num_envs, np.int64)  # steps for which a seat was not in its game
        self._is_cut = np.zeros(num_envs, bool)  # whether the episode goes on but counts already

    @property
    def only_cut_remain(self) -> bool:
        """Whether every environment that must play more episodes is in one that was cut."""
        return bool(self._is_cut.any()) and all(
            cut or len(found) == self._episodes_per_env
            for cut, found in zip(self._is_cut, self.returns, strict=True)
        )

    def add(self, row: Row) -> list[int]:
        """Takes one step of every environment; returns those with an episode that ended and counts.

        Episodes that were cut are not among them.
        """
        ended = []
        step_type = np.asarray(row.step_type)
        self._return += np.asarray(row.reward)
        first, over = step_type == StepType.FIRST, step_type == StepType.LAST
        self._length += ~first
        self._absent = np.where(first, self._absent + 1, 0)
        # A seat that never joins ends no episode.
        too_long = np.maximum(self._length, self._absent) >= self._max_steps
        for i in np.flatnonzero(over | too_long):
            if not self._is_cut[i] and self._end(int(i), cut=not over[i]) and over[i]:
                ended.append(int(i))
            if over[i]:
                self._return[i] = self._length[i] = 0
                self._is_cut[i] = False
        return ended

    def _end(self, i: int, cut: bool) -> bool:
        """Ends an episode; returns whether it counts."""
        self._is_cut[i] = cut
        if len(self.returns[i]) == self._episodes_per_env:
            return False
        self.returns[i].append(self._return[i])
        self.lengths[i].append(self._length[i])
        self.ended += 1
        self.cut += cut
        return True

    def start_again(self) -> None:
        """Forgets the episodes in progress."""
        self._return[:] = self._length[:] = self._absent[:] = 0
        self._is_cut[:] = False
