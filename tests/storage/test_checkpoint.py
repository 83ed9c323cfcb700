"""Checkpoints: exact round trips, the files after a crash, and error messages."""

import json
import os
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlstack.storage import checkpoint
from rlstack.storage.checkpoint_record import reason


class Record(NamedTuple):
    a: Any
    b: Any


def _tree():
    rng = np.random.default_rng(0)
    params = {"net/~/linear": {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}}
    return {
        "params": params,
        "opt": optax.adam(optax.linear_schedule(1e-3, 0.0, 10)).init(params),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "old_key": jax.random.PRNGKey(7),
        "key": jax.random.split(jax.random.key(3), 2),
        "record": Record(np.arange(5, dtype=np.uint64) + (1 << 63), None),
        "nothing": (),
        "lists": [[], {}, np.array(True), np.zeros((0, 84, 84), np.uint8)],
        "scalar": np.float32(1.5),
        "wide": np.int64(-(2**62)),
        "count": 2**100,
        "lr": 0.1,
        "flag": True,
        "name": "PCG64",
        "f64": np.array([1.0, np.nan, -np.inf]),
        "order": np.asfortranarray(rng.normal(size=(4, 6))).T,
    }


def _blank(tree):
    """The same structure with other values, like the target of a restore in a fresh run."""

    def blank(x):
        if isinstance(x, bool | int | float | str):
            return type(x)()
        if isinstance(x, np.generic):
            return x.dtype.type(0)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape[0])
        return jnp.zeros_like(x) if isinstance(x, jax.Array) else np.zeros_like(x)

    return jax.tree_util.tree_map(blank, tree)


def _assert_same(got, want):
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(want)
    pairs = zip(
        jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves_with_path(want), strict=True
    )
    for have, (path, wish) in pairs:
        name = jax.tree_util.keystr(path)
        assert type(have) is type(wish), name
        if hasattr(wish, "dtype"):
            assert have.dtype == wish.dtype, name
            assert have.shape == wish.shape, name
            if jax.dtypes.issubdtype(wish.dtype, jax.dtypes.prng_key):
                have, wish = jax.random.key_data(have), jax.random.key_data(wish)
            assert np.asarray(have).tobytes() == np.asarray(wish).tobytes(), name
        else:
            assert have == wish, name


def test_round_trip_keeps_every_type_dtype_and_bit(tmp_path):
    tree = _tree()
    path = checkpoint.save(tmp_path / "checkpoints", 12, tree, {"frames": np.int64(3), "x": [1.5]})
    assert path == checkpoint.latest(tmp_path / "checkpoints")
    _assert_same(checkpoint.restore(path, _blank(tree)), tree)
    assert checkpoint.read_metadata(path) == {"step": 12, "frames": 3, "x": [1.5]}


def test_restored_numpy_arrays_can_be_written_to(tmp_path):
    path = checkpoint.save(tmp_path, 0, {"replay": np.arange(4), "none": np.zeros((0,))}, {})
    got = checkpoint.restore(path, {"replay": np.zeros(4, int), "none": np.zeros((0,))})
    got["replay"][1] = 9
    assert got["replay"].tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize("tree", [None, (), 3, [None, {}], np.float32(2), float("nan")])
def test_trees_without_arrays(tmp_path, tree):
    got = checkpoint.restore(checkpoint.save(tmp_path, 1, tree, {}), tree)
    assert repr(got) == repr(tree)


def test_large_replay_content(tmp_path):
    rng = np.random.default_rng(1)
    tree = {f"column{i}": rng.integers(0, 255, (2000, 1000), np.uint8) for i in range(16)}
    path = checkpoint.save(tmp_path, 1, tree, {})
    _assert_same(checkpoint.restore(path, _blank(tree)), tree)


def test_the_target_says_numpy_or_jax(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"x": np.ones(2, np.float32)}, {})
    as_jax = checkpoint.restore(path, {"x": jnp.zeros(2)})["x"]
    assert isinstance(as_jax, jax.Array)
    shaped = checkpoint.restore(path, {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})["x"]
    assert isinstance(shaped, jax.Array)
    assert shaped.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("held", [np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0, 4))])
def test_an_array_of_unknown_size_is_restored_as_it_was_saved(tmp_path, held):
    path = checkpoint.save(tmp_path, 1, {"replay": held, "n": 3}, {})
    target = {"replay": checkpoint.ANY_ARRAY, "n": 0}
    _assert_same(checkpoint.restore(path, target), {"replay": held, "n": 3})
    with pytest.raises(checkpoint.CheckpointError, match=r"\['n'\]"):
        checkpoint.restore(path, {"replay": held, "n": checkpoint.ANY_ARRAY})


def test_newest_are_kept_and_a_step_saved_again_is_newer(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "notes").mkdir()
    for step, value in [(5, 0), (10, 1), (9, 2), (10, 3), (10, 4)]:
        checkpoint.save(tmp_path, step, value, {}, keep=2)
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["notes", "step_000000000010.1", "step_000000000010.2"]
    assert checkpoint.restore(checkpoint.latest(tmp_path), 0) == 4


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"a": np.zeros(3, np.float32), "b": 1}, ["['a']", "float32[3]", "float32[2]"]),
        ({"a": np.zeros(2, np.float64), "b": 1}, ["['a']", "float64[2]", "float32[2]"]),
        ({"a": np.zeros(2, np.float32), "b": 1.0}, ["['b']", "Python float", "Python int"]),
        ({"a": np.zeros(2, np.float32)}, ["['b']", "no such leaf, found a Python int"]),
        (
            {"a": np.zeros(2, np.float32), "aa": 0, "b": 1},
            ["['aa']", "expected a Python int, found no such leaf"],
        ),
        (
            {"a": np.zeros(2, np.float32), "b": 1, "c": 0},
            ["['c']", "expected a Python int, found no such leaf"],
        ),
        ({"a": None, "b": 1}, ["['a']", "expected None", "float32[2]"]),
        ({"a": [np.zeros(2, np.float32)], "b": 1}, ["['a'][0]", "no such leaf"]),
    ],
)
def test_a_target_that_differs_is_refused_at_the_first_leaf(tmp_path, target, words):
    path = checkpoint.save(tmp_path, 1, {"a": np.ones(2, np.float32), "b": 1}, {})
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(path, target)
    for word in [*words, str(path)]:
        assert word in str(caught.value)


def test_an_older_target_takes_the_place_of_one_that_does_not_fit(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": np.ones(2, np.float32), "b": 1}, {})
    newer, older = {"c": 0}, {"a": np.zeros(2, np.float32), "b": 0}
    _assert_same(checkpoint.restore(path, newer, older=older)["a"], np.ones(2, np.float32))
    assert checkpoint.restore(path, older, older=newer)["b"] == 1
    with pytest.raises(checkpoint.CheckpointError, match=r"at \['c'\] expected a Python int"):
        checkpoint.restore(path, newer, older={"d": 0})


@pytest.mark.parametrize("bad", [object(), np.array([None]), np.array(["text"]), {1, 2}])
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, bad):
    with pytest.raises(checkpoint.CheckpointError, match=r"\['deep'\]\[1\]"):
        checkpoint.save(tmp_path / "c", 1, {"deep": [0, bad]}, {})
    with pytest.raises(checkpoint.CheckpointError, match="metadata"):
        checkpoint.save(tmp_path / "c", 1, {}, {"x": object()})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (10**12, 1), (0, 0)])
def test_step_and_keep_are_checked(tmp_path, step, keep):
    with pytest.raises(ValueError, match="must be"):
        checkpoint.save(tmp_path, step, {}, {}, keep=keep)


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="must be a checkpoint"):
        checkpoint.restore(tmp_path, {})
    path = checkpoint.save(tmp_path, 1, {"x": np.arange(4)}, {})
    for file in (path / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=r"arrays .* must be readable.*Remove"):
        checkpoint.restore(path, {"x": np.arange(4)})
    (path / "checkpoint.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(checkpoint.CheckpointError, match="format"):
        checkpoint.restore(path, {"x": np.arange(4)})


def test_an_unwritable_directory_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointWriteError, match=r"file/checkpoints.*--run-dir"):
        checkpoint.save(tmp_path / "file" / "checkpoints", 1, {}, {})


def test_an_interrupt_while_writing_leaves_the_previous_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": np.arange(4)}, {})

    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {"x": np.ones(4)}, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000000001"]


_SAVE = """
import os, resource, signal, sys
import numpy as np
from rlstack.storage import checkpoint
directory, mode = sys.argv[1:]
tree = {"x": np.random.default_rng(0).integers(0, 255, (4 << 20,), np.uint8)}
checkpoint.save(directory, 1, tree, {})
if mode == "full":  # no file may grow further, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
else:
    def die(path): os.kill(os.getpid(), signal.SIGKILL)
    checkpoint._sync = die  # after the files are written, before they are renamed
try:
    checkpoint.save(directory, 2, tree, {}, keep=1)
except OSError as error:
    print(type(error).__name__, error)
    sys.exit(28)
"""


def _save_in_process(directory, mode):
    return subprocess.run(
        [sys.executable, "-c", _SAVE, str(directory), mode],
        timeout=90,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.timeout(100)
def test_a_full_disk_is_reported_and_leaves_the_previous_one(tmp_path):
    done = _save_in_process(tmp_path, "full")
    assert done.returncode == 28, done.stderr
    assert "CheckpointWriteError" in done.stdout
    assert str(tmp_path) in done.stdout
    assert "Free space" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000000001"]
    checkpoint.restore(checkpoint.latest(tmp_path), {"x": np.zeros(4 << 20, np.uint8)})


@pytest.mark.timeout(100)
def test_a_kill_while_writing_leaves_the_previous_one_and_the_next_save_cleans_up(tmp_path):
    done = _save_in_process(tmp_path, "kill")
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.latest(tmp_path).name == "step_000000000001"
    assert len(list(tmp_path.iterdir())) == 2
    checkpoint.save(tmp_path, 3, {"x": np.arange(2)}, {})
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step_000000000001", "step_000000000003"]


@pytest.mark.timeout(100)
def test_saving_prints_nothing_and_importing_does_not_load_orbax(tmp_path):
    code = (
        "import sys, numpy as np, jax.numpy as jnp\n"
        "from rlstack.storage import checkpoint\n"
        "assert 'orbax' not in sys.modules\n"
        "tree = {'x': np.arange(3), 'y': jnp.ones(2)}\n"
        "path = checkpoint.save(sys.argv[1], 1, tree, {})\n"
        "checkpoint.restore(path, tree)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        timeout=90,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_part_is_restored_without_reading_the_rest(tmp_path):
    tree = {"learner": {"params": np.arange(3.0), "state": np.ones(2)}, "replay": np.zeros(5)}
    path = checkpoint.save(tmp_path, 1, tree, {})
    part = {"learner": {"params": np.zeros(3)}}
    _assert_same(
        checkpoint.restore(path, part, partial=True), {"learner": {"params": np.arange(3.0)}}
    )
    with pytest.raises(checkpoint.CheckpointError, match="no such leaf"):
        checkpoint.restore(path, part)
    with pytest.raises(checkpoint.CheckpointError, match=r"'weights'.*no such leaf"):
        checkpoint.restore(path, {"learner": {"weights": np.zeros(3)}}, partial=True)
    with pytest.raises(checkpoint.CheckpointError, match="array"):
        checkpoint.restore(path, {"learner": {"params": np.zeros(4)}}, partial=True)


def test_the_reason_of_the_operating_system_stays_behind_a_long_path():
    path = "/tmp/" + "long/" * 80
    text = f'RESOURCE_EXHAUSTED: Failed writing: "{path}": [OS error 28: No space left on device]'
    told = reason(RuntimeError(text))
    assert len(told) < 350
    assert told.startswith("RESOURCE_EXHAUSTED") and told.endswith("... No space left on device")
    assert reason(RuntimeError("No space left on device.\nmore")) == "No space left on device"
