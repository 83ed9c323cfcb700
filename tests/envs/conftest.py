"""Every test of this folder leaves no process, thread, descriptor or shared memory behind."""

from __future__ import annotations

import gc
import os
import threading
import time

import psutil
import pytest


def _ours() -> dict[str, set]:
    return {
        "processes": {p.pid for p in psutil.Process().children(recursive=True)},
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("rlstack-env")},
        "shared memory": set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set(),
        "blocks": {
            fd
            for fd in os.listdir("/proc/self/fd")
            if "rlstack-envs" in os.path.realpath(f"/proc/self/fd/{fd}")
        },
    }


@pytest.fixture(autouse=True)
def nothing_left():
    before = _ours()
    yield
    gc.collect()
    deadline = time.monotonic() + 3.0
    while True:
        left = {k: v - before[k] for k, v in _ours().items() if v - before[k]}
        left.pop("shared memory", None) if _foreign(left.get("shared memory", set())) else None
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left


def _foreign(names: set[str]) -> bool:
    """Whether these blocks are another program's: we give ours no name at all."""
    return all("rlstack" not in name for name in names)
