"""Which processors a node's process uses."""

from __future__ import annotations

import os


def leave_one() -> None:
    """Leaves one of this process's processors, if it has several, to other processes.

    For a node of many threads that wake one another: on few processors they get in the way of the
    learner, whose one thread computes all the time. On two, a learner of small networks makes a
    tenth to two fifths more updates so. It holds for the calling thread and for those started from
    then on, and only where the operating system can do it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed - {min(allowed)})
