"""Calls of a replay service, with the errors of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlstack.replay.base import ReplayClosedError
from rlstack.replay.served.checkpoints import ReplayCheckpointError
from rlstack.replay.shared_memory.writer import NAME as TABLE
from rlstack.rpc import ClosedError, RemoteError, UnavailableError

NAME = "ServedReplayBuffer"  # in messages
MARGIN = 5.0  # seconds that a call may take in addition to its wait
ANSWER = 2.0  # seconds within which a running service answers

_ERRORS: dict[str, Callable[[str], Exception]] = {
    "ReplayClosedError": ReplayClosedError,
    "ReplayCheckpointError": ReplayCheckpointError,
    "ValueError": ValueError,
}


class Caller(Protocol):
    """The part of `rlstack.rpc.RemoteObject` that is needed."""

    def call(
        self,
        method: str,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Calls a remote method."""

    def close(self) -> None:
        """Makes all calls raise `ClosedError`."""


class ServiceCalls:
    """Calls the methods of a `ReplayService`."""

    def __init__(self, service: Caller):
        """Connects at the first call."""
        self._service = service

    def __call__(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Calls a method and returns its result.

        Args:
          method: the name of the method.
          *arguments: the arguments of the method.
          seconds: seconds for which the method may wait on the service.

        Raises:
          UnavailableError: the service does not answer.
          ReplayClosedError, ReplayCheckpointError, ValueError: as the method raises them, or the
            service was closed here.
        """
        try:
            return self._service.call(method, arguments, timeout=seconds + MARGIN)
        except ClosedError:
            raise ReplayClosedError(f"{NAME}.{method}: the buffer is closed.") from None
        except RemoteError as error:
            if error.type_name not in _ERRORS:
                raise
            text = error.message.split(f"{error.type_name}: ", 1)[-1]
            raise _ERRORS[error.type_name](own_name(text)) from None

    def close(self) -> None:
        """Ends all calls."""
        self._service.close()


def own_name(text: str) -> str:
    """Returns a message of the service's table with the name of the buffer here."""
    return text.replace(TABLE, NAME)


def unreachable(where: str, error: UnavailableError) -> str:
    """Describes a service that does not answer."""
    return f"{NAME}.{where}: the replay service must answer; {error}"
