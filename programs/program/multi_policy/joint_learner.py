"""The learners of several policies in one node (``--program.trainers one``).

Each policy has the same learner as in a node of its own, in a thread. Callers say whose learner
they mean (`rlstack.programs.program.multi_policy.clients`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from rlstack.programs.program.base import Setup
from rlstack.programs.program.multi_policy.learner import (
    FollowingLearnerNode,
    LeadingLearnerNode,
    PolicyLearnerNode,
)
from rlstack.programs.program.replay_sides import ProgramReplay
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, remote


class JointLearnerNode:
    """The learners of all policies; the first one writes the checkpoints."""

    def __init__(
        self,
        setup: Setup,
        replays: Mapping[str, ProgramReplay | RemoteObject],
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Makes the learners, with the state of the checkpoint if the program resumes from one.

        Args:
          setup: the program's setup.
          replays: the replay of each learning policy, or a client of it; see `LearnerNode`.
          coordinator: a client of the coordinator.
          stop: set by the launcher to end this node.
        """
        self._stop, self._end = stop, threading.Event()
        first, *others = setup.learning
        following = {
            own.policy: FollowingLearnerNode(own, replays[own.policy], coordinator, self._end)
            for own in others
        }
        leading = LeadingLearnerNode(
            first, replays[first.policy], coordinator, following, self._end
        )
        self._learners: dict[str, PolicyLearnerNode] = {first.policy: leading, **following}
        self._failed: dict[str, BaseException] = {}  # the first one first

    def run(self) -> None:
        """Learns for all policies until the program is over.

        Raises:
          BaseException: the error of the first learner that failed; its attribute ``node`` names
            this learner.
        """
        threads = [
            threading.Thread(target=self._run, args=(policy,), name=f"learner/{policy}")
            for policy in self._learners
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(timing.LEARNER_PHASE_POLL)
                if self._stop.is_set():
                    self._end.set()
        for error in self._failed.values():
            raise error

    def _run(self, policy: str) -> None:
        learner = self._learners[policy]
        try:
            learner.run()
        except BaseException as error:  # raised in the thread of `run`, when all have ended
            error.node = learner.name  # type: ignore[attr-defined]
            self._failed[policy] = error
            self._end.set()

    @remote(idempotent=True)
    def get_params(self, policy: str, newer_than: int = -1) -> tuple[int, bytes] | None:
        """See `LearnerNode.get_params`."""
        return self._learners[policy].get_params(newer_than)

    @remote(idempotent=True)
    def next_params(
        self, policy: str, newer_than: int, seconds: float, *place: str
    ) -> tuple[int, bytes | str] | None:
        """See `LearnerNode.next_params`."""
        return self._learners[policy].next_params(newer_than, seconds, *place)

    @remote(idempotent=True)
    def publication(self, policy: str) -> str:
        """See `LearnerNode.publication`."""
        return self._learners[policy].publication()

    @remote(idempotent=True)
    def replay_name(self, policy: str) -> str:
        """See `LearnerNode.replay_name`."""
        return self._learners[policy].replay_name()

    @remote(idempotent=True)
    def arrive(
        self, policy: str, rank: int, incarnation: int, env_frames: int, known_round: int
    ) -> tuple[str, int]:
        """See `LearnerNode.arrive`."""
        return self._learners[policy].arrive(rank, incarnation, env_frames, known_round)

    @remote()
    def exchange(
        self, policy: str, name: str, known: np.ndarray, results: Sequence[Sequence[float]]
    ) -> bytes:
        """See `PolicyLearnerNode.exchange`."""
        return self._learners[policy].exchange(name, known, results)
