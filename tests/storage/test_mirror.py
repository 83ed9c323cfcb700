"""A folder and its object store, with a server that is slow, refuses and cuts connections."""

import json
import zlib
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from rlstack.storage import files, mirror, objects
from rlstack.storage.mirror import MANIFEST, Manifest, Mirror
from rlstack.storage.objects import ChangedError, Objects, StoreAwayError, StoreError
from tests.storage import s3_server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(s3, monkeypatch):
    monkeypatch.setattr(objects, "_FIRST_PAUSE", 0.01)
    return s3


@pytest.fixture
def store(server, request):
    return Objects(f"s3://{s3_server.BUCKET}/{request.node.name}", 5.0)


def _some(server, number, fault):
    """The next requests have a fault."""
    left = [fault] * number
    server.fault = lambda *_: left.pop() if left else None


def _push(copy, store, tag="", **changes):
    """Stores a folder as its writer does; returns the manifest and its tag."""
    manifest = Manifest(run="r", revision=copy.revision + 1, files=copy.push(lambda: None))
    tag = store.put_if(MANIFEST, manifest.encode(), tag)
    copy.committed(manifest)
    return manifest, tag


def _all(name):
    return True


def _content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).as_posix().startswith(".")
    }


@pytest.mark.parametrize("fault", ["503", "cut", 0.3])
def test_requests_are_repeated_until_the_store_answers(server, store, fault):
    _some(server, 2, fault)
    store.put("one", b"first")
    _some(server, 2, fault)
    assert store.get("one")[0] == b"first"
    _some(server, 2, fault)
    assert store.listed() == ["one"]


def test_half_an_answer_is_no_content(server, store):
    store.put("one", bytes(range(200)))
    _some(server, 2, "half")
    assert store.get("one")[0] == bytes(range(200))


def test_a_condition_that_does_not_hold_changes_nothing(store):
    first = store.put_if("one", b"first", "")
    with pytest.raises(ChangedError, match="was changed by another command"):
        store.put_if("one", b"other", "")
    second = store.put_if("one", b"second", first)
    with pytest.raises(ChangedError):
        store.put_if("one", b"third", first)
    assert store.get("one") == (b"second", second)
    assert store.tag("one") == second
    assert (store.tag("none"), store.get("none")) == ("", None)


@pytest.mark.parametrize(
    "url, names",
    [
        ("s3://no-such-bucket/run", ["no-such-bucket must exist", "NoSuchBucket"]),
        ("ftp://bucket/run", ["ftp://bucket/run must begin with", "s3://, gs://, az://"]),
        ("hf://bucket/run", ["s3://"]),
    ],
)
def test_errors_name_the_way_out(server, url, names):
    with pytest.raises(StoreError) as raised:
        Objects(url, 0.1).put("one", b"")
    assert not isinstance(raised.value, StoreAwayError)
    assert all(name in str(raised.value) for name in names)


def test_a_store_that_is_away_is_named_with_the_variables(server, store, monkeypatch):
    server.fault = lambda *_: "503"
    away = Objects(store.url, 0.05)
    with pytest.raises(StoreAwayError, match=r"does not answer: .*503.*AWS_ENDPOINT_URL"):
        away.get("one")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreAwayError, match="error sending request") as raised:
        Objects(store.url, 0.05).put("one", b"")
    assert s3_server.SECRET not in str(raised.value)


def test_without_the_package_the_error_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(StoreError, match=r"pip install 'rlstack\[store\]'"):
        Objects("s3://bucket/run", 0.1).get("one")


def test_urls_have_a_copy_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv(files.COPIES, str(tmp_path / "copies"))
    path = files.local("s3://bucket/runs/one/")
    assert path == tmp_path / "copies" / "s3" / "bucket" / "runs" / "one"
    assert files.local(Path("s3://bucket/runs/one")) == path
    assert files.url_of(path) == files.shown(path) == "s3://bucket/runs/one"
    assert files.url_of(tmp_path / "runs" / "one") == ""
    assert files.shown("runs/one") == "runs/one"
    assert files.local("runs/one") == Path("runs/one")
    for wrong in ("s3://", "s3://key:secret@bucket/one", "s3://bucket/../../etc", "s3://b/r?x=1"):
        with pytest.raises(ValueError, match=r"must be like s3://BUCKET/PATH") as raised:
            files.local(wrong)
        assert "secret" not in str(raised.value)


def test_a_folder_goes_to_another_machine_and_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_PIECE", 1000)  # bytes
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "checkpoints" / "step_1" / "arrays").mkdir(parents=True)
    (here / "config.json").write_text("{}")
    (here / "empty").touch()
    array = bytes(range(256)) * 10  # three pieces
    (here / "checkpoints" / "step_1" / "arrays" / "d").write_bytes(array)
    (here / ".lock").write_text("of this machine")
    (here / "run-of-its-own").mkdir()
    (here / "run-of-its-own" / "config.json").write_text("{}")
    manifest, tag = _push(Mirror(here, store), store)
    assert len(manifest.files["checkpoints/step_1/arrays/d"]) == 3
    assert manifest.files["empty"] == []
    read, found = Manifest.read(store)
    assert (read, found) == (manifest, tag)
    copy = Mirror(there, store)
    copy.pull(read, lambda name: "/" not in name)
    assert _content(there) == {"config.json": b"{}", "empty": b""}
    copy.pull(read, _all)
    wanted = {"config.json": b"{}", "empty": b"", "checkpoints/step_1/arrays/d": array}
    assert _content(there) == wanted
    # A checkpoint that is removed there is removed here, with its folders.
    (there / "checkpoints" / "step_1" / "arrays" / "d").unlink()
    newer, _ = _push(Mirror(there, store), store, tag)
    back = Mirror(here, store)
    back.pull(newer, _all)
    assert not (here / "checkpoints").exists()
    assert (here / ".lock").read_text() == "of this machine"


def test_only_what_is_new_is_read_and_written(server, store, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "config.json").write_text("{}")
    (here / "metrics.jsonl").write_bytes(b'{"env_frames": 1}\n')
    writer, reader = Mirror(here, store), Mirror(there, store)
    manifest, tag = _push(writer, store)
    reader.pull(manifest, _all)
    before = (there / "metrics.jsonl").stat().st_ino
    with open(here / "metrics.jsonl", "ab") as file:
        file.write(b'{"env_frames": 2}\n{"env_fr')  # a line is being written
    server.requests.clear()
    manifest, tag = _push(writer, store, tag)
    assert server.counted("PUT") == 2  # the log's piece, and the manifest
    server.requests.clear()
    reader.pull(manifest, _all)
    assert server.counted("GET") == 1
    assert (there / "metrics.jsonl").read_bytes() == b'{"env_frames": 1}\n{"env_frames": 2}\n'
    assert (there / "metrics.jsonl").stat().st_ino == before  # readers go on where they were
    server.requests.clear()
    assert writer.push(lambda: None) == manifest.files
    Mirror(there, store).pull(manifest, _all)  # another command
    assert server.requests == []


def test_a_log_grows_by_pieces(server, store, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_FULL", 100)
    here, there, tag = tmp_path / "here", tmp_path / "there", ""
    here.mkdir()
    writer, reader, expected, written = Mirror(here, store), Mirror(there, store), b"", []
    for number in range(40):
        line = json.dumps({"env_frames": number, "loss": "x" * 20}).encode() + b"\n"
        expected += line
        with open(here / "metrics.jsonl", "ab") as file:
            file.write(line)
        manifest, tag = _push(writer, store, tag)
        written.append(sum(piece.size for piece in manifest.files["metrics.jsonl"][-1:]))
        if number % 7 == 0:
            reader.pull(manifest, _all)
            assert (there / "metrics.jsonl").read_bytes() == expected
    assert max(written) < 100 + len(line)  # not the whole log again
    assert len(manifest.files["metrics.jsonl"]) == 20  # two lines fill one
    # A resumed run has moved lines away: the log is another file.
    expected = b"".join(expected.splitlines(keepends=True)[:5])
    files.write(here / "metrics.jsonl", expected)
    manifest, tag = _push(writer, store, tag)
    reader.pull(manifest, _all)
    assert (there / "metrics.jsonl").read_bytes() == expected


def test_damage_is_seen(store, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("checkpoints/step_1/a", "checkpoints/step_2/a", "config.json"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    manifest, _ = _push(Mirror(here, store), store)
    (piece,) = manifest.files["checkpoints/step_2/a"]
    assert piece.digest == f"{zlib.crc32(b'checkpoints/step_2/a'):08x}"
    store.put(piece.key, b"checkpoints/step_2/b")
    (damaged,) = Mirror(there, store).pull(manifest, _all)
    assert sorted(_content(there)) == ["checkpoints/step_1/a", "config.json"]
    assert damaged == f"{store.url}/{piece.key} is damaged: it is not what was written."
    store.delete([manifest.files["config.json"][0].key])
    with pytest.raises(StoreError, match=r"config\.json.* is damaged: there is no such object"):
        Mirror(tmp_path / "other", store).pull(manifest, _all)
    store.put(MANIFEST, b"{}")
    with pytest.raises(StoreError, match="must be the manifest of a run"):
        Manifest.read(store)
    store.put(MANIFEST, b'{"format": 2}')
    with pytest.raises(StoreError, match="newer version"):
        Manifest.read(store)


def test_what_is_written_when_the_store_goes_away_is_not_written_again(server, store, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for number in range(30):
        (here / f"{number}").write_text(f"{number}")
    copy = Mirror(here, Objects(store.url, 0.05))
    done = []
    server.fault = lambda method, path, _: done.append(path) if len(done) < 10 else "503"
    with pytest.raises(StoreAwayError):
        copy.push(lambda: None)
    server.fault = lambda *_: None
    server.requests.clear()
    manifest, _ = _push(copy, store)
    assert server.counted("PUT") == 30 - 10 + 1
    Mirror(tmp_path / "there", store).pull(manifest, _all)
    assert _content(tmp_path / "there") == _content(here)


def test_a_folder_that_changes_is_stored_as_it_was_at_one_moment(store, tmp_path):
    """A checkpoint is removed while it is written to the store."""
    here = tmp_path / "here"
    for name in ("step_1", "step_2"):
        (here / "checkpoints" / name).mkdir(parents=True)
        for part in "abc":
            (here / "checkpoints" / name / part).write_text(name + part)
    looks = []

    def remove():
        looks.append(1)
        if len(looks) == 2:
            (here / "checkpoints" / "step_1").rename(here / "checkpoints" / ".old")

    found = Mirror(here, store).push(remove)
    assert sorted(found) == [f"checkpoints/step_2/{part}" for part in "abc"]

    def change(name):
        (here / name).write_text("x" * len(looks))
        looks.append(1)

    found = Mirror(here, store).push(lambda: change("database"))
    assert sorted(found) == [*(f"checkpoints/step_2/{part}" for part in "abc"), "database"]
    assert Mirror(here, store).push(lambda: change("checkpoints/step_2/a")) is None
