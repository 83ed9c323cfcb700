"""What a run in this process reports of its policies: counters, memory and evaluations.

A run of one policy is a set of one, whose name is "". Names precede the names of logs.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rlstack.acting.evaluator import Evaluation, Evaluator
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.config.experiment import Experiment
from rlstack.types import EnvSpec, Params, PyTree, Transition

if TYPE_CHECKING:  # a run of one policy does not import these
    from rlstack.programs.build.policies.members import Division
    from rlstack.programs.build.policies.versions import Versions


class Learner(Protocol):
    """What has learned one policy, such as a `rlstack.learning.learner.Learner`."""

    version: int  # number of updates
    params: Params

    def save(self) -> PyTree:
        """Returns params, learner state and version, by these names."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""


class PolicyReports(abc.ABC):
    """Counters and evaluations of the policies of one run.

    Attributes:
      experiment: the run's experiment.
      division: which policy plays which seats; None for an experiment of one policy.
      learners: the learners of the policies that learn, by policy name.
    """

    experiment: Experiment
    division: Division | None = None
    learners: Mapping[str, Any]
    _versions: Mapping[str, Versions]  # by policy name, for those that play earlier versions
    _evaluate: Callable[..., Evaluation]

    @abc.abstractmethod
    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""

    @abc.abstractmethod
    def _step_spec(self, name: str) -> Transition:
        """Returns the spec of one step of a policy that learns, as its replay stores it."""

    @abc.abstractmethod
    def _replay_stats(self, name: str) -> Mapping[str, object]:
        """Returns the counters of the replay of a policy that learns."""

    def _make_evaluator(self, spec: EnvSpec) -> None:
        """Makes the evaluator of the policies, for environments with this spec.

        Raises:
          ValueError: an agent does not fit the environments.
        """
        if self.division is None:
            self._evaluate_with(make_evaluator(self.experiment, spec))
        else:
            from rlstack.programs.build.policies.evaluation import SetEvaluator

            made = SetEvaluator(self.experiment, self.division, spec, self._versions)
            self._evaluate = made.evaluate

    def _evaluate_with(self, evaluator: Evaluator) -> None:
        """Sets the evaluator of an experiment of one policy."""
        self._evaluate = functools.partial(evaluate, self.experiment, evaluator)

    def older_template(self) -> PyTree:
        """Returns the structure that earlier versions saved, None if it is the same."""
        return None

    @functools.cached_property
    def learner(self) -> Any:
        """The learner of the only policy, or a `Learners` of several."""
        return self.learners[""] if self.division is None else Learners(self.learners)

    @property
    def env_frames(self) -> int:
        """Steps of the policies that learn, of this run and of those that it resumes."""
        return sum(map(self.frames_of, self.learners))

    def by_policy(self) -> dict[str, dict[str, float]]:
        """Returns the counters of each of several policies that learn, for the result."""
        return {
            name: {"env_frames": self.frames_of(name), "learner_steps": learner.version}
            for name, learner in self.learners.items()
            if name
        }

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that each replay needs.

        Raises:
          ValueError: there is not enough memory.
        """
        for name in self.learners:
            own = self.experiment
            if self.division is not None:
                own = self.division.members[name].experiment
                print(f"{name} ", end="", file=stream)
            announce_replay(own, self._step_spec(name), stream)

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        found: dict[str, object] = {"learner/steps": self.learner.version}
        for name, learner in self.learners.items():
            prefix = f"{name}/" if name else ""
            found[f"{prefix}learner/steps"] = learner.version
            for key, value in self._replay_stats(name).items():
                found[f"{prefix}replay/{key}"] = value
        for name, versions in self._versions.items():
            found |= {f"{name}/{key}": value for key, value in versions.stats().items()}
        return found

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params of each policy, in games with the others, all greedy.

        Arguments are those of `rlstack.programs.run.run_session.Run.evaluate`.
        """
        return self._evaluate(self.learner.params, progress, brief=brief)


class Learners:
    """The learners by policy name, with the attributes of a `Learner` that runs read.

    For each entry that a `Learner` saves, this saves a dict from policy name to that entry. So the
    params of a policy are at ``["learner"]["params"][policy]`` of a checkpoint.
    """

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self.by_name = dict(learners)

    @property
    def version(self) -> int:
        """The number of updates that every learner has made."""
        return min(learner.version for learner in self.by_name.values())

    @property
    def params(self) -> dict[str, Params]:
        """The newest params of each policy."""
        return {name: learner.params for name, learner in self.by_name.items()}

    def save(self) -> PyTree:
        """Returns what each learner saves, by its parts and then by policy."""
        saved = {name: learner.save() for name, learner in self.by_name.items()}
        parts = next(iter(saved.values()))
        return {part: {name: tree[part] for name, tree in saved.items()} for part in parts}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        for name, learner in self.by_name.items():
            learner.load({part: by_name[name] for part, by_name in saved.items()})
