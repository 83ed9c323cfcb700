"""The monitor of a program reads its events while callbacks take their time."""

import threading
import types

import pytest

from rlstack.programs.program.launch import monitor
from rlstack.rpc import codec

pytestmark = pytest.mark.timeout(60)
EVENTS = [[i, "update", 10 * i, {"learner/loss": float(i)}] for i in (1, 2, 3)]
STATUS = {"notes": [], "nodes": [], "phase": "running", "env_frames": 0, "logs": {}}


class Coordinator:
    """Has three events, and knows when they have been read."""

    def __init__(self):
        self.read = threading.Event()

    def status(self):
        return STATUS

    def events(self, after, end):
        if after == 3:
            self.read.set()
        return [codec.encode(event) for event in EVENTS[after:]]

    def close(self):
        """Nothing is open."""


def test_a_slow_callback_delays_no_reading_and_hears_all(tmp_path, monkeypatch):
    coordinator, heard, goes_on = Coordinator(), [], threading.Event()

    def listener(kind, number, content):
        assert goes_on.wait(30)
        heard.append((kind, number, content["learner/loss"]))

    listener.reason = ""
    display = types.SimpleNamespace(listener=listener)
    for name in ("line", "nodes", "activity"):
        setattr(display, f"write_{name}", lambda *_: None)
    display.write = lambda *_: None
    monkeypatch.setattr(monitor, "RemoteObject", lambda *_, **__: coordinator)
    watching = monitor.ProgramMonitor("address", display, tmp_path / "failures.jsonl")
    assert coordinator.read.wait(30) and heard == []
    goes_on.set()
    watching.close()
    assert heard == [("update", 10, 1.0), ("update", 20, 2.0), ("update", 30, 3.0)]
