"""Run directories in an object store: one writer, copies, a store that goes away."""

import contextlib
import json
import os
import socket
import time
import types
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from rlstack.programs.cli import train as command
from rlstack.programs.run import train
from rlstack.programs.session import run_lock, stored, timing
from rlstack.programs.session.run_dir import RunDir, RunDirError, fetched
from rlstack.programs.session.run_lock import ClaimLostError, RunLockedError
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.tools.status.runs import RunReader, find_runs
from rlstack.storage import files, objects
from rlstack.storage.mirror import MANIFEST, Manifest, Mirror
from rlstack.storage.objects import Objects, StoreAwayError, StoreError
from tests.storage import s3_server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(s3, monkeypatch, tmp_path):
    monkeypatch.setattr(objects, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(timing, "STORE_PERIOD", 0.05)
    monkeypatch.setattr(timing, "STORE_LEASE", 0.4)
    monkeypatch.setattr(timing, "STORE_ANSWER", 0.2)
    monkeypatch.setattr(timing, "STORE_READ", 0.0)
    monkeypatch.setattr(timing, "STORE_LIST", 0.0)
    monkeypatch.setattr(stored, "_fetched", {})
    monkeypatch.setenv(files.COPIES, str(tmp_path / "host-a"))
    return s3


@pytest.fixture
def url(server, request):
    return f"s3://{s3_server.BUCKET}/{request.node.name}"


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """Returns a function that lets this process be one of another host, with copies of its own."""

    def go(name):
        monkeypatch.setattr(run_lock, "_machine", lambda: name)
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        monkeypatch.setenv(files.COPIES, str(tmp_path / name))
        stored._fetched.clear()

    return go


def _until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def _manifest(url):
    found = Manifest.read(Objects(url, 1.0))
    return None if found is None else found[0]


@contextlib.contextmanager
def _new(url):
    with RunDir.create(url, "preset", 1).claimed() as directory:
        directory.write_config("{}")
        yield directory


def test_a_run_is_in_the_store_while_it_runs_and_when_it_ends(url, on_host):
    on_host("host-a")
    with _new(url) as directory:
        assert directory.path == files.local(url)
        directory.metrics.write_text('{"env_frames": 1, "wall_time": 1.0}\n')
        _until(lambda: (found := _manifest(url)) and "metrics.jsonl" in found.files)
        assert _manifest(url).holder["pid"] == os.getpid()
        on_host("host-b")
        status = RunReader(Path(url)).read()
        assert (status.state, status.frames) == ("elsewhere", 1)
        on_host("host-a")
        directory.write_result({"env_frames": 2})
    assert "pid" not in _manifest(url).holder
    on_host("host-b")
    found = RunDir.open(url)
    assert json.loads(found.result.read_text()) == {"env_frames": 2}
    assert found.name == url and "host-b" in str(found.path)
    with pytest.raises(RunDirError, match=f"{url} must be new or empty; it holds a run already"):
        RunDir.create(url, "preset", 1)
    with pytest.raises(RunDirError, match=f"{url} must be new or empty"):
        RunDir.at(url).check_free()


def test_a_second_writer_is_refused_with_the_name_of_the_first(url, on_host):
    on_host("host-a")
    with _new(url):
        _until(lambda: _manifest(url).files)
        on_host("host-b")
        with pytest.raises(RunLockedError) as refused, RunDir.open(url).claimed():
            pass
        text = f"only one command at a time may write to {url}; process {os.getpid()} on host "
        assert f"{text}host-a" in str(refused.value)
        on_host("host-a")
    on_host("host-b")
    with RunDir.open(url).claimed() as directory:
        assert directory.config.read_text() == "{}"


def test_two_that_begin_at_once_get_one_run(url, on_host, monkeypatch):
    """The second one looks before the first has written, and writes after it."""
    on_host("host-a")
    read, first = Manifest.read, []

    def late(objects):
        if first:
            return read(objects)
        first.append(1)
        on_host("host-b")
        stack.enter_context(_new(url))
        on_host("host-a")
        return None

    with contextlib.ExitStack() as stack:
        directory = RunDir.create(url, "preset", 1)
        monkeypatch.setattr(Manifest, "read", late)
        with pytest.raises(RunLockedError, match="on host host-b"), directory.claimed():
            pass
        assert _manifest(url).holder["host"] == "host-b"


def test_the_lease_of_a_killed_command_ends_and_the_late_one_writes_nothing(url, on_host):
    on_host("host-a")
    lost = pytest.raises(ClaimLostError, match=r"process .* on host host-b .* has taken it over")
    with lost, _new(url) as first:
        _until(lambda: _manifest(url).files)
        (writer,) = [w for w in _threads() if w.name == "store"]
        _pause(writer, True)
        on_host("host-b")
        with RunDir.open(url).claimed() as second:
            second.write_result({"env_frames": 2})
            first.metrics.write_text("{}\n")  # of a node that was not killed
            _pause(writer, False)
            _until(lambda: _is_lost(first))
            with pytest.raises(ClaimLostError, match="on host host-b"):
                first.write_result({"env_frames": 1})
    assert sorted(_manifest(url).files) == ["config.json", "result.json"]
    on_host("host-c")
    assert json.loads(RunDir.open(url).result.read_text()) == {"env_frames": 2}


def _is_lost(directory):
    with contextlib.suppress(ClaimLostError):
        directory.check_claim()
        return False
    return True


def _threads():
    import threading

    return threading.enumerate()


def _pause(thread, paused):
    """Stops the requests of a writer, as if its host were cut off."""
    run = thread._target.__self__
    if paused:
        run._sync_of_test, run._sync = run._sync, lambda **_: True
    else:
        run._sync = run._sync_of_test


def test_the_lease_is_renewed_while_the_files_of_a_run_are_read(url, on_host, monkeypatch):
    on_host("host-a")
    with _new(url):
        pass
    on_host("host-b")
    pull, beats = Mirror.pull, []

    def slowly(mirror, manifest, wanted):
        _until(lambda: beats.append(_manifest(url).beat) or beats[-1] > beats[0] + 2)
        return pull(mirror, manifest, wanted)

    directory = RunDir.open(url)
    monkeypatch.setattr(Mirror, "pull", slowly)
    with directory.claimed():
        assert _manifest(url).holder["host"] == "host-b"


def test_a_lost_answer_of_the_lease_is_no_loss(server, url):
    with _new(url) as directory:
        _until(lambda: _manifest(url).files)
        lost = []

        def fault(method, path, query):
            if method == "PUT" and path.endswith(MANIFEST) and len(lost) < 3:
                lost.append(path)
                return "lost"
            return None

        server.fault = fault
        directory.write_result({"env_frames": 3})
        _until(lambda: len(lost) == 3 and "result.json" in _manifest(url).files)
        directory.check_claim()


def test_a_run_goes_on_while_the_store_is_away(server, url, caplog):
    with _new(url) as directory:
        _until(lambda: _manifest(url).files)
        server.fault = lambda *_: "503"
        directory.write_result({"env_frames": 4})
        _until(lambda: "The run goes on in" in caplog.text)
        server.fault = lambda *_: None
        _until(lambda: "answers again" in caplog.text)
    assert sorted(_manifest(url).files) == ["config.json", "result.json"]


def test_a_store_that_stays_away_ends_the_run_and_resuming_stores_it(
    server, url, monkeypatch, on_host
):
    on_host("host-a")
    monkeypatch.setenv(stored.AWAY, "0.3")
    asked = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append((pid, number)))
    with pytest.raises(StoreAwayError) as raised, _new(url) as directory:
        _until(lambda: _manifest(url).files)
        server.fault = lambda *_: "503"
        _until(lambda: asked)
        directory.write_result({"env_frames": 5})
        raise Interrupted(2)
    assert asked == [(os.getpid(), 2)]
    for name in ("does not answer", str(directory.path), f"--resume {url}", stored.AWAY):
        assert name in str(raised.value)
    server.fault = lambda *_: None
    assert "result.json" not in _manifest(url).files
    assert RunDir.open(url).result.is_file()  # here it is used as it is
    with RunDir.open(url).claimed():
        pass
    on_host("host-b")
    assert json.loads(RunDir.open(url).result.read_text()) == {"env_frames": 5}


def test_what_was_not_stored_is_set_aside_when_another_has_gone_on(
    server, url, monkeypatch, on_host, caplog
):
    on_host("host-a")
    monkeypatch.setenv(stored.AWAY, "0.2")
    with pytest.raises(StoreAwayError), _new(url) as first:
        _until(lambda: _manifest(url).files)
        server.fault = lambda *_: "503"
        first.write_result({"env_frames": 6})
    server.fault = lambda *_: None
    on_host("host-b")
    with RunDir.open(url).claimed() as directory:  # after the lease has ended
        directory.metrics.write_text("{}\n")
    on_host("host-a")
    found = RunDir.open(url)
    assert not found.result.exists() and found.metrics.exists()
    assert "Another command has gone on" in caplog.text
    (aside,) = first.path.glob(".store.aside-*")
    assert json.loads((aside / "result.json").read_text()) == {"env_frames": 6}


def test_pieces_that_no_manifest_names_are_removed(server, url, monkeypatch):
    server.fault = lambda method, path, query: "503" if "list-type" in query else None
    store = Objects(url, 1.0)
    with _new(url) as directory:  # lists are lost, and not needed
        for number in range(5):
            directory.write_result({"env_frames": number})
            _until(lambda n=number: json.loads(_stored(store, "result.json"))["env_frames"] == n)
    server.fault = lambda *_: None
    mark = _manifest(url).mark
    store.put(f"checkpoints/a.{mark}-99", b"of a killed command")
    store.put("other/of-a-user.txt", b"mine")
    with RunDir.open(url).claimed():
        _until(lambda: _manifest(url).beat > 2)
    named = {p.key for pieces in _manifest(url).files.values() for p in pieces}
    assert set(store.listed()) == named | {MANIFEST, "other/of-a-user.txt"}


def _stored(store, name):
    manifest = Manifest.read(store)[0]
    if name not in manifest.files:
        return '{"env_frames": -1}'
    return store.get(manifest.files[name][0].key)[0]


def test_a_config_that_fails_leaves_nothing(url):
    with pytest.raises(ValueError, match="wrong"), _new(url) as directory:
        _until(lambda: _manifest(url).files)
        try:
            raise ValueError("wrong")
        finally:
            directory.clear_unused()
    assert Objects(url, 1.0).listed() == []
    with _new(url):
        pass


def test_readers_take_what_they_need(server, url, on_host):
    on_host("host-a")
    with _new(url) as directory:
        steps = ("checkpoints/step_9/a", "checkpoints/step_10/a", "checkpoints/step_10.1/a")
        for name in (*steps, "checkpoints/best/b", "videos/1.gif"):
            (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
            (directory.path / name).write_text(name)
    on_host("host-b")
    found = RunDir.open(url)
    assert not (found.path / "checkpoints").exists()
    assert [path.name for path in found.newest_checkpoints.iterdir()] == ["step_10.1"]
    assert [path.name for path in found.best.iterdir()] == ["b"]
    assert all((found.checkpoints.parent / step).is_file() for step in steps)
    assert not (found.path / "videos").exists()
    server.fault = lambda method, path, query: "503" if "/videos/" in path else None
    with pytest.raises(StoreAwayError):
        assert found.videos
    server.fault = lambda *_: None
    server.requests.clear()
    assert (found.videos / "1.gif").read_text() == "videos/1.gif"
    assert server.counted("GET") == 2


def test_runs_below_a_url_are_found_and_forgotten(server, url, on_host, caplog):
    on_host("host-a")
    for name in ("a", "grid/b", "grid/c"):
        with _new(f"{url}/{name}"):
            pass
    on_host("host-b")
    root = files.local(url)
    wanted = [root / "a", root / "grid" / "b", root / "grid" / "c"]
    assert find_runs(Path(url)) == wanted
    server.fault = lambda *_: "503"
    assert find_runs(Path(url)) == wanted  # as they were
    assert "What was read last is shown" in caplog.text
    server.fault = lambda *_: None
    store = Objects(f"{url}/grid/b", 1.0)
    store.delete(store.listed())
    assert find_runs(Path(url)) == [root / "a", root / "grid" / "c"]
    on_host("host-c")
    server.fault = lambda method, path, query: "503" if "list-type" in query else None
    with pytest.raises(StoreAwayError, match="does not answer"):
        fetched(Path(url))


def test_old_copies_are_removed_when_all_are_too_large(server, url, on_host, monkeypatch):
    on_host("host-a")
    for name in "abc":
        with _new(f"{url}/{name}") as directory:
            (directory.path / "big").write_bytes(bytes(1000))
    paths = [files.local(f"{url}/{name}") for name in "abc"]
    monkeypatch.setenv(stored.BOUND, "2.5e-6")
    monkeypatch.setattr(stored, "_IN_USE", -1.0)
    monkeypatch.setattr(stored, "_TIDY", -1.0)
    RunDir.open(f"{url}/c")
    assert [(path / "big").exists() for path in paths] == [False, True, True]
    RunDir.open(f"{url}/a")  # it comes back, without the files that nobody needs
    assert paths[0].joinpath("config.json").is_file()


def test_a_reader_waits_for_no_writer_of_this_machine(server, url, monkeypatch):
    with _new(url) as directory:
        directory.metrics.write_text("{}\n")
        server.fault = lambda *_: "503"
        monkeypatch.setattr(stored, "_writers", set())  # as in another process
        assert RunDir.open(url).metrics.read_text() == "{}\n"
        server.fault = lambda *_: None


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ("s3://no-such-bucket/run", "bucket no-such-bucket must exist"),
        ("http://bucket/run", "must begin with s3://"),
        ("s3://key:secret@bucket/run", "environment variables"),
    ],
)
def test_wrong_urls_are_refused_before_anything_is_made(server, tmp_path, wrong, reason):
    for use in (
        lambda: RunDir.open(wrong),
        lambda: RunDir.at(wrong).check_free(),
        lambda: RunDir.create(wrong, "preset", 1),
    ):
        with pytest.raises(ValueError, match=reason) as raised:
            use()
        assert isinstance(raised.value, StoreError) or "secret" not in str(raised.value)


def test_a_job_that_starts_again_on_another_host_continues_its_run(url, on_host, monkeypatch):
    on_host("host-a")
    with _new(url):
        pass
    on_host("host-b")
    result = types.SimpleNamespace(eval_return_mean=1.0)
    continued = []
    monkeypatch.setattr(train, "resume", lambda path, again: continued.append(path) or result)
    monkeypatch.setattr(command, "_print_result", lambda found: 0)
    assert command.main(["cartpole-ppo", "--run-dir", url, "--auto-resume"]) == 0
    assert [files.shown(path) for path in continued] == [url]


def test_hosts_that_share_a_file_are_refused_a_store(url):
    words = ["--topology", "distributed", "--launch", "hosts", "--program.hosts", "a", "b"]
    for host in ("0", "1"):  # the one that leads, and one that follows
        with pytest.raises(ValueError, match=f"file system that all hosts share; got {url}"):
            command.main(["cartpole-ppo", *words, "--program.host", host, "--run-dir", url])


def test_without_the_right_to_write_nothing_begins(server, url):
    server.fault = lambda method, path, query: "403" if method == "PUT" else None
    directory = RunDir.create(url, "preset", 1)
    refused = pytest.raises(StoreError, match="must have the right to list, read, write and delete")
    with refused, directory.claimed():
        pass


def test_a_reader_takes_the_newer_files_if_the_older_are_gone(url, on_host, monkeypatch, caplog):
    """The writer removes a checkpoint after the reader has read what there is."""
    on_host("host-a")
    with _new(url) as directory:
        (directory.path / "checkpoints" / "step_1").mkdir(parents=True)
        (directory.path / "checkpoints" / "step_1" / "a").write_text("1")
    old = Manifest.read(Objects(url, 1.0))
    with RunDir.open(url).claimed() as directory:
        (directory.checkpoints / "step_1").rename(directory.checkpoints / "step_2")
    assert "checkpoints/step_1/a" not in " ".join(Objects(url, 1.0).listed())
    on_host("host-b")
    found, read, late = RunDir.open(url), Manifest.read, [old]
    monkeypatch.setattr(Manifest, "read", lambda objects: late.pop() if late else read(objects))
    assert [path.name for path in found.checkpoints.iterdir()] == ["step_2"]
    assert late == [] and "is left out" not in caplog.text
