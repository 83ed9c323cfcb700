"""Checkpoints whose files have changed on disk: found, named, and passed over for older ones."""

import json
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.storage import checkpoint, checkpoint_arrays


def tree(value=0.0):
    rng = np.random.default_rng(3)
    return {
        "learner": {
            "params": {"w": jnp.asarray(rng.normal(size=(40, 30)) + value, jnp.float32)},
            "key": jax.random.key(1),
            "half": jnp.arange(7, dtype=jnp.bfloat16),
        },
        "replay": {
            "steps": rng.integers(0, 255, (200, 40), np.uint8),
            "turned": np.asfortranarray(rng.normal(size=(4, 6))),
            "big_endian": np.arange(5, dtype=">f8"),
            "none": np.zeros((0, 3)),
        },
        "lr": 0.125,
        "count": 7,
    }


def same(left, right):
    def plain(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(plain(a), plain(b)) for a, b in pairs)


def files_of(path):
    return sorted(f for f in path.rglob("*") if f.is_file() and f.stat().st_size)


def flip(file, rng):
    """Flips a random bit; returns the bytes from before."""
    before = file.read_bytes()
    changed = bytearray(before)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    file.write_bytes(changed)
    return before


def largest(path):
    return max(files_of(path), key=lambda f: f.stat().st_size)


@pytest.mark.timeout(120)
def test_no_flipped_bit_is_restored_as_another_value(tmp_path):
    saved, rng = tree(), random.Random(5)
    path = checkpoint.save(tmp_path, 1, saved, {"env_frames": 12})
    found = 0
    for file in files_of(path):
        for _ in range(24 if file in (largest(path), path / "checkpoint.json") else 4):
            before = flip(file, rng)
            try:
                restored = checkpoint.restore(path, saved)
                assert same(restored, saved), file
                assert checkpoint.read_metadata(path)["env_frames"] == 12, file
                verified = True
            except checkpoint.DamagedError as error:
                assert str(path) in str(error)
                found, verified = found + 1, False
            if verified:
                checkpoint.verify(path)
            else:
                with pytest.raises(checkpoint.DamagedError):
                    checkpoint.verify(path)
            file.write_bytes(before)
    assert found > 40
    assert same(checkpoint.restore(path, saved), saved)


def test_a_changed_leaf_is_named(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, 1, tree(), {})

    def changed(folder, numbers):
        arrays = {number: array.copy() for number, array in read(folder, numbers).items()}
        for array in arrays.values():
            if array.shape == (40, 30):
                array[3, 4] = np.nextafter(array[3, 4], np.float32(9))
        return arrays

    read = checkpoint_arrays.read
    monkeypatch.setattr(checkpoint_arrays, "read", changed)
    with pytest.raises(checkpoint.DamagedError, match=r"'params'\]\['w'\] is not what was written"):
        checkpoint.restore(path, tree())
    other = {"replay": {"steps": checkpoint.ANY_ARRAY}}
    checkpoint.restore(path, other, partial=True)  # other leaves are whole
    checkpoint.verify(path, part="['replay']")
    with pytest.raises(checkpoint.DamagedError):
        checkpoint.verify(path, part="['learner']['params']")


def test_the_newest_undamaged_one_is_found_and_the_others_are_named(tmp_path, caplog):
    assert checkpoint.newest_intact(tmp_path) is None
    first, second, third = (checkpoint.save(tmp_path, n, tree(n), {}) for n in (1, 2, 3))
    assert checkpoint.newest_intact(tmp_path) == third
    flip(third / "checkpoint.json", random.Random(1))
    (second / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_intact(tmp_path) == first
    for path in (third, second, first):
        assert str(path) in caplog.text
    assert same(checkpoint.restore(first, tree()), tree(1))
    flip(largest(first), random.Random(2))
    with pytest.raises(checkpoint.DamagedError, match=third.name):
        checkpoint.newest_intact(tmp_path)


def test_what_belongs_to_a_checkpoint_counts(tmp_path):
    first, second = (checkpoint.save(tmp_path, n, tree(n), {}) for n in (1, 2))

    def also(path):
        if path == second:
            raise checkpoint.DamagedError("its replay is gone")

    assert checkpoint.newest_intact(tmp_path, also=also) == first


def test_a_damaged_one_set_aside_is_neither_read_nor_removed(tmp_path):
    for step in (5, 9):
        checkpoint.save(tmp_path, step, tree(step), {})
    aside = checkpoint.set_aside(checkpoint.latest(tmp_path))
    assert aside.name == "damaged_step_000000000009"
    again = checkpoint.save(tmp_path, 9, tree(1), {})
    assert checkpoint.set_aside(again).name == "damaged_step_000000000009.2"
    for step in (6, 7, 8):
        checkpoint.save(tmp_path, step, tree(step), {}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["damaged_step_000000000009", "damaged_step_000000000009.2"]
    assert names[2:] == ["step_000000000007", "step_000000000008"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", '{"format": 2}', '{"format": 1}', "{" * 100_000, '{"format": 2, "dig',
     '{"format": 1, "step": 1, "leaves": [["x"]], "metadata": {}}',
     '{"format": 1, "step": 1, "leaves": [["x", "array", [3], "float99", null]], "metadata": {}}',
     '{"format": 1, "step": "a", "leaves": [], "metadata": {}}', "\udcff"],
)  # fmt: skip
def test_malformed_json_is_an_error_of_the_checkpoint(tmp_path, text):
    path = checkpoint.save(tmp_path, 1, tree(), {})
    (path / "checkpoint.json").write_bytes(text.encode(errors="surrogateescape"))
    for read in (checkpoint.read_metadata, checkpoint.verify):
        with pytest.raises(checkpoint.CheckpointError, match=path.name):
            read(path)
    with pytest.raises(checkpoint.CheckpointError, match=path.name):
        checkpoint.restore(path, tree())


def as_format_1(path):
    """Rewrites checkpoint.json as versions without digests wrote it."""
    file = path / "checkpoint.json"
    record = json.loads(file.read_text())
    leaves = [leaf[:5] for leaf in record["leaves"]]
    old = {"format": 1, "step": record["step"], "leaves": leaves, "metadata": record["metadata"]}
    file.write_text(json.dumps(old))


def test_checkpoints_without_digests_are_restored_with_a_note(tmp_path, caplog):
    path = checkpoint.save(tmp_path, 1, tree(), {"env_frames": 4})
    as_format_1(path)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_intact(tmp_path) == path
    assert "has no digests" in caplog.text
    assert same(checkpoint.restore(path, tree()), tree())
    assert checkpoint.read_metadata(path) == {"step": 1, "env_frames": 4}


def test_nothing_is_renamed_if_the_caller_may_not(tmp_path):
    first = checkpoint.save(tmp_path, 1, tree(), {})

    def lost():
        raise PermissionError("another command has the directory")

    with pytest.raises(PermissionError):
        checkpoint.save(tmp_path, 2, tree(), {}, keep=1, before_rename=lost)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
