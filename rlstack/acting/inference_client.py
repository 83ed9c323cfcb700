"""The actor's side of an inference service in another node."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rlstack.acting.inference import Inference
from rlstack.acting.request_queue import ClientName
from rlstack.rpc import RemoteError, RemoteObject, StoppedError, UnavailableError
from rlstack.types import TimeStep

# Errors of a service that is stopping or overloaded: the same call may succeed later.
_PASSING_ERRORS = ("ServiceClosedError", "TimeoutError")
_RETRY_PAUSE = 0.05  # seconds


class InferenceClient:
    """The client of an InferenceService in another node; an Actor uses it as its inferencer."""

    def __init__(
        self,
        service: RemoteObject,
        client: ClientName,
        incarnation: int | None,
        should_stop: Callable[[], bool],
        timeout: float = 60.0,
    ) -> None:
        """Stores the arguments.

        Args:
          service: the remote InferenceService.
          client: the actor's name or rank.
          incarnation: grows with each restart of the actor; None to ask the service for it.
          should_stop: returns True to end the wait for a service that does not answer.
          timeout: the longest time of that wait, in seconds. A service that can be reached limits
              the time of its answers by itself.
        """
        self._service, self._client, self._incarnation = service, client, incarnation
        self._should_stop, self._timeout = should_stop, timeout
        self._until = 0.0  # end of the wait of the present call

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch; see `InferenceService.inference`.

        Raises:
          StoppedError: ``should_stop`` returned True while the service did not answer.
          UnavailableError: the service did not answer in time.
          RemoteError: acting failed.
        """
        self._until = time.monotonic() + self._timeout
        while True:
            try:
                if self._incarnation is None:
                    self._incarnation = self._service.next_incarnation(self._client)
                arguments = (self._client, self._incarnation, env_ids, timestep)
                return self._service.call("inference", arguments, patient=self._waits_again)
            except (UnavailableError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.type_name not in _PASSING_ERRORS:
                    raise
                if self._should_stop():
                    raise StoppedError from None
                if time.monotonic() > self._until:
                    raise
                time.sleep(_RETRY_PAUSE)

    def _waits_again(self, answers: bool) -> bool:
        """Whether to wait for the same answer again.

        A service that answers other calls still works on it: it may be compiling its first batch.
        """
        now = time.monotonic()
        if answers:
            self._until = now + self._timeout
        return not self._should_stop() and now <= self._until
