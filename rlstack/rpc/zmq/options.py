"""The settings that both ends of a ZeroMQ connection share."""

from __future__ import annotations

from typing import Any

import zmq

MAX_MESSAGE = 1 << 31  # bytes; a longer message ends its connection
COPIED = (
    1 << 16
)  # bytes; shorter messages are copied, because a copy costs less than keeping their memory

OK, NOT_FOUND, FAILED = b"OK", b"NOT_FOUND", b"INTERNAL"  # the status of an answer

# As plain numbers, because arithmetic with ZeroMQ's flags costs as much as receiving a frame.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)

# A peer that answers no heartbeat for so long is taken for dead: its host or network is. Calls end
# by their own deadlines; this frees what belongs to the connection.
_HEARTBEAT, _DEAD_AFTER = 5_000, 20_000  # milliseconds
_HANDSHAKE = 10_000  # milliseconds; a client that has not been admitted by then is disconnected


def set_options(socket: zmq.Socket) -> None:
    """Sets the socket options that both ends share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_AFTER)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _DEAD_AFTER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
    # Each client has one call in progress on a connection, so queues are short. A limit would make
    # a server drop answers.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def bytes_of(frame: zmq.Frame) -> bytes | memoryview:
    """Returns the contents of a frame, without a copy if it is large."""
    return frame.bytes if len(frame) < COPIED else frame.buffer


def has_message(socket: zmq.Socket) -> bool:
    """Whether a message can be received without waiting."""
    events: Any = socket.getsockopt(_EVENTS)
    return bool(events & _POLLIN)


# pyzmq's `recv_multipart` takes twice as long as `receive`, `send_multipart` four times as `send`.


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """Returns the frames of the next message.

    Raises:
      zmq.Again: there is none.
    """
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def send(socket: zmq.Socket, *frames: bytes) -> None:
    """Sends a message of these frames.

    Raises:
      zmq.Again: nobody can take it now.
    """
    *first, last = frames
    for frame in first:
        socket.send(frame, _NOBLOCK | _SNDMORE)
    socket.send(last, _NOBLOCK)
