"""A policy set in one process, as the books of its run see it, whichever loop trains it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TextIO

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.components.replay import announce_replay
from rlstack.programs.policy_sets.evaluation import SetEvaluator
from rlstack.programs.policy_sets.learners import Learners
from rlstack.programs.policy_sets.members import Division
from rlstack.programs.policy_sets.versions import Versions
from rlstack.types import Transition


class PolicySet(abc.ABC):
    """Counters and evaluations of the policies of one run.

    Attributes:
      division: which policy plays which seats.
      learner: the learners of the policies that learn.
    """

    division: Division
    learner: Learners
    _versions: Mapping[str, Versions]  # of the policies that play earlier versions
    _evaluator: SetEvaluator

    @abc.abstractmethod
    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""

    @abc.abstractmethod
    def _step_spec(self, name: str) -> Transition:
        """Returns the spec of one step of a policy that learns, as its replay stores it."""

    @abc.abstractmethod
    def _replay_stats(self, name: str) -> Mapping[str, object]:
        """Returns the counters of the replay of a policy that learns."""

    @property
    def env_frames(self) -> int:
        """Steps of the policies that learn, of this run and of those that it resumes."""
        return sum(map(self.frames_of, self.learner.by_name))

    def by_policy(self) -> dict[str, dict[str, float]]:
        """Returns the counters of each policy that learns, for the result."""
        return {
            name: {"env_frames": self.frames_of(name), "learner_steps": learner.version}
            for name, learner in self.learner.by_name.items()
        }

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that each replay needs.

        Raises:
          ValueError: there is not enough memory.
        """
        for name in self.learner.by_name:
            print(f"{name} ", end="", file=stream)
            announce_replay(self.division.members[name].experiment, self._step_spec(name), stream)

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        found: dict[str, object] = {"learner/steps": self.learner.version}
        for name, learner in self.learner.by_name.items():
            found[f"{name}/learner/steps"] = learner.version
            for key, value in self._replay_stats(name).items():
                found[f"{name}/replay/{key}"] = value
        for name, versions in self._versions.items():
            found |= {f"{name}/{key}": value for key, value in versions.stats().items()}
        return found

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params of each policy, in games with the others, all greedy.

        Arguments are those of `rlstack.programs.run.books.Run.evaluate`.
        """
        return self._evaluator.evaluate(self.learner.params, progress, brief)
