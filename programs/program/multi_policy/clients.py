"""Clients of the learner of one policy, whether it has a node of its own or shares one."""

from __future__ import annotations

import copy
from typing import Any

from rlstack.programs.program.base import Setup
from rlstack.rpc import RemoteObject


class _OfPolicy:
    """A client of one learner of a `JointLearnerNode`."""

    def __init__(self, learners: RemoteObject, policy: str) -> None:
        self._learners, self._policy = learners, policy

    def __getattr__(self, method: str) -> Any:
        call = getattr(self.__dict__["_learners"], method)
        return lambda *arguments: call(self._policy, *arguments)

    @property
    def host(self) -> str:
        """The host of the node."""
        return self._learners.host

    def call(self, method: str, arguments: tuple, timeout: float) -> Any:
        """Calls a method of the learner; see `RemoteObject.call`."""
        return self._learners.call(method, (self._policy, *arguments), timeout=timeout)

    def __copy__(self) -> _OfPolicy:
        return _OfPolicy(copy.copy(self._learners), self._policy)

    def close(self) -> None:
        """Closes the client; see `RemoteObject.close`."""
        self._learners.close()


class SoonLost:
    """A client of a learner whose calls wait for less long than usual."""

    def __init__(self, learner: Any, seconds: float) -> None:
        """Wraps a client.

        Args:
          learner: the client.
          seconds: the timeout of each call.
        """
        self._learner, self._seconds = learner, seconds

    def __getattr__(self, method: str) -> Any:
        learner, seconds = self.__dict__["_learner"], self.__dict__["_seconds"]
        return lambda *arguments: learner.call(method, arguments, timeout=seconds)


def learner_of(setup: Setup, learner: RemoteObject) -> Any:
    """Returns a client of the policy's learner, from one of the node that it is in.

    Args:
      setup: the policy's setup.
      learner: a client of the node that runs the learner.
    """
    together = setup.policy and setup.experiment.program.trainers == "one"
    return _OfPolicy(learner, setup.policy) if together else learner
