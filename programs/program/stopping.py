"""How nodes end: errors that blame another node, and what a supervisor is told about an error."""

from __future__ import annotations

import errno
import traceback

from rlstack.acting.params import ParamsClosedError, ParamsError
from rlstack.devices.group import GroupLostError
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.program.supervisor import End
from rlstack.programs.session import errors
from rlstack.programs.session.run_lock import ClaimLostError
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import ClosedError, RemoteError, StoppedError, UnavailableError
from rlstack.storage.checkpoint import CheckpointWriteError


class NodeLostError(RuntimeError):
    """Another node has been silent for too long."""

    def __init__(self, node: str, message: str) -> None:
        """Makes the error.

        Args:
          node: the name of the silent node.
          message: the error message.
        """
        super().__init__(message)
        self.node = node


class EndedEarlyError(RuntimeError):
    """A node ended although nobody had told it to."""


# What a node raises if another node has failed or is ending, or if its command was killed and the
# next one has the run directory.
_SECONDARY = (
    ClaimLostError,
    ClosedError,
    EndedEarlyError,
    GroupLostError,
    ParamsClosedError,
    ParamsError,
    RemoteError,
    ReplayClosedError,
    ReplayTimeoutError,
    StoppedError,
    UnavailableError,
)
# What the same code may not raise when it is run again: the other node, host or file is back.
_PASSING = (
    ClosedError,
    EndedEarlyError,
    EOFError,
    GroupLostError,
    NodeLostError,
    OSError,
    ParamsClosedError,
    ParamsError,
    ReplayClosedError,
    ReplayTimeoutError,
    StoppedError,
)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def end_of(error: BaseException, ran_seconds: float = 0.0) -> End:
    """Returns what a supervisor needs to know of an error that ended its node.

    Args:
      error: the error.
      ran_seconds: seconds that the node had worked, without its start.
    """
    # The message of a disk that refuses a file says all; the node's own log has the traceback.
    is_disk = isinstance(error, OSError) and error.errno in _FULL
    says_all = is_disk or isinstance(error, CheckpointWriteError)
    where = "" if isinstance(error, _SECONDARY) else errors.where(error)
    # The rest of a RemoteError is the other node's traceback.
    text = str(error).split("\n", 1)[0] if isinstance(error, RemoteError) else str(error)
    reason = errors.noted(f"{type(error).__name__}: {text}{where}")
    return End(
        reason=reason,
        traceback=reason if says_all else "".join(traceback.format_exception(error)),
        node=getattr(error, "node", ""),
        secondary=isinstance(error, _SECONDARY),
        passing=isinstance(error, _PASSING),
        ran_seconds=ran_seconds,
        # Its text says which update it was, and which of its values are not finite.
        kind=type(error).__name__ if isinstance(error, NonFiniteError) else "",
    )
