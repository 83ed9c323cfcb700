"""Loggers: the file contents right after a write, NaN, crashes, and closing."""

import json
import math
import os
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.storage import loggers


def _lines(path):
    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]


def test_jsonl_writes_one_object_a_line_with_frames_and_time(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    logger = loggers.JsonlLogger(path, clock=lambda: 12.5)
    logger.write(8, {"loss": np.float32(0.5), "count": np.int64(3)})
    logger.write(16, {"loss": jnp.asarray(0.25), "return": np.array([7.0]), "ok": True})
    # Read before close: no data may remain in a buffer.
    assert _lines(path) == [
        {"env_frames": 8, "wall_time": 12.5, "loss": 0.5, "count": 3},
        {"env_frames": 16, "wall_time": 12.5, "loss": 0.25, "return": 7.0, "ok": True},
    ]
    logger.close()
    logger.close()
    with pytest.raises(ValueError, match="must be open"):
        logger.write(17, {})


def test_jsonl_nan_and_infinity_are_valid_json_and_read_back(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = loggers.JsonlLogger(path)
    logger.write(1, {"a": float("nan"), "b": np.float32("inf"), "c": -jnp.inf})
    logger.close()
    (line,) = _lines(path)
    assert math.isnan(float(line["a"]))
    assert float(line["b"]) == math.inf
    assert float(line["c"]) == -math.inf


@pytest.mark.timeout(60)
def test_jsonl_loses_nothing_when_the_process_is_killed(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys\n"
        "from rlstack.storage.loggers import JsonlLogger\n"
        "logger = JsonlLogger(sys.argv[1])\n"
        "for i in range(100): logger.write(i, {'x': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert [line["x"] for line in _lines(path)] == list(range(100))


@pytest.mark.parametrize("whole", [b"", b'{"env_frames": 1}\n'])
@pytest.mark.parametrize("torn", [b"", b'{"env_fra', b"x" * 10_000])
def test_jsonl_continues_a_file_and_drops_a_torn_last_line(tmp_path, whole, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(whole + torn)
    logger = loggers.JsonlLogger(path)
    logger.write(2, {})
    logger.close()
    frames = [line["env_frames"] for line in _lines(path)]
    assert frames == ([1, 2] if whole else [2])


@pytest.mark.parametrize("value", [np.zeros(3), "text", None, 1j, np.array(["a"])])
def test_a_log_that_is_not_a_number_is_refused_by_name(tmp_path, value):
    logger = loggers.JsonlLogger(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="'advantage'"):
        logger.write(1, {"advantage": value})
    logger.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_jsonl_refuses_a_log_that_would_hide_its_own_fields(tmp_path):
    logger = loggers.JsonlLogger(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="Rename the log"):
        logger.write(1, {"env_frames": 3})
    logger.close()


def test_to_json_handles_nested_numpy():
    tree = {"a": (np.float64("nan"), np.int32(2)), 3: [np.array([1.0, np.inf])], "s": "text"}
    assert loggers.to_json(tree) == {"a": ["nan", 2], "3": [[1.0, "inf"]], "s": "text"}


def test_tensorboard_events_hold_the_points(tmp_path):
    # The event file's records, read without TensorBoard: length, crc, an Event message, crc.
    from tensorboardX.proto.event_pb2 import Event

    logger = loggers.TensorBoardLogger(tmp_path)
    logger.write(10, {"loss": np.float32(0.5)})
    logger.write(20, {"loss": 0.25, "return": 3})
    logger.close()
    logger.close()
    (path,) = tmp_path.iterdir()
    data, points = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        points += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + size :]
    assert points == [(10, "loss", 0.5), (20, "loss", 0.25), (20, "return", 3.0)]
    with pytest.raises(ValueError, match="must be open"):
        logger.write(30, {"loss": 1.0})


def test_fanout_reaches_all_and_closes_all_though_one_fails():
    class Failing(loggers.InMemoryLogger):
        def close(self):
            super().close()
            raise OSError("no space")

    first, second, third = Failing(), Failing(), loggers.InMemoryLogger()
    fanout = loggers.Fanout([first, second, third])
    fanout.write(5, {"x": jnp.asarray(2.0)})
    assert first.series("x") == third.series("x") == [(5, 2.0)]
    assert first.series("y") == []
    with pytest.raises(OSError, match="no space"):
        fanout.close()
    assert first.closed
    assert second.closed
    assert third.closed


@pytest.mark.timeout(60)
def test_importing_loggers_pulls_in_neither_jax_nor_tensorboard():
    code = (
        "import sys, rlstack.storage.loggers; "
        "bad = {'jax', 'tensorboardX', 'numpy'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], timeout=50, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["write", "close"])
def test_a_full_disk_of_events_prints_no_traceback(tmp_path, when):
    """Not from the thread that writes, nor from the writer and the file as the process ends."""
    code = f"""if True:
        import resource, signal, sys, time
        from rlstack.storage.loggers import TensorBoardLogger
        logger = TensorBoardLogger({str(tmp_path)!r}, flush_secs={0 if when == "write" else 100})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as on a full disk
        try:
            while {when == "write"}:
                logger.write(1, {{"loss": 1.0}})
                time.sleep(0.01)
        except OSError as error:
            print(error)
        for _ in range(9):
            if {when == "close"}:
                logger.write(1, {{"loss": 1.0}})
        logger.close()
        """
    done = subprocess.run([sys.executable, "-c", code], timeout=50, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("free space there" in done.stdout) is (when == "write")


@pytest.mark.timeout(30)
def test_events_that_cannot_be_written_are_an_error_and_no_hang(tmp_path, monkeypatch):
    logger = loggers.TensorBoardLogger(tmp_path)
    events = logger._writer.file_writer.event_writer

    def full(event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread's traceback
    monkeypatch.setattr(events._ev_writer, "write_event", full)
    logger.write(1, {"loss": 1.0})
    logger._thread.join(10.0)
    with pytest.raises(OSError, match=r"No space left .*--resume.*event files") as caught:
        logger.write(2, {f"log{i}": 1.0 for i in range(50)})
    assert caught.value.filename == str(tmp_path)
    logger.close()
