"""One process that alternates acting and learning, with one policy or with several.

Each policy is a `Player`: it has an actor and, if it learns, a replay and a learner. In a step all
policies act, then the environments step. Then the learners learn, in the order of the policies.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import jax
import numpy as np

from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.environments import Pool, starting_seconds
from rlstack.programs.build.player import Player, Shared, learning_player, make_shared
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.policy_reports import PolicyReports
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec, Logs, PyTree, Transition

_NOTHING = contextlib.nullcontext()


class SingleProcessRun(PolicyReports):
    """The parts of an experiment in one process, and one step of the loop over them.

    Attributes:
      players: the policies by name; the only policy of an experiment without names is "".
      starting_seconds: seconds spent starting environment worker processes; 0 if there are none.
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
          ValueError: an agent does not fit the environments, or the policies do not fit the seats
            of the games.
        """
        self.experiment, self._phase = experiment, phase
        self.division = None
        if experiment.policies:
            from rlstack.programs.build.policies.members import divide

            self.division = divide(experiment)
        self._restarts = 0
        number = f"{experiment.env.num_envs:,} environments"
        with phase(f"making {number}"):
            began = time.monotonic()
            self._shared = self._make_shared()
            self.starting_seconds = starting_seconds(self.env, began)
        try:
            self.players = self._make_players(self.env.spec)
            self._learning = {n: p for n, p in self.players.items() if p.learner is not None}
            self.learners = {n: p.learner for n, p in self._learning.items() if p.learner}
            with phase(f"resetting {number}"):
                self._begin()
            self._versions = {n: p.versions for n, p in self.players.items() if p.versions}
            self._make_evaluator(self.env.spec)
        except BaseException:
            self._shared.close()
            raise
        self._started: set[str] = set()  # what this process has done once, and so has compiled
        self._periodic: PeriodicActions | None = None  # receives the logs of updates that still run

    @property
    def env(self) -> Pool:
        """All environments."""
        return self._shared.pool

    @property
    def player(self) -> Player:
        """The only policy of an experiment without names of policies."""
        return self.players[""]

    def _make_shared(self) -> Shared:
        seed, restarts = self.experiment.seed, self._restarts
        seeds = role_seed(seed, "env", restarts), role_seed(seed, "seating", restarts)
        return make_shared(self.experiment, self.division, self.experiment.env, *seeds)

    def _make_players(self, spec: EnvSpec) -> dict[str, Player]:
        if self.division is None:
            return {"": learning_player(self.experiment, spec)}
        from rlstack.programs.build.policies.history import make_players

        return make_players(self.division, spec)

    def _begin(self) -> None:
        for name, player in self.players.items():
            player.begin(self._shared.views[name])

    def advance(self, periodic: PeriodicActions) -> None:
        """Acts for the steps between two updates, then learns from what the replays can give."""
        self._periodic = periodic
        # The first calls compile, which may take minutes for a large network.
        with self._first("acting", "compiling the agent's step, and acting"):
            for _ in range(self.experiment.steps_per_update):
                self._act(periodic)
        for name, player in self._learning.items():
            self._learn(name, player, periodic)
        for player in self.players.values():
            player.after_learning()

    def _act(self, periodic: PeriodicActions) -> None:
        """Acts once with every policy; the environments step after the last one."""
        for name, player in self.players.items():
            logs = player.actor.act()
            if logs is None:
                continue
            if name:
                periodic.log(logs, f"{name}/")
            if player.learner is not None:
                periodic.log(logs)
        for player in self.players.values():
            player.actor.receive()
        for player in self.players.values():
            player.watch(self._shared)

    def _learn(self, name: str, player: Player, periodic: PeriodicActions) -> None:
        """Learns from what the replay of one policy can give."""
        replay, learner = player.replay, player.learner
        assert replay is not None and learner is not None
        most = self.experiment.updates or math.inf
        while learner.version < most and replay.can_sample():
            with self._first(f"learner {name}", f"compiling the step of {name or 'the'} learner"):
                self._log_updates(name, periodic, lambda: learner.update_from(replay, most))

    def _log_updates(
        self, name: str, periodic: PeriodicActions, update: Callable[[], Logs]
    ) -> None:
        """Logs what updates of one policy return."""
        try:
            logs = update()
        except NonFiniteError as error:
            if name:
                error.before["policy"] = name  # for `rlstack rerun`
            raise
        periodic.log(logs, f"{name}/learner/" if name else "learner/")

    def _first(self, name: str, text: str) -> AbstractContextManager:
        """Returns the context of a call, which shows the text if it is the first of this name."""
        if name in self._started:
            return _NOTHING
        self._started.add(name)
        return self._phase(text)

    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""
        return self.players[name].env_frames

    def _step_spec(self, name: str) -> Transition:
        return self.players[name].step_spec

    def _replay_stats(self, name: str) -> Mapping[str, object]:
        replay = self.players[name].replay
        assert replay is not None
        return replay.stats()

    def stats(self) -> dict[str, object]:
        """Returns the counters to log, after the logs of all updates so far."""
        if self._periodic is not None:
            for name, learner in self.learners.items():
                self._log_updates(name, self._periodic, learner.last_logs)
        return super().stats() | {f"env/{key}": value for key, value in self.env.stats().items()}

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        policies = {name: player.save() for name, player in self.players.items()}
        counters = {"restarts": np.int64(self._restarts)}
        if self.division is not None:
            return {"learner": self.learner.save(), "policies": policies, "counters": counters}
        (only,) = policies.values()
        counters["env_frames"] = only.pop("env_frames")
        return {"learner": self.learner.save(), **only, "counters": counters}

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        tree = self.save()
        for saved in tree["policies"].values() if self.division else [tree]:
            saved["replay"] = jax.tree.map(lambda _: checkpoint.ANY_ARRAY, saved["replay"])
        return tree

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned, and starts new episodes."""
        self.learner.load(saved["learner"])
        counters = saved["counters"]
        of = saved["policies"] if self.division else {"": saved | counters}
        for name, player in self.players.items():
            player.load(of[name])
        self._restarts = int(counters["restarts"])
        self.restart_environments()
        for name, player in self.players.items():
            player.inferencer.load(of[name]["inferencer"])

    def restart_environments(self) -> None:
        """Abandons the running episodes and starts new ones, as resuming a run does.

        The state of EnvPool's environments cannot be saved, so a resumed run starts new episodes,
        with new seeds. An uninterrupted run that calls this at the same frame learns the same.
        """
        self._restarts += 1
        self._shared.close()
        self._shared = self._make_shared()
        for player in self.players.values():
            player.gap()
        self._begin()

    def close(self) -> None:
        """Closes the environments and the replays."""
        self._shared.close()
        for player in self.players.values():
            player.close()
