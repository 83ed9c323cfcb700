"""The nodes of the learners of several policies, one node for each policy."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from programs import timing
from programs.components.replay import ProgramReplay
from programs.nodes.base import OVER, RUNNING, ProgramState, Setup
from programs.nodes.learner import LearnerNode
from programs.nodes.several.parts import Part, PartFiles, joined, part_of
from programs.nodes.several.versions import KeptVersions
from rlstack.replay import ReplayTimeoutError
from rlstack.rpc import RemoteObject, UnavailableError, remote
from rlstack.storage import checkpoint
from rlstack.types import PyTree

_log = logging.getLogger(__name__)


class PolicyLearnerNode(LearnerNode):
    """The learner of one of several policies.

    When its updates are spent, it discards what the actors still make for it, so that they go on
    for the other policies.
    """

    @remote()
    def exchange(self, name: str, known: np.ndarray, results: Sequence[Sequence[float]]) -> bytes:
        """Takes results of games and returns earlier versions; see `KeptVersions.exchange`."""
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
        self._stop, self._asked, self._given = stop, 0, 0
        self._last = False  # whether the last part has been asked for
        self._files = PartFiles(setup.directory)
        self._files.remove(setup.policy)
        super().__init__(setup, replay, coordinator, stop)

    @remote(idempotent=True)
    def give_part(self, number: int, last: bool) -> None:
        """Asks for the part of the checkpoint of this number.

        Args:
          number: 1 for the first checkpoint of the program.
          last: whether it is the last.
        """
        self._last, self._asked = last, number

    def _save_if_due(self, state: ProgramState) -> None:
        del state
        number = self._asked
        if number == self._given:
            return
        self._source.clean()  # the checkpoint before this one is whole
        with self._program.phase("saving a checkpoint"):
            tree, metadata = self._tree()
            self._files.write(self._setup.policy, number, Part(tree, metadata))
        self._given = number

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
            if self._last and self._given == self._asked:
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
          setup: of the policy.
          replay: as for `LearnerNode`.
          coordinator: likewise.
          others: the other policies' learners, or clients of them.
          stop: as for `LearnerNode`.
        """
        self._others, self._number, self._last = others, 0, False
        self._files = PartFiles(setup.directory)
        super().__init__(setup, replay, coordinator, stop)

    def _rest(self) -> None:
        self._save_if_due(self._poll())
        super()._rest()

    def _write(self, state: ProgramState, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        self._number += 1
        parts = self._parts(last=state.phase != RUNNING)
        if len(parts) < len(self._others):
            missing = ", ".join(name for name in self._others if name not in parts)
            _log.warning("No checkpoint is written: %s gave no part before the end.", missing)
            return
        trees = {self._setup.policy: tree, **{name: part.tree for name, part in parts.items()}}
        for part in parts.values():
            metadata = {**metadata, **part.metadata}
        super()._write(state, joined(trees), metadata)

    def _parts(self, *, last: bool) -> dict[str, Part]:
        """Asks the other learners for their parts, and returns those that come before the end."""
        parts: dict[str, Part] = {}
        asked: set[str] = set()
        until = math.inf
        while len(parts) < len(self._others) and time.monotonic() < until:
            if self._poll().phase == OVER:
                until = min(until, time.monotonic() + timing.PARTS_AT_END)
            for name, learner in self._others.items():
                if name not in asked:
                    with contextlib.suppress(UnavailableError):
                        if isinstance(learner, RemoteObject):
                            arguments = (self._number, last)
                            learner.call("give_part", arguments, timeout=timing.ASK_PART)
                        else:
                            learner.give_part(self._number, last)
                        asked.add(name)
                if name not in parts and (part := self._files.take(name, self._number)):
                    parts[name] = part
            time.sleep(timing.PARTS_POLL)
        return parts
