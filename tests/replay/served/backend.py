"""A replay service without a network: calls are encoded and decoded as they are on their way."""

from __future__ import annotations

from rlstack.replay.served import ReplayService, ServedReplayBuffer
from rlstack.rpc import ClosedError, RemoteError, Service, codec
from tests.replay.replay_model import SPEC


class Caller:
    """Calls a service in this process as a `RemoteObject` calls one in another."""

    def __init__(self, service):
        self._handlers, self._closed = Service(service), False

    def call(self, method, args=(), kwargs=None, timeout=None):
        if self._closed:
            raise ClosedError("closed")
        data = codec.encode((0, 0, 0, 0, tuple(args), dict(kwargs or {})))
        code, *answer = codec.decode(getattr(self._handlers, method)(data))
        if code:
            raise RemoteError("replay", method, *answer)
        return answer[0]

    def close(self):
        self._closed = True


def make(cfg, num_envs, seed=0):
    """Makes a buffer that is alone with its service."""
    caller = Caller(ReplayService(cfg, num_envs, seed=seed, spec=SPEC))
    return ServedReplayBuffer(cfg, num_envs, caller, SPEC, alone=True)


make.waits = True  # while the buffer is full; other backends drop items
