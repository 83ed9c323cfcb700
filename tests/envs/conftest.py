"""Checks that no test of this folder leaves a process, thread, descriptor or shared memory."""

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
        "shared memory": {
            name
            for folder in ("/dev/shm", "/tmp")
            for name in os.listdir(folder)
            if "rlstack-envs" in name
        },
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
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left
