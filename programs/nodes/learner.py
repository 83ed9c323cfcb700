"""The learner's node: learns from replay, publishes params, writes checkpoints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from programs.build.components import make_agent
from programs.build.seeds import role_key
from programs.nodes.coordination import OVER, RUNNING
from programs.nodes.line import Line, Orders, Setup
from programs.nodes.meeting import Meeting
from programs.nodes.params import know_records
from programs.nodes.replay import OpensReplay
from programs.tracking.failed_update import saved_on_failure
from rlstack.acting.params import ParamsPublisher
from rlstack.learning.learner import Learner
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import codec, remote
from rlstack.storage import checkpoint
from rlstack.types import Batch

_PATIENCE = 0.2  # seconds to wait for items before asking whether the program still runs
_MEETING_SECONDS = 5.0  # that an actor waits for the others in one call; it calls again


class LearnerNode:
    """A Learner that goes on until the coordinator says otherwise."""

    def __init__(
        self,
        setup: Setup,
        replay: OpensReplay,
        coordinator: Any,
        stop: threading.Event,
    ) -> None:
        """Makes the learner, as it was if the program goes on from a checkpoint.

        Args:
          setup: of the program.
          replay: from where to learn.
          coordinator: told of updates and checkpoints.
          stop: set by the launcher to end this node.
        """
        setup.configure_jax(single_thread=False)
        experiment = setup.experiment
        self._setup, self._coordinator = setup, coordinator
        self._line = Line(coordinator, "learner", stop)
        agent = make_agent(experiment, setup.spec)
        know_records(agent, setup.step)
        self._reads = replay.reader()
        self._replay = self._reads.buffer
        self._learner = Learner(
            experiment.learner, agent, self._replay, role_key(experiment.seed, "learner")
        )
        if setup.restored is not None:
            self._load(setup.restored)
        self._publisher = ParamsPublisher(codec.encode)
        self._publish()
        self._meeting = Meeting(experiment.program.num_actors)
        self._checkpoints = 0  # ordered so far
        self._saved_frames = -1
        self._replay_gauges: Mapping[str, Any] = {}
        self._line.gauges = self._gauges

    @remote(idempotent=True)
    def get_params(self, newer_than: int = -1) -> tuple[int, bytes] | None:
        """Returns (version, encoded params), or None when there is nothing newer."""
        return self._publisher.get(newer_than)

    @remote(idempotent=True)
    def replay_name(self) -> str:
        """Returns what actors need to find the replay, where that is in memory of this process."""
        return self._reads.name

    @remote(idempotent=True)
    def settle(
        self, rank: int, incarnation: int, env_frames: int, attended: int
    ) -> tuple[str, int]:
        """In lock-step: waits until all actors came here and the learner learned all it may.

        The arguments are those of `Meeting.attend`, and so is the answer.
        """
        return self._meeting.attend(rank, incarnation, env_frames, attended, _MEETING_SECONDS)

    def run(self) -> None:
        """Learns until told to stop, saves, and hands out params until all is over."""
        try:
            if not self._setup.experiment.replay.min_actors:  # a round's size is not known before
                self._learner.compile(self._batch_spec())  # while actors make the first batch
            if self._setup.experiment.program.pacing == "lock_step":
                self._learn_in_lock_step()
            else:
                self._learn()
            orders = self._ask(now=True)
            self._save(orders.env_frames)
            self._line.gauges = self._publisher.stats  # the replay may end before this node
            if orders.phase != OVER:  # else the coordinator waits for no one, and may have left
                self._coordinator.saved()
            while self._ask().phase != OVER:
                time.sleep(0.05)
        finally:
            self._meeting.close()
            self._publisher.close()
            self._replay.close()

    def _batch_spec(self) -> Batch:
        replay = self._setup.experiment.replay
        shape = (replay.unroll_length + 1, replay.batch_size)
        trajectory = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype), self._setup.step
        )
        weights: Any = jax.ShapeDtypeStruct((replay.batch_size,), np.float32)
        return Batch(trajectory, weights)

    def _learn(self) -> None:
        while (orders := self._ask()).phase == RUNNING:
            self._save_if_due(orders)
            try:
                sample = self._replay.sample(timeout=_PATIENCE)
            except ReplayTimeoutError:
                continue
            self._update(sample)

    def _learn_in_lock_step(self) -> None:
        experiment = self._setup.experiment
        start = self._ask(now=True).env_frames
        while (orders := self._ask()).phase == RUNNING:
            frames = self._meeting.wait(_PATIENCE)
            if frames is None:
                continue
            while self._replay.can_sample():
                self._update(self._replay.sample())
            self._look_at_replay()
            self._save_if_due(orders)
            self._meeting.dismiss(go_on=start + frames < experiment.frames)

    def _update(self, sample: Any) -> None:
        with saved_on_failure(self._setup.directory, self._learner):
            self._line.log(self._learner.step(sample), "learner/")
        self._replay.set_params_version(self._learner.version)
        self._publish()

    def _publish(self) -> None:
        version, params = self._learner.get_params()  # type: ignore[misc]  # always newer than -1
        self._publisher.publish(version, params)

    def _ask(self, *, now: bool = False) -> Orders:
        line = self._line
        line.count(learner_steps=self._learner.version)
        return line.ask(now=now)

    def _gauges(self) -> dict[str, Any]:
        # In lock-step not while actors write: the look would settle whose items come first.
        if self._setup.experiment.program.pacing != "lock_step":
            self._look_at_replay()
        return {**self._replay_gauges, **self._publisher.stats()}

    def _look_at_replay(self) -> None:
        with contextlib.suppress(ReplayTimeoutError, ReplayClosedError):  # a server that has ended
            stats = self._replay.stats()
            self._replay_gauges = {f"replay/{name}": value for name, value in stats.items()}

    def _save_if_due(self, orders: Orders) -> None:
        if orders.checkpoints > self._checkpoints:
            self._checkpoints = orders.checkpoints
            self._save(orders.env_frames)

    def _save(self, env_frames: int) -> None:
        if env_frames == self._saved_frames:
            return
        self._saved_frames = env_frames
        keeps = self._setup.experiment.checkpoint_replay
        tree = {"learner": self._learner.save(), "replay": self._reads.save() if keeps else ()}
        directory = self._setup.directory.checkpoints
        checkpoint.save(directory, env_frames, tree, {"env_frames": env_frames})

    def _load(self, path: Path) -> None:
        keeps = self._setup.experiment.checkpoint_replay
        replay = jax.tree.map(lambda _: checkpoint.ANY_ARRAY, self._reads.save()) if keeps else ()
        target = {"learner": self._learner.save(), "replay": replay}
        saved = checkpoint.restore(path, target, partial=True)
        self._learner.load(saved["learner"])
        if keeps:
            self._reads.load(saved["replay"])
