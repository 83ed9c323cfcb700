"""One process that acts with several policies in one pool, and trains those that learn."""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

import jax
import numpy as np

from rlstack.acting.evaluator import Evaluation
from rlstack.envs.seats.views import SharedPool
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.environments import starting_seconds
from rlstack.programs.build.policies.evaluation import SetEvaluator
from rlstack.programs.build.policies.history import HistoryPlayer, history_player
from rlstack.programs.build.policies.members import Division, divide, share_games
from rlstack.programs.build.policies.player import (
    LearningParts,
    Player,
    fixed_player,
    learning_player,
)
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec, Params, PyTree, Transition

_NOTHING = contextlib.nullcontext()


class PolicySet(abc.ABC):
    """Counters and evaluations of the policies of one run.

    Attributes:
      division: which policy plays which seats.
      learner: the learners of the policies that learn.
    """

    division: Division
    learner: Learners
    _versions: Mapping[str, Versions]  # by policy name, for those that play earlier versions
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

        Arguments are those of `rlstack.programs.run.run_session.Run.evaluate`.
        """
        return self._evaluator.evaluate(self.learner.params, progress, brief)


class Learner(Protocol):
    """What has learned one policy, such as a `rlstack.learning.learner.Learner`."""

    version: int  # number of updates
    params: Params

    def save(self) -> PyTree:
        """Returns params, learner state and version, by these names."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""


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


class SeveralPolicies(PolicySet):
    """The parts of an experiment with several policies, and the loop that drives them.

    Each policy has the parts of a single process: inferencer and actor, and if it learns replay and
    learner. In a step all policies act, then the environments step. Learners learn in the order of
    the policies. Frames are the steps of the policies that learn.

    Attributes:
      starting_seconds: see `rlstack.programs.run.single_process.SingleProcess`.
    """

    def __init__(
        self,
        experiment: Experiment,
        phase: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the policies do not fit the seats of the games, or an agent not its seats.
        """
        self.experiment, self._phase = experiment, phase
        self.division = divide(experiment)
        self._restarts = 0
        with phase(f"making {experiment.env.num_envs:,} environments"):
            began = time.monotonic()
            self.shared = self._make_pool()
            self.starting_seconds = starting_seconds(self.shared.pool, began)
        try:
            spec = self.shared.pool.spec
            self.players = make_players(self.division, spec)
            self._learning = {
                name: player.learning for name, player in self.players.items() if player.learning
            }
            self.learner = Learners({name: p.learner for name, p in self._learning.items()})
            with phase(f"resetting {experiment.env.num_envs:,} environments"):
                self._begin()
            self._versions = {
                name: player.versions
                for name, player in self.players.items()
                if isinstance(player, HistoryPlayer)
            }
            self._evaluator = SetEvaluator(experiment, self.division, spec, self._versions)
        except BaseException:
            self.shared.close()
            raise

    def _make_pool(self) -> SharedPool:
        seed = self.experiment.seed
        return share_games(
            self.experiment,
            self.division,
            self.experiment.env,
            role_seed(seed, "env", self._restarts),
            role_seed(seed, "seating", self._restarts),
        )

    def _begin(self) -> None:
        for name, player in self.players.items():
            player.begin(self.shared.views[name])

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Acts and learns until a budget is spent, a rule says stop, or ``stop()`` is true."""
        env_steps = range(self.experiment.steps_per_update)
        # The first calls compile, which may take minutes for large networks.
        acting: AbstractContextManager = self._phase("compiling the agents' steps, and acting")
        while not (periodic.ended_by(self.env_frames, self.learner.version) or stop()):
            with acting:
                for _ in env_steps:
                    self._act(periodic)
            acting = _NOTHING
            for name, parts in self._learning.items():
                self._learn(name, parts, periodic)
            for player in self.players.values():
                if of := player.member.cfg.history.of:
                    player.keep(self.players[of].env_frames, self._learning[of].learner.params)
            periodic.tick(self.env_frames, self.stats)

    def _act(self, periodic: PeriodicActions) -> None:
        """Acts once with every policy; the environments step after the last one."""
        for name, player in self.players.items():
            logs = player.actor.act()
            periodic.log(logs, f"{name}/")
            if player.learning:
                periodic.log(logs)
        for player in self.players.values():
            player.actor.receive()
        for player in self.players.values():
            player.watch(self.shared)

    def _learn(self, name: str, parts: LearningParts, periodic: PeriodicActions) -> None:
        """Learns from what the replay of one policy can give."""
        replay, learner = parts.replay, parts.learner
        most = self.experiment.updates or math.inf
        while learner.version < most and replay.can_sample():
            sample = replay.sample()
            compiles = learner.version == 0
            with self._phase(f"compiling the step of {name}'s learner") if compiles else _NOTHING:
                try:
                    logs = learner.step(sample)
                except NonFiniteError as error:
                    error.before["policy"] = name  # for `rlstack rerun`
                    raise
            periodic.log(logs, f"{name}/learner/")

    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""
        return self.players[name].env_frames

    def _step_spec(self, name: str) -> Transition:
        return self._learning[name].spec

    def _replay_stats(self, name: str) -> Mapping[str, object]:
        return self._learning[name].replay.stats()

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        env = self.shared.pool.stats()
        return super().stats() | {f"env/{key}": value for key, value in env.items()}

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return {
            "learner": self.learner.save(),
            "policies": {name: player.save() for name, player in self.players.items()},
            "counters": {"restarts": np.int64(self._restarts)},
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        tree = self.save()
        for saved in tree["policies"].values():
            saved["replay"] = jax.tree.map(lambda _: checkpoint.ANY_ARRAY, saved["replay"])
        return tree

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned, and starts new episodes."""
        self.learner.load(saved["learner"])
        for name, player in self.players.items():
            player.load(saved["policies"][name])
        self._restarts = int(saved["counters"]["restarts"])
        self.restart_environments()
        for name, player in self.players.items():
            player.acting.load(saved["policies"][name]["inferencer"])

    def restart_environments(self) -> None:
        """Abandons the running episodes and starts new ones, as resuming a run does.

        An uninterrupted run that calls this at the same frame learns the same.
        """
        self._restarts += 1
        self.shared.close()
        self.shared = self._make_pool()
        for parts in self._learning.values():
            parts.replay.gap(None)
        self._begin()

    def close(self) -> None:
        """Closes the environments and the replays."""
        self.shared.close()
        for player in self.players.values():
            player.close()


def make_players(division: Division, spec: EnvSpec) -> dict[str, Player]:
    """Makes the parts of all policies, in the order of the config.

    Raises:
      ValueError: an agent does not fit the environments, or a checkpoint cannot be read.
    """
    made: dict[str, Player] = {
        member.name: learning_player(member, spec) for member in division.learning
    }
    for member in division.members.values():
        if member.kind == "history":
            made[member.name] = history_player(member, made[member.cfg.history.of], spec)
        elif member.kind != "learning":
            made[member.name] = fixed_player(member, spec)
    return {name: made[name] for name in division.members}
