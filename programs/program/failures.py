"""Makes and reads the record of failures, to which `rlstack.programs.program.supervisor` adds."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.storage import jsonl

_FALLOC_FL_KEEP_SIZE = 1
_RESERVED_BYTES = 1 << 16

Failure = Mapping[str, Any]


def reserve_record(path: str) -> None:
    """Creates an empty record and reserves space for it, so that a full disk can be recorded."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with contextlib.suppress(OSError, AttributeError):
            allocate = ctypes.CDLL(None).fallocate
            allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            allocate(handle, _FALLOC_FL_KEEP_SIZE, 0, _RESERVED_BYTES)
    finally:
        os.close(handle)


def release_record(path: str) -> None:
    """Frees the space that a record does not use; removes an empty record."""
    with contextlib.suppress(OSError):
        size = os.path.getsize(path)
        if size:
            os.truncate(path, size)
        else:
            os.unlink(path)


def read_failures(path: Path) -> list[Failure]:
    """Returns the failures in the order in which they were recorded; skips torn lines."""
    found = jsonl.read(path) if path.exists() else []
    return [failure for failure in found if {"node", "reason", "restarts"} <= failure.keys()]


def since_restart(failures: Sequence[Failure]) -> Sequence[Failure]:
    """Returns the failures since the whole program has started, or has started again."""
    starts = [number for number, failure in enumerate(failures) if failure.get("program")]
    return failures[starts[-1] + 1 :] if starts else failures


def is_accident(failure: Failure) -> bool:
    """Whether a failure that ended a program may be over, as a process that was killed.

    It is not if the node has raised an exception, or has failed again and again.
    """
    follows = failure.get("secondary") or "reported_by" in failure
    return bool(follows or not (failure.get("traceback") or failure.get("incarnation")))


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Returns the failure that ended a program; None if there is none since it has started.

    A node that failed for good did it, unless it failed because another one had, or because the
    program was ending. The first of several is the one.
    """
    final = [failure for failure in since_restart(failures) if not failure["restarts"]]
    for excluded in (("secondary", "ending"), ("secondary",), ("ending",), ()):
        for failure in final:
            if not any(failure.get(name) for name in excluded):
                return failure
    return None


def restart_line(failure: Failure) -> str:
    """Returns the line that tells the user of a restart."""
    reason = str(failure["reason"]).strip().splitlines() or [""]
    pause = failure.get("pause") or 0.0
    what = "all nodes restart" if failure.get("program") else "restarts"
    return f"{failure['node']}: {reason[0]}; {what} in {pause:g} s"
