"""One process that alternates acting and learning, for debugging and small machines."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TextIO

import jax
import numpy as np

from rlstack.acting.actor import Actor, transition_spec
from rlstack.acting.evaluator import Evaluation
from rlstack.acting.inferencer import Inferencer
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import single_process_device
from rlstack.programs.build.environments import Pool, make_env, starting_seconds
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.hooks import make_step_processor
from rlstack.programs.build.replay import announce_replay, make_replay
from rlstack.programs.build.seeds import acting_key, role_key, role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage import checkpoint
from rlstack.types import PyTree

_NOTHING = contextlib.nullcontext()


class SingleProcess:
    """The parts of an experiment in one process, and the loop that drives them.

    Attributes:
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
        """
        self.experiment, self._phase = experiment, phase
        seed = experiment.seed
        self._restarts = 0
        self._base_frames = 0
        with phase(f"making {experiment.env.num_envs:,} environments"):
            began = time.monotonic()
            self.env = self._make_env(role_seed(seed, "env"))
            self.starting_seconds = starting_seconds(self.env, began)
        try:
            agent = make_agent(experiment, self.env.spec)
            self.step_spec = transition_spec(agent, self.env.spec)
            self.replay = make_replay(experiment, self.step_spec)
            self.learner = Learner(
                experiment.learner, agent, self.replay, role_key(seed, "learner")
            )
            self.inferencer = Inferencer(
                experiment.inferencer,
                agent,
                self.learner,
                experiment.env.num_envs,
                acting_key(seed, rank=0),
                device=single_process_device(experiment),
            )
            with phase(f"resetting {experiment.env.num_envs:,} environments"):
                self.actor = self._make_actor()
            self._evaluator = make_evaluator(experiment, self.env.spec)
        except BaseException:
            self.env.close()
            raise

    def _make_env(self, seed: int) -> Pool:
        experiment = self.experiment
        return make_env(experiment.env, seed, step_info=bool(experiment.step_processor))

    def _make_actor(self) -> Actor:
        processor = make_step_processor(self.experiment)
        return Actor(self.env, self.inferencer, self.replay, step_processor=processor)

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that the replay needs.

        Raises:
          ValueError: there is not enough memory.
        """
        announce_replay(self.experiment, self.step_spec, stream)

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Acts and learns until a budget is spent, a rule says stop, or ``stop()`` is true."""
        actor, replay, learner = self.actor, self.replay, self.learner
        most = self.experiment.updates or math.inf
        env_steps = range(self.experiment.steps_per_update)
        # The first calls compile, which may take minutes for a large network.
        acting: AbstractContextManager = self._phase("compiling the agent's step, and acting")
        first = learner.version
        while not (periodic.ended_by(self.env_frames, learner.version) or stop()):
            with acting:
                for _ in env_steps:
                    periodic.log(actor.step())
            acting = _NOTHING
            while learner.version < most and replay.can_sample():
                sample = replay.sample()
                learning = learner.version == first
                with self._phase("compiling the learner's step") if learning else _NOTHING:
                    logs = learner.step(sample)
                periodic.log(logs, "learner/")
            periodic.tick(self.env_frames, self.stats)

    @property
    def env_frames(self) -> int:
        """Environment steps so far, of this run and of those that it resumes."""
        return self._base_frames + self.actor.env_frames

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        replay = {f"replay/{name}": value for name, value in self.replay.stats().items()}
        env = {f"env/{name}": value for name, value in self.env.stats().items()}
        return {"learner/steps": self.learner.version, **replay, **env}

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params; see `rlstack.programs.run.run_session.Run.evaluate`."""
        _, params = self.learner.get_params() or (0, None)
        return evaluate(self.experiment, self._evaluator, params, progress, brief=brief)

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return {
            "learner": self.learner.save(),
            "inferencer": self.inferencer.save(),
            "replay": self.replay.save() if self.experiment.checkpoint_replay else (),
            "counters": {
                "env_frames": np.int64(self.env_frames),
                "restarts": np.int64(self._restarts),
            },
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        tree = self.save()
        return tree | {"replay": jax.tree.map(lambda _: checkpoint.ANY_ARRAY, tree["replay"])}

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned, and starts new episodes."""
        self.learner.load(saved["learner"])
        if self.experiment.checkpoint_replay:
            self.replay.load(saved["replay"])
        self._base_frames = int(saved["counters"]["env_frames"])
        self._restarts = int(saved["counters"]["restarts"])
        self.actor.env_frames = 0
        self.restart_environments()
        self.inferencer.load(saved["inferencer"])

    def restart_environments(self) -> None:
        """Abandons the running episodes and starts new ones, as resuming a run does.

        The state of EnvPool's environments cannot be saved, so a resumed run starts new episodes,
        with new seeds. An uninterrupted run that calls this at the same frame learns the same.
        """
        self._restarts += 1
        self._base_frames = self.env_frames
        self.env.close()
        seed = role_seed(self.experiment.seed, "env", self._restarts)
        self.env = self._make_env(seed)
        self.replay.gap(None)
        self.actor = self._make_actor()

    def close(self) -> None:
        """Closes the environments and the replay."""
        self.env.close()
        self.replay.close()
