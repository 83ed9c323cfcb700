"""Restricts a process to some of the processors."""

from __future__ import annotations

import os


def leave_one() -> None:
    """Gives up one of this process's processors, if it has several.

    Use it in a node with many threads that wake one another. On few processors they disturb the
    learner, whose single thread computes all the time. On two processors, a learner of small
    networks then makes 10% to 40% more updates. This applies to the calling thread and to threads
    that it starts later, on operating systems that support it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed - {min(allowed)})
