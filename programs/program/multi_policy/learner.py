"""The nodes of the learners of several policies, one node for each policy.

The learner of the first policy writes the checkpoint. It asks the other learners for their parts by
number. Each writes its part to a file of its own, between two of its updates, and goes on. So a
checkpoint has all policies or does not exist, and is like that of a single process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.configs.learner import LearnerConfig
from rlstack.programs.program.base import LEARNER, OVER, RUNNING, ProgramState, Setup
from rlstack.programs.program.heartbeat import Heartbeat
from rlstack.programs.program.learner import LearnerNode, progress_of
from rlstack.programs.program.multi_policy.versions import KeptVersions
from rlstack.programs.program.replay_sides import ProgramReplay
from rlstack.programs.session import timing
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.run_dir import RunDir
from rlstack.replay import ReplayTimeoutError
from rlstack.rpc import RemoteObject, StoppedError, UnavailableError, remote
from rlstack.storage import checkpoint
from rlstack.types import PyTree


class Part(NamedTuple):
    """One policy's part of a checkpoint, with arrays in numpy."""

    # {"learner": {name: ...}, "replay": ..., "versions": its versions, by the policy that plays}
    tree: PyTree
    metadata: Mapping[str, Any]
    progress: Progress  # progress of the run, as far as this learner knows


def joined(trees: Mapping[str, PyTree]) -> PyTree:
    """Returns the trees of several policies as one, in the form of `SingleProcessRun.save`."""
    parts = next(iter(trees.values()))["learner"]
    whole = {
        "learner": {
            part: {name: t["learner"][part] for name, t in trees.items()} for part in parts
        },
        "replay": {name: t["replay"] for name, t in trees.items()},
    }
    versions = {name: v for t in trees.values() for name, v in t["versions"].items()}
    if versions:
        whole["policies"] = {n: {"inferencer": {"versions": v}} for n, v in versions.items()}
    return whole


def part_of(tree: PyTree, policy: str) -> PyTree:
    """Returns the tree of one policy, of what `joined` returned for it alone."""
    versions = {n: t["inferencer"]["versions"] for n, t in tree.get("policies", {}).items()}
    learner = {part: by_policy[policy] for part, by_policy in tree["learner"].items()}
    return {"learner": learner, "replay": tree["replay"][policy], "versions": versions}


class PartFiles:
    """The files through which the learners of one run pass parts."""

    def __init__(self, directory: RunDir) -> None:
        """Reads nothing yet."""
        self._folder = directory.parts

    def remove(self, policy: str) -> None:
        """Removes the parts of a policy, such as those of a command that was killed."""
        for path in self._folder.glob(f"{policy}-*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have parts there, or there is no folder
            self._folder.rmdir()

    def write(self, policy: str, number: int, part: Part) -> None:
        """Writes a part; a reader sees all of it or nothing.

        Raises:
          OSError: the file system refuses it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(policy, number)
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                found = (jax.device_get(part.tree), dict(part.metadata), part.progress)
                pickle.dump(found, file, protocol=5)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise type(error)(
                error.errno, f"{path} could not be written: {error.strerror}. Free space there (df)"
            ) from error

    def take(self, policy: str, number: int) -> Part | None:
        """Reads and removes a part; None if it is not there yet."""
        path = self._path(policy, number)
        try:
            with open(path, "rb") as file:
                part = pickle.load(file)
        except FileNotFoundError:
            return None
        self.remove(policy)
        return Part(*part)

    def _path(self, policy: str, number: int) -> Path:
        return self._folder / f"{policy}-{number}"


_log = logging.getLogger(__name__)

_NUMBERS = 1_000_000  # checkpoint numbers reserved for each incarnation of the writing learner


class PolicyLearnerNode(LearnerNode):
    """The learner of one of several policies.

    When its updates are spent, it discards what the actors still make for it, so that they go on
    for the other policies.

    If the program restarts it, it continues from the newest checkpoint. Its params get later
    versions than the ones that were lost, so that no node takes them for old. Versions count
    updates, so updates that were lost count too, as frames do.
    """

    def _join(self) -> LearnerConfig:
        if self._is_restarted:
            self._program.poll(now=True)  # so that the coordinator knows that it is back
            self._stop.wait(timing.LEARNER_RETURN)
        # Without a newer checkpoint, an error that comes back is always the same one.
        self._program.has_lasting_work = not self._setup.learner_restarts
        return super()._join()

    @property
    def _is_restarted(self) -> bool:
        return bool(self._program.incarnation) and self._setup.learner_restarts

    def _restore(self) -> None:
        if not self._is_restarted:
            super()._restore()
            return
        with contextlib.closing(Heartbeat(self._coordinator, self.name)):
            path = checkpoint.newest_intact(self._setup.directory.checkpoints)
            if path is not None:
                with self._program.phase(f"restoring {path.name}"):
                    self._load(path)
            newest = self._newest_version()
        begun = "anew, because there is no checkpoint" if path is None else f"from {path.name}"
        self._program.note(f"continues {begun}")
        if newest > self._learner.version:
            self._learner.version = newest + 1
        self._replay.set_params_version(self._learner.version)

    def run(self) -> None:
        """Learns as `LearnerNode.run`; first says that this learner is there.

        So actors do not discard their steps while it compiles, and an interrupted program waits for
        it: the other learners may have made updates.
        """
        self._poll(now=True)
        super().run()

    def _newest_version(self) -> int:
        """Asks the coordinator for the newest version of the params that were published."""
        while self._program.poll().phase != OVER:  # it may also be needed to save
            with contextlib.suppress(UnavailableError):
                return int(self._coordinator.newest_version(self.name))
        raise StoppedError(f"{self.name}: the program ended while this node started")

    @remote()
    def exchange(self, name: str, known: np.ndarray, results: Sequence[Sequence[float]]) -> bytes:
        """Records results of games and returns new versions; see `KeptVersions.exchange`."""
        found = [(int(slot), int(number), score) for slot, number, score in results]
        return self._versions.exchange(name, known, found)

    @functools.cached_property
    def _versions(self) -> KeptVersions:
        return KeptVersions(self._setup.histories, self._learner.params)

    def _poll(self, *, now: bool = False) -> ProgramState:
        state = super()._poll(now=now)
        if self._setup.experiment.program.pacing != "lock_step":
            self._end_round(state.env_frames)
        return state

    def _end_round(self, env_frames: int) -> None:
        own = env_frames * self._setup.experiment.env.num_envs // self._setup.rows
        self._versions.keep(own, self._learner.params)

    def _tree(self) -> tuple[PyTree, Mapping[str, Any]]:
        tree, metadata = super()._tree()
        return {**tree, "versions": self._versions.save()}, metadata

    def _rest(self) -> None:
        until = time.monotonic() + timing.LEARNER_PHASE_POLL
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(ReplayTimeoutError):
                self._replay.sample(timeout=left)

    def _discard(self) -> None:
        while self._replay.can_sample():
            self._replay.sample()

    def _read(self, path: Path, target: PyTree) -> Any:
        policy = self._setup.policy
        target = joined({policy: {**target, "versions": self._versions.save()}})
        found = part_of(checkpoint.restore(path, target, partial=True), policy)
        self._versions.load(found["versions"])
        return found


class FollowingLearnerNode(PolicyLearnerNode):
    """A learner that gives its part to the one that writes checkpoints, when asked."""

    def __init__(
        self,
        setup: Setup,
        replay: ProgramReplay | RemoteObject,
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Makes the learner; arguments as for `LearnerNode`."""
        self._asked = 0, False  # the number of the newest part, and whether it is the last
        self._given = 0, False
        self._files = PartFiles(setup.directory)
        self._files.remove(setup.policy)
        super().__init__(setup, replay, coordinator, stop)

    @remote(idempotent=True)
    def give_part(self, number: int, last: bool) -> None:
        """Requests this learner's part of a checkpoint, which its learning loop then gives.

        Args:
          number: number of the checkpoint; repeated requests use the same number.
          last: True for the last checkpoint of the program.
        """
        self._asked = number, last

    def _save_if_due(self, state: ProgramState) -> None:
        number, last = self._asked
        if number == self._given[0]:
            return
        if last and state.phase == RUNNING:
            # The learner that asks knows of the end earlier, or was stopped and comes back.
            if self._poll(now=True).phase != RUNNING:
                return  # this learner gives its part after its last update
            last = False
        self._source.clean()  # the checkpoint before this one is whole
        with self._program.phase("saving a checkpoint"):
            tree, metadata = self._tree()
            self._files.write(self._setup.policy, number, Part(tree, metadata, progress_of(state)))
        self._given = number, last
        self._program.has_lasting_work = True

    def _between_rounds(self) -> None:
        self._save_if_due(self._poll())

    def _rest(self) -> None:
        self._save_if_due(self._poll())
        super()._rest()

    def _save(self, state: ProgramState) -> None:
        """Gives the last part."""
        while (state := self._poll()).phase != OVER:
            self._save_if_due(state)
            time.sleep(timing.LEARNER_PHASE_POLL)
        # The learner that writes was stopped at the same time, and may still ask.
        until = time.monotonic() + timing.PARTS_AT_END
        while self._stop.is_set() and time.monotonic() < until:
            self._save_if_due(state)
            if self._given[1]:
                break
            time.sleep(timing.LEARNER_PHASE_POLL)

    def _announce_saved(self) -> None:
        """Does nothing; the learner that writes the checkpoint announces it."""


class LeadingLearnerNode(PolicyLearnerNode):
    """The learner that writes the checkpoints, with the parts of all learners."""

    def __init__(
        self,
        setup: Setup,
        replay: ProgramReplay | RemoteObject,
        coordinator: RemoteObject,
        others: Mapping[str, RemoteObject | FollowingLearnerNode],
        stop: threading.Event,
    ) -> None:
        """Makes the learner.

        Args:
          setup: the policy's setup.
          replay: see `LearnerNode`.
          coordinator: see `LearnerNode`.
          others: the other policies' learners, or clients of these.
          stop: see `LearnerNode`.
        """
        self._others = others
        self._files = PartFiles(setup.directory)
        super().__init__(setup, replay, coordinator, stop)
        # A restarted learner must not ask with a number that was answered before.
        self._number = self._program.incarnation * _NUMBERS

    def _save_if_due(self, state: ProgramState) -> None:
        if self._lost(state):
            return  # it stays due
        super()._save_if_due(state)
        if self._saved_frames >= 0:
            self._program.has_lasting_work = True

    def _save(self, state: ProgramState) -> None:
        # A host may have been cut off for so long that another one has this learner now.
        ends = state.phase == OVER and not self._stop.is_set()
        if ends and self._setup.learner_restarts and self.name not in state.learners:
            return
        super()._save(state)

    def _lost(self, state: ProgramState) -> list[str]:
        """Returns the other policies whose learners are being restarted."""
        if state.phase != RUNNING or not self._setup.learner_restarts:
            return []
        return [name for name in self._others if f"{LEARNER}/{name}" not in state.learners]

    def _rest(self) -> None:
        self._save_if_due(self._poll())
        super()._rest()

    def _write(self, state: ProgramState, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        self._number += 1
        parts = self._parts(last=state.phase != RUNNING)
        if len(parts) < len(self._others):
            missing = ", ".join(name for name in self._others if name not in parts)
            if self._poll().phase != OVER:  # it is written when the learner is back
                self._checkpoints, self._saved_frames = self._checkpoints - 1, -1
                return
            _log.warning("No checkpoint is written: %s gave no part before the end.", missing)
            return
        trees = {self._setup.policy: tree, **{name: part.tree for name, part in parts.items()}}
        for part in parts.values():
            metadata = {**metadata, **part.metadata}
        # While a learner compiles, it does not hear how far the run has come.
        progress = max([progress_of(state), *(part.progress for part in parts.values())])
        self._write_at(progress, joined(trees), metadata)

    def _parts(self, *, last: bool) -> dict[str, Part]:
        """Asks the other learners for their parts; returns the parts that arrive in time.

        It gives up if one of the learners is lost while the program runs.
        """
        parts: dict[str, Part] = {}
        asked: dict[str, float] = {}  # when
        until = math.inf
        while len(parts) < len(self._others) and time.monotonic() < until:
            state = self._poll()
            if self._lost(state):
                break
            if state.phase == OVER:
                until = min(until, time.monotonic() + timing.PARTS_AT_END)
            for name, learner in self._others.items():
                if name in parts:
                    continue
                # A learner that has been restarted since does not know that it was asked.
                if time.monotonic() > asked.get(name, -math.inf) + timing.ASK_PART_AGAIN:
                    with contextlib.suppress(UnavailableError):
                        self._ask(learner, last)
                        asked[name] = time.monotonic()
                if part := self._files.take(name, self._number):
                    parts[name] = part
            time.sleep(timing.PARTS_POLL)
        return parts

    def _ask(self, learner: RemoteObject | FollowingLearnerNode, last: bool) -> None:
        """Asks another learner for its part; raises UnavailableError."""
        if isinstance(learner, RemoteObject):
            learner.call("give_part", (self._number, last), timeout=timing.ASK_PART)
        else:
            learner.give_part(self._number, last)
