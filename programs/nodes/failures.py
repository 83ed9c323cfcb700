"""Reads the record of failures that `programs.nodes.supervisor` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.storage import jsonl

Failure = Mapping[str, Any]


def read_failures(path: Path) -> list[Failure]:
    """Returns the failures in the order in which they were recorded; skips torn lines."""
    found = jsonl.read(path) if path.exists() else []
    return [failure for failure in found if {"node", "reason", "restarts"} <= failure.keys()]


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Returns the failure that ended a program; None if there is none.

    A node that failed for good did it, unless it failed because another one had, or because the
    program was ending. The first of several is the one.
    """
    final = [failure for failure in failures if not failure["restarts"]]
    for excluded in (("secondary", "ending"), ("secondary",), ("ending",), ()):
        for failure in final:
            if not any(failure.get(name) for name in excluded):
                return failure
    return None


def restart_line(failure: Failure) -> str:
    """Returns the line that tells the user of a restart."""
    reason = str(failure["reason"]).strip().splitlines() or [""]
    pause = failure.get("pause") or 0.0
    return f"{failure['node']}: {reason[0]}; restarts in {pause:g} s"
