"""The Evaluator: whole episodes with the greedy agent, no replay."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from rlstack.acting.inference import InferencerConfig
from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.checks import Checked
from rlstack.types import Logs, Params, PRNGKey, StepType


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig(Checked):
    """The evaluations of a run."""

    episodes: int = 20
    """Number of whole episodes in one evaluation."""
    num_envs: int = 10
    """Number of environments in parallel. Each plays the same number of episodes."""
    period: int = 0
    """Environment steps between evaluations during training. 0 evaluates at the end only."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "episodes", "num_envs")
        self.require_at_least(0, "period")
        rule = f"a multiple of num_envs ({self.num_envs}), so that each plays the same number"
        self.require("episodes", self.episodes % self.num_envs == 0, rule)


class Evaluation(NamedTuple):
    """The results of an evaluation."""

    returns: np.ndarray  # [episodes] float64, undiscounted
    lengths: np.ndarray  # [episodes] int64, in steps
    opponents: tuple[str, ...] = ()  # [episodes] the opponent of each; empty without opponents


def by_opponent(evaluation: Evaluation) -> dict[str, float]:
    """Returns the mean return against each opponent; empty without opponents."""
    names = np.array(evaluation.opponents)
    return {
        name: float(evaluation.returns[names == name].mean())
        for name in dict.fromkeys(evaluation.opponents)
    }


def as_logs(evaluation: Evaluation) -> Logs:
    """Returns the mean returns over all episodes and against each opponent, by name."""
    logs: Logs = {"evaluator/episode_return": evaluation.returns.mean()}
    for name, mean in by_opponent(evaluation).items():
        logs[f"evaluator/return_against/{name}"] = np.asarray(mean)
    return logs


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
          agent: built with the greedy policy.
          rng_key: the acting key; every evaluation starts with this key.
        """
        self.agent = agent
        self._num_envs = cfg.num_envs
        self._episodes_per_env = cfg.episodes // cfg.num_envs
        self._source = _EvaluatedParams()
        self._inferencer = Inferencer(
            InferencerConfig(), agent, self._source, cfg.num_envs, rng_key
        )
        self._fresh = self._inferencer.save()

    def evaluate(self, params: Params, env: Any) -> Evaluation:
        """Plays ``episodes`` episodes.

        For comparable results, evaluate params in environments of the same seed.

        Args:
          params: the params to evaluate.
          env: a `rlstack.envs.SyncEnv` of ``num_envs``, perhaps with opponents; the caller closes
            it.

        Raises:
          ValueError: the pool does not have ``num_envs`` environments.
        """
        if env.num_envs != self._num_envs:
            raise ValueError(
                f"Evaluator.evaluate: the pool must have num_envs ({self._num_envs}) environments; "
                f"got {env.num_envs}."
            )
        self._source.params = params
        self._inferencer.load(self._fresh)
        returns: list[list[float]] = [[] for _ in range(self._num_envs)]
        lengths: list[list[int]] = [[] for _ in range(self._num_envs)]
        episode_return = np.zeros(self._num_envs)
        length = np.zeros(self._num_envs, np.int64)
        timestep = env.reset()
        while min(map(len, returns)) < self._episodes_per_env:
            episode_return += timestep.reward
            length += timestep.step_type != StepType.FIRST
            for i in np.flatnonzero(timestep.step_type == StepType.LAST):
                if len(returns[i]) < self._episodes_per_env:
                    returns[i].append(episode_return[i])
                    lengths[i].append(length[i])
                episode_return[i] = length[i] = 0
            action = self._inferencer.inference(None, timestep).agent_output.action
            timestep = env.step(action)
        met = [
            name for name in getattr(env, "opponents", ()) for _ in range(self._episodes_per_env)
        ]
        return Evaluation(np.concatenate(returns), np.concatenate(lengths), tuple(met))
