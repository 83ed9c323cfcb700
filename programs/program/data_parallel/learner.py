"""The node of one of several learner processes.

All processes make the same update at the same time, each with the batch of its shard. They agree on
what comes next, because a process that does something else than the others makes them wait: all
update if all have a batch; they save when the first says so; they stop when one of them was told
to. So nobody is in an update alone. While batches come, the votes are part of the update, which
changes nothing if a process votes against it. After a round in which one had no batch, they vote
without an update (`rlstack.devices.group`).

The first process writes the checkpoints and the logs. The others write their part of the replay
first, so that a checkpoint is whole. All have the same params, and each publishes them to its shard
of the actors.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.configs.learner import LearnerConfig
from rlstack.devices import group
from rlstack.programs.program.base import RUNNING, ProgramState, Setup
from rlstack.programs.program.data_parallel import shards
from rlstack.programs.program.learner import LearnerNode
from rlstack.programs.program.replay_sides import ProgramReplay, SavedReplay
from rlstack.programs.session import origin, timing
from rlstack.programs.session.failed_update import saved_on_failure
from rlstack.replay import ReplayTimeoutError, Sample
from rlstack.rpc import RemoteObject, addresses
from rlstack.rpc.socket_filter import address_of, address_towards
from rlstack.storage import checkpoint
from rlstack.types import Logs

_MEETING = "learners"  # under this name the coordinator knows where the processes meet
_LARGEST_VOTE = 10**7  # votes are less than 2^24


class GroupLearnerNode(LearnerNode):
    """One of the processes that learn as one."""

    def __init__(
        self,
        setup: Setup,
        index: int,
        replay: ProgramReplay | RemoteObject,
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Joins the other processes, and makes the learner with the state of the first process.

        Args:
          setup: the program's setup.
          index: index of this learner process.
          replay: the replay of this process's shard, or a client of it.
          coordinator: a client of the coordinator.
          stop: set by the launcher to end this node.
        """
        self._index = index
        self._shard = shards.all_of(setup)[index]
        self._draw_seconds = self._agree_seconds = 0.0
        self._last_round = time.perf_counter()  # the processes left it together
        super().__init__(setup, replay, coordinator, stop, name=f"learner/{index}")
        # Equal in all processes: their params are equal, so a host may get a version from any.
        self._publication = f"{self._group.agree(secrets.randbits(62))[0, 0]:x}"

    def _join(self) -> LearnerConfig:
        """Joins the group; returns the config of this process's learner."""
        experiment, cfg = self._setup.experiment, self._setup.experiment.learner
        host = self._own_address()
        with self._program.phase("waiting for all learner processes"):
            address = self._meeting(host)
            visible: range | tuple[int, ...] | None = None
            each = len(cfg.devices)
            if not experiment.program.on_several_hosts:  # where a process sees only its own GPUs
                every = cfg.devices or range(cfg.processes)
                each = len(every) // cfg.processes
                visible = every[self._index * each : (self._index + 1) * each]
            self._group = group.join(
                address,
                self._index,
                cfg.processes,
                host=host,
                visible=visible,
                timeout=int(timing.START),
            )
        # The devices of each process are numbered from 0: those of a CPU are its own.
        return dataclasses.replace(cfg, devices=tuple(range(each)) if each > 1 else ())

    def _own_address(self) -> str:
        """Returns the address by which the other processes reach this one."""
        program = self._setup.experiment.program
        if program.interface and not addresses.is_all(program.interface):
            return address_of(program.interface)
        if not program.on_several_hosts:
            return addresses.LOOPBACK
        return address_towards(self._coordinator.host)

    def _meeting(self, host: str) -> str:
        """Returns the address of the first process, which tells the coordinator."""
        if self._index == 0:
            ports = self._setup.experiment.program.port_range  # nodes take the first ones
            with addresses.reserve_port(ports[::-1]) as port:
                address = addresses.join(host, port)
            self._program.wait_for(lambda: self._coordinator.relocate(_MEETING, address))
            return address
        while not (found := self._program.wait_for(lambda: self._coordinator.locate(_MEETING))):
            time.sleep(timing.PHASE_POLL)
        return str(found)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Writes the logs of an update, in the first process only; see `LearnerNode.write`."""
        super().write(step, {} if self._index else logs)

    def _learn(self) -> None:
        sample: Sample | None = None
        all_had_one = False  # in the last round, so that the votes of the next go with an update
        with saved_on_failure(self._setup.directory, self._learner):
            while True:
                state = self._poll()
                runs = state.phase == RUNNING
                if self._has_learned_enough():
                    time.sleep(timing.LEARNER_PHASE_POLL)
                elif sample is None and runs:
                    sample = self._draw()
                ready = runs and sample is not None
                votes, logs = self._vote(sample, ready, runs, state.checkpoints, within=all_had_one)
                all_had_one = bool(votes[:, 0].all())
                if all_had_one and logs is None and sample is not None:
                    with group.losses_named():
                        logs = self._learner.step(sample)
                if logs is not None:
                    sample = None
                    self._replay.set_params_version(self._learner.version)
                    named = {f"learner/{name}": value for name, value in logs.items()}
                    self.write(self._learner.version, named)
                if not votes[:, 1].all():
                    return
                if votes[0, 2] > self._checkpoints:
                    self._checkpoints = int(votes[0, 2])
                    self._save(state)

    def _vote(
        self, sample: Sample | None, *own: int, within: bool
    ) -> tuple[np.ndarray, Logs | None]:
        """Returns the votes of all processes, and the logs of the update that carried them.

        Args:
          sample: this process's batch, if it has one.
          *own: this process's votes: whether to update, whether to continue, and the number of
            checkpoints due.
          within: True to exchange the votes in an update; False for a separate collective, which
            costs less while some process has no batch.
        """
        if not (within and self._learner.carries_votes):
            return self._agree(*own), None
        waited = min(round(1e6 * (time.perf_counter() - self._last_round)), _LARGEST_VOTE)
        with group.losses_named():
            votes, logs = self._learner.step_if_all(sample, (*own, waited))
        # In the update a process waits for the one that comes last.
        self._agree_seconds += 1e-6 * float(votes[:, 3].max() - waited)
        self._last_round = time.perf_counter()
        return votes, logs

    def _draw(self) -> Sample | None:
        begun = time.perf_counter()
        try:
            return self._replay.sample(timeout=timing.LEARNER_SAMPLE)
        except ReplayTimeoutError:
            return None
        finally:
            self._draw_seconds += time.perf_counter() - begun

    def _agree(self, *values: int) -> np.ndarray:
        begun = time.perf_counter()
        try:
            return self._group.agree(*values)
        finally:
            self._last_round = time.perf_counter()
            self._agree_seconds += self._last_round - begun

    def _gauges(self) -> dict[str, Any]:
        waits = {"draw_seconds": self._draw_seconds, "agree_seconds": self._agree_seconds}
        return super()._gauges() | {f"learner/{name}": value for name, value in waits.items()}

    def _save(self, state: ProgramState) -> None:
        """Saves at the frames that the first process knows; all processes call it together."""
        knows = self._program.began is not None
        frames, known = map(int, self._group.agree(state.env_frames, knows)[0])
        if not known or frames == self._saved_frames:
            return
        if self._index:
            self._saved_frames = frames
            with self._program.phase("saving its part of the replay"):
                self._save_shard(frames)
        self._group.agree(0)  # a checkpoint must not be there before its parts are
        if self._index == 0:
            super()._save(state)

    def _save_shard(self, frames: int) -> None:
        if not self._setup.experiment.checkpoint_replay:
            return
        replay: SavedReplay = self._source.save()
        directory = self._shard.directory
        try:
            checkpoint.save(
                directory.checkpoints,
                frames,
                {"replay": replay.tree},
                replay.metadata,
                keep=self._setup.experiment.checkpoints_kept,
                before_rename=directory.check_claim,
            )
        finally:
            self._source.clean()

    def _load(self, path: Path) -> None:
        if not self._index:
            return super()._load(path)
        with origin.compared(self._setup.directory, path):
            self._load_shard(path)
        self._replay.set_params_version(self._learner.version)
        return None

    def _load_shard(self, path: Path) -> None:
        saved = checkpoint.restore(path, {"learner": self._learner.save()}, partial=True)
        self._learner.load(saved["learner"])
        if self._setup.experiment.checkpoint_replay:
            own = self._shard.restored
            if own is None:
                raise ValueError(
                    f"{self._shard.directory.checkpoints} must have the part of the replay that "
                    f"belongs to {path}; it has none. To go on with an empty replay, set "
                    f"checkpoint_replay to false in {self._setup.directory.config}."
                )
            part = checkpoint.restore(own, {"replay": self._source.template()}, partial=True)
            self._source.load(part["replay"])

    def _announce_saved(self) -> None:
        if not self._index:
            super()._announce_saved()

    def _poll(self, *, now: bool = False) -> ProgramState:
        if not self._index:
            return super()._poll(now=now)
        return self._program.poll(now=now)

    def _replay_setup(self) -> Setup:
        return self._shard
