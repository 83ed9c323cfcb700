"""Files of JSON lines: torn lines, full disks, and moved lines."""

import json
import logging
import os
import resource
import signal

import pytest

from rlstack.storage import jsonl, loggers


@pytest.mark.parametrize("torn", [b'{"x": 2, "text": "no e', b"[1, 2]", b"\xff\xfe", b"{" * 50_000])
def test_torn_lines_are_skipped_and_named(tmp_path, caplog, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"x": 1}\n' + torn + b'\n\n{"x": 3}\n' + torn)
    with caplog.at_level(logging.WARNING):
        assert jsonl.read(path) == [{"x": 1}, {"x": 3}]
    assert f"{path}: line 2, 5 is incomplete" in caplog.text


def test_whole_files_are_read_without_a_word(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": 2}\n')
    assert jsonl.read(path) == [{"x": 1}, {"x": 2}]
    assert caplog.text == ""


def test_moved_lines_leave_the_others_as_they_are(tmp_path):
    path, target = tmp_path / "m.jsonl", tmp_path / "abandoned.jsonl"
    assert jsonl.move_lines(path, target, lambda line: True) == 0
    path.write_text("".join(f'{{"x": {x}, "nan": "nan"}}\n' for x in (1, 5, 3, 9)) + '{"x": 1')
    assert jsonl.move_lines(path, target, lambda line: line["x"] > 3) == 2
    assert jsonl.read(path) == [{"x": 1, "nan": "nan"}, {"x": 3, "nan": "nan"}]
    assert [line["x"] for line in jsonl.read(target)] == [5, 9]
    path.write_text('{"x": 7}\n')
    assert jsonl.move_lines(path, target, lambda line: line["x"] > 3) == 1
    assert [line["x"] for line in jsonl.read(target)] == [5, 9, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["abandoned.jsonl", "m.jsonl"]


def test_a_line_that_does_not_fit_the_disk_leaves_nothing(tmp_path):
    """A limit of the file's size stands for the full disk: a part is written, then an error."""
    path = tmp_path / "m.jsonl"
    logger = loggers.JsonlLogger(path, clock=lambda: 1.0)
    logger.write(1, {"x": 1})
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        with pytest.raises(OSError, match=r"m\.jsonl"):
            logger.write(2, {"x": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == size
    logger.write(3, {"x": 3})
    logger.close()
    assert [json.loads(line)["x"] for line in path.open()] == [1, 3]


def test_a_logger_asks_before_each_line(tmp_path):
    calls = []

    def ask():
        calls.append(1)
        if len(calls) > 1:
            raise PermissionError(os.strerror(1))

    logger = loggers.JsonlLogger(tmp_path / "m.jsonl", before_write=ask)
    logger.write(1, {})
    with pytest.raises(PermissionError):
        logger.write(2, {})
    logger.close()
    assert len(jsonl.read(tmp_path / "m.jsonl")) == 1


def test_logs_are_the_numbers_of_lines_and_the_rest_is_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = ('{"env_frames": 1, "loss": "nan", "x": true}', '{"env_frames": 2, "loss": "low"}')
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b'\n{"loss": 3}\n[1]\n')
    first, second = jsonl.read_logs(path)
    assert first.pop("loss") != 0 and first == {"env_frames": 1.0, "x": 1.0}
    assert second == {"env_frames": 2.0}
    assert f"{path}: 'loss' must be a number in each line; got 'low'" in caplog.text
    assert f"{path}: 'env_frames' must be a number in each line; got None" in caplog.text
    assert jsonl.numbers([1]) == jsonl.numbers(None) == {}
