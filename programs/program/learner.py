"""The learner's node: learns from replay, publishes params, writes checkpoints."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.acting.packing import OnHost
from rlstack.acting.params import ParamsPublisher
from rlstack.configs.learner import LearnerConfig
from rlstack.learning.learner import Learner
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.replay import batch_spec
from rlstack.programs.build.seeds import role_key
from rlstack.programs.program.base import (
    LEARNER,
    OVER,
    RUNNING,
    CoordinatorClient,
    ProgramState,
    Setup,
)
from rlstack.programs.program.heartbeat import Heartbeat
from rlstack.programs.program.lock_step import LockStepBarrier
from rlstack.programs.program.params import ParamsTree
from rlstack.programs.program.replay import program_replay
from rlstack.programs.program.replay_sides import ProgramReplay, SavedReplay
from rlstack.programs.session import origin, timing
from rlstack.programs.session.failed_update import saved_on_failure
from rlstack.programs.session.profile import DRAWING, LEARNING, Profile
from rlstack.programs.session.progress import Progress
from rlstack.replay import ReplayClosedError, ReplayTimeoutError, Sample
from rlstack.rpc import RemoteObject, UnavailableError, codec, remote
from rlstack.storage import allocator, checkpoint
from rlstack.types import Batch, PyTree


class LearnerNode:
    """A Learner that runs until the coordinator ends the program.

    Attributes:
      name: the name of this node.
    """

    def __init__(
        self,
        setup: Setup,
        replay: ProgramReplay | RemoteObject,
        coordinator: RemoteObject,
        stop: threading.Event,
        name: str = "",
    ) -> None:
        """Makes the learner, with the state of the checkpoint if the program resumes from one.

        Args:
          setup: the program's setup.
          replay: the replay to learn from, or a client of the node that holds it.
          coordinator: a client of the coordinator, which says when to save and when to end.
          stop: set by the launcher to end this node.
          name: the name of this node; by default the name of the only learner, or of the policy's.
        """
        experiment = setup.experiment
        allocator.keep_freed_memory()
        setup.configure_jax(single_thread=False)
        self._setup, self._coordinator, self._stop = setup, coordinator, stop
        self.name = name or setup.node(LEARNER)
        self._program = CoordinatorClient(coordinator, self.name, stop, setup.prefix)
        learner_config = self._join()
        agent = make_agent(experiment, setup.spec)
        setup.register_records(agent)
        self._source = program_replay(self._replay_setup(), replay).reader()
        self._replay = self._source.buffer
        # Compiling takes longest, so it begins first. In rounds the size of batches varies.
        batch = None if experiment.replay.min_actors else self._batch_spec()
        key = role_key(experiment.seed, "learner")
        self._learner = Learner(learner_config, agent, self._replay, key, batch)
        xla.tell_accelerator()
        self._restore()
        on_host = OnHost()
        self._publisher = ParamsPublisher(
            self._learner, lambda params: codec.encode(on_host(params))
        )
        self._hosts = ParamsTree()
        self._publication = secrets.token_hex(8)
        self._updated = threading.Condition()  # notified after each update
        self._first_update = contextlib.ExitStack()  # ends the line that explains the wait for it
        cfg = experiment.replay
        self._barrier = LockStepBarrier(
            experiment.program.num_actors, cfg.min_actors, cfg.grace_seconds
        )
        self._profile = Profile(setup.profiled, setup.directory, self.name)
        self._profile.time(self._learner, step=LEARNING, step_if_all=LEARNING)
        if experiment.program.pacing == "lock_step" or experiment.learner.processes > 1:
            self._profile.time(self._replay, sample=DRAWING)
        else:
            self._profile.read(DRAWING, lambda: self._learner.stats()["draw_seconds"])
        self._checkpoints = 0  # due so far
        self._saved_frames = -1
        self._replay_gauges: Mapping[str, Any] = {}
        self._program.gauges = self._gauges

    def _join(self) -> LearnerConfig:
        """Prepares JAX before its first computation; returns the config of the learner."""
        return self._setup.experiment.learner

    def _restore(self) -> None:
        """Restores the checkpoint, if the program resumes from one."""
        if self._setup.restored is not None:
            with self._program.phase(f"restoring {self._setup.restored.name}"):
                self._load(self._setup.restored)

    def _replay_setup(self) -> Setup:
        """Returns the setup of the replay that this learner reads."""
        return self._setup

    @remote(idempotent=True)
    def get_params(self, newer_than: int = -1) -> tuple[int, bytes] | None:
        """Returns (version, encoded params), or None when there is nothing newer."""
        return self._publisher.get(newer_than)

    @remote(idempotent=True)
    def publication(self) -> str:
        """Returns a name for the params of this program, which no other program has."""
        return self._publication

    @remote(idempotent=True)
    def next_params(
        self, newer_than: int, seconds: float, host: str = "", address: str = "", lost: str = ""
    ) -> tuple[int, bytes | str] | None:
        """Returns newer params like `get_params`, but waits up to `seconds` until there are any.

        Args:
          newer_than: the version that the caller has.
          seconds: the longest wait.
          host: the caller's host, if it may get them from another host.
          address: where other hosts may get them from the caller then; "" for nowhere.
          lost: the address of a host that did not answer the caller.

        Returns:
          The version, and the encoded params or the address of a host that has them soon.
        """
        with self._updated:
            self._updated.wait_for(lambda: self._learner.version > newer_than, seconds)
        found = self._publisher.get(newer_than)
        if lost:
            self._hosts.avoid(lost)
        if found is None or not host:
            return found
        version, params = found
        return version, self._hosts.source_of(version, len(params), host, address) or params

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Passes on the logs of an update, and wakes actors that wait for it."""
        self._profile.observe(step)
        self._program.write(step, logs)
        self._first_update.close()
        with self._updated:
            self._updated.notify_all()

    @remote(idempotent=True)
    def replay_name(self) -> str:
        """Returns the name of the replay's shared memory, empty if it has none."""
        return self._source.name

    @remote(idempotent=True)
    def arrive(
        self, rank: int, incarnation: int, env_frames: int, known_round: int
    ) -> tuple[str, int]:
        """Waits, in lock-step, until all actors have arrived and the learner has learned.

        See `LockStepBarrier.arrive` for the arguments and the result.
        """
        return self._barrier.arrive(rank, incarnation, env_frames, known_round, timing.BARRIER_CALL)

    def run(self) -> None:
        """Learns until training ends, saves, and publishes params until the program is over."""
        heartbeat = Heartbeat(self._coordinator, self.name)
        try:
            if not self._setup.experiment.replay.min_actors:  # else the batch's size varies
                with self._program.phase("compiling the learner's step"):
                    self._learner.compile(self._batch_spec())  # while actors make the first batch
            waiting = self._program.phase("waiting for the first batch, or making the first update")
            self._first_update.enter_context(waiting)
            if self._setup.experiment.program.pacing == "lock_step":
                self._learn_in_lock_step()
            else:
                self._learn()
            state = self._poll(now=True)
            self._save(state)
            self._program.gauges = self._last_gauges
            if state.phase != OVER:  # else the coordinator may have ended
                self._announce_saved()
            while self._poll().phase != OVER:
                time.sleep(timing.LEARNER_PHASE_POLL)
        finally:
            self._profile.close()
            self._first_update.close()
            heartbeat.close()
            self._barrier.close()
            self._publisher.close()
            self._replay.close()

    def _announce_saved(self) -> None:
        """Tells the coordinator that all is saved, also if it does not answer for a while."""
        while self._poll().phase != OVER:
            with contextlib.suppress(UnavailableError):
                self._coordinator.saved()
                return

    def _batch_spec(self) -> Batch:
        return batch_spec(self._setup.experiment.replay, self._setup.step)

    def _learn(self) -> None:
        def should_stop() -> bool:
            """Returns whether to stop; called between updates. Saves a checkpoint if one is due."""
            state = self._poll()
            if state.phase == RUNNING:
                self._save_if_due(state)
            return state.phase != RUNNING or self._has_learned_enough()

        with saved_on_failure(self._setup.directory, self._learner, self._setup.policy):
            if not self._has_learned_enough():
                self._learner.run(should_stop, self)
        while self._has_learned_enough() and self._poll(now=True).phase == RUNNING:
            self._rest()
        if self._poll().phase == RUNNING:
            raise ReplayClosedError("LearnerNode: the replay was closed before training ended.")

    def _rest(self) -> None:
        """Waits a moment; called repeatedly after the last update of the budget."""
        time.sleep(timing.LEARNER_PHASE_POLL)

    def _between_rounds(self) -> None:
        """Called in lock-step while actors act or wait for another policy; does nothing here."""

    def _end_round(self, env_frames: int) -> None:
        """Called at the end of a lock-step round with the program's frames; does nothing here."""

    def _discard(self) -> None:
        """Called for the steps of the last lock-step round; does nothing, as the program ends."""

    def _has_learned_enough(self) -> bool:
        updates = self._setup.experiment.updates
        return 0 < updates <= self._learner.version

    def _learn_in_lock_step(self) -> None:
        experiment = self._setup.experiment
        start = self._poll(now=True).env_frames
        # If it does not wait for all actors, one of them may wait for space in the replay.
        leaves_some = 0 < experiment.replay.min_actors < experiment.program.num_actors
        while (state := self._poll()).phase == RUNNING:
            frames = self._barrier.wait_for_actors(timing.LEARNER_SAMPLE)
            if frames is None and not leaves_some:
                self._between_rounds()
                continue
            while not self._has_learned_enough() and self._replay.can_sample():
                self._update(self._replay.sample())
            if self._has_learned_enough():
                self._discard()
            if frames is None:
                continue
            self._end_round(start + frames)
            self._read_replay_stats()
            self._save_if_due(state)
            self._poll(now=self._has_learned_enough())
            go_on = start + frames < experiment.all_frames and not self._has_learned_enough()
            self._barrier.release(go_on=go_on)

    def _update(self, sample: Sample) -> None:
        with saved_on_failure(self._setup.directory, self._learner, self._setup.policy):
            self._program.log(self._learner.step(sample), "learner/")
        self._profile.observe(self._learner.version)
        self._first_update.close()
        self._replay.set_params_version(self._learner.version)

    def _poll(self, *, now: bool = False) -> ProgramState:
        self._program.count(learner_steps=self._learner.version)
        return self._program.poll(now=now)

    def _gauges(self) -> dict[str, Any]:
        # Not in lock-step while actors write: reading would decide the order of the items.
        if self._setup.experiment.program.pacing != "lock_step":
            self._read_replay_stats()
        waits = {f"learner/{name}": value for name, value in self._learner.stats().items()}
        return {**self._replay_gauges, **self._publisher.stats(), **waits}

    def _last_gauges(self) -> dict[str, Any]:
        # The replay may end before this node. Its last values stay for the last line of logs, which
        # waits for the learners of all policies.
        return {**self._replay_gauges, **self._publisher.stats()}

    def _read_replay_stats(self) -> None:
        with contextlib.suppress(ReplayTimeoutError, ReplayClosedError):  # a server that has ended
            stats = self._replay.stats()
            self._replay_gauges = {f"replay/{name}": value for name, value in stats.items()}

    def _save_if_due(self, state: ProgramState) -> None:
        if state.checkpoints > self._checkpoints:
            self._checkpoints = state.checkpoints
            self._save(state)

    def _save(self, state: ProgramState) -> None:
        # Before the coordinator's first answer there was no update, and the frames are not known.
        if self._program.began is None or state.env_frames == self._saved_frames:
            return
        self._saved_frames = state.env_frames
        with self._program.phase("saving a checkpoint"):
            self._write_checkpoint(state)

    def _write_checkpoint(self, state: ProgramState) -> None:
        try:
            self._write(state, *self._tree())
        finally:
            self._source.clean()

    def _tree(self) -> tuple[PyTree, Mapping[str, Any]]:
        """Returns the checkpoint's tree for the learner and the replay, and the metadata."""
        keeps = self._setup.experiment.checkpoint_replay
        # First the replay: a checkpoint of the learner must not refer to one that is not there.
        replay = self._source.save() if keeps else SavedReplay()
        return {"learner": self._learner.save(), "replay": replay.tree}, replay.metadata

    def _write(self, state: ProgramState, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        self._write_at(progress_of(state), tree, metadata)

    def _write_at(self, progress: Progress, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        checkpoint.save(
            self._setup.directory.checkpoints,
            progress.env_frames,
            tree,
            {**progress.metadata(), **origin.record(self._setup.directory), **metadata},
            keep=self._setup.experiment.checkpoints_kept,
            before_rename=self._setup.directory.check_claim,
        )

    def _load(self, path: Path) -> None:
        keeps = self._setup.experiment.checkpoint_replay
        replay = self._source.template() if keeps else ()
        target = {"learner": self._learner.save(), "replay": replay}
        with origin.compared(self._setup.directory, path):
            saved = self._read(path, target)
            self._learner.load(saved["learner"])
            if keeps:
                self._source.load(saved["replay"])
        # A replay service may know of later versions, from a learner whose checkpoint was lost.
        self._replay.set_params_version(self._learner.version)

    def _read(self, path: Path, target: PyTree) -> Any:
        return checkpoint.restore(path, target, partial=True)


def progress_of(state: ProgramState) -> Progress:
    """Returns the progress of the run that the coordinator told."""
    return Progress(*(getattr(state, field) for field in Progress._fields))
