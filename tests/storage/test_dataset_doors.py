"""Datasets from anywhere: crafted ones are refused, and damaged ones are noticed."""

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from dm_env import specs

from rlstack.storage.datasets import Dataset, DatasetError
from tests.storage.test_dataset import BARE, RICH, write

pytestmark = pytest.mark.timeout(60)


def edit(path, change):
    """Changes the header, as an attacker does: without a checksum, which nobody asks for."""
    file = path / "dataset.json"
    fields = json.loads(file.read_text())
    fields.pop("crc32", None)
    for shard in fields["shards"]:
        shard.pop("crc32", None)
    change(fields)
    file.write_text(json.dumps(fields))


def as_old(path):
    """Makes the dataset one of format 1, which had no checksums."""
    edit(path, lambda fields: fields.update(format=1))


def set_in(fields, value, *path):
    for key in path[:-1]:
        fields = fields[key]
    fields[path[-1]] = value


def replace_column(path, column, data, compressed=False):
    """Replaces the .npy file of a column, and compresses all columns if told to."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members[f"{column}.npy"] = data
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy(shape, dtype, data=b""):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return out.getvalue() + data


def use(path):
    """What a run does with a dataset, in a process that may die of it."""
    code = (
        "import resource, sys\n"
        "import numpy as np\n"
        "from rlstack.storage.datasets import Dataset, DatasetError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try:\n"
        "    dataset = Dataset(sys.argv[1])\n"
        "    print(repr(dataset.read(np.arange(dataset.header.steps))))\n"
        "except DatasetError as error:\n"
        "    print('refused', error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=50
    )


def test_a_dtype_of_pointers_is_refused(tmp_path):
    """Reading it took the file's bytes for addresses of objects: a segmentation fault."""
    header = write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: set_in(fields, "object", "observation", "dtype"))
    data = npy((5, 2), "|O", b"\x41" * 80)
    replace_column(tmp_path / "d" / header.shards[0].file, "observation", data)
    done = use(tmp_path / "d")
    assert (done.returncode, done.stdout[:7]) == (0, "refused"), done.stderr[-500:]
    assert "a dtype must be that of numbers or bool; got 'object'" in done.stdout


@pytest.mark.parametrize(
    "dtype", ["O", "object", "U8", "S3", "V8", "f4,O", "datetime64[s]", 5, None]
)
def test_dtypes_without_numbers_are_refused(tmp_path, dtype):
    write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: set_in(fields, dtype, "observation", "dtype"))
    with pytest.raises(DatasetError, match="header of a dataset"):
        Dataset(tmp_path / "d")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "compressed", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.chosen])]
)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 2), "|O"), ((5, 2), "<f8"), ((10**15, 2), "<f4"), ((5, 2), "<U4")]
)
def test_columns_that_differ_from_the_header_are_not_mapped(tmp_path, shape, dtype, compressed):
    header = write(tmp_path / "d", [4])
    shard = tmp_path / "d" / header.shards[0].file
    edit(tmp_path / "d", lambda fields: None)
    replace_column(shard, "observation", npy(shape, dtype, b"\x41" * 80), compressed)
    done = use(tmp_path / "d")
    assert "must be float32[5, 2], as the header says" in done.stdout, done.stderr[-500:]


def test_integers_outside_of_their_space_are_refused_by_reader_and_writer(tmp_path):
    header = write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: None)
    actions = np.array([0, 1, 2, 3, 0], np.int32)  # legal: 0, 1, 2
    shard = tmp_path / "d" / header.shards[0].file
    replace_column(shard, "action", npy((5,), "<i4", actions.tobytes()))
    rule = r"action must lie in its space, integers in \[0, 2\]; got 3 at step 3"
    with pytest.raises(DatasetError, match=rf"shard-00000\.npz: {rule}"):
        Dataset(tmp_path / "d")
    narrow = BARE._replace(action=specs.DiscreteArray(2))  # the steps have actions 0, 1, 2
    with pytest.raises(
        DatasetError, match=r"DatasetWriter: .*integers in \[0, 1\]; got 2 at step 2"
    ):
        write(tmp_path / "e", [4], narrow)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("start", [0.5, "1", [1, 2], None])
def test_a_start_that_is_no_whole_number_is_refused(tmp_path, start):
    write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: set_in(fields, start, "action", "start"))
    with pytest.raises(DatasetError, match="must be the header of a dataset"):
        Dataset(tmp_path / "d")


@pytest.mark.parametrize("text", ["{'descr': (", "[" * 9000, "{}", "\0", "__import__('os')"])
def test_a_description_that_numpy_cannot_read_is_refused(tmp_path, text):
    header = write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: None)
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    replace_column(tmp_path / "d" / header.shards[0].file, "observation", data)
    with pytest.raises(DatasetError, match="must be a readable shard"):
        Dataset(tmp_path / "d")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_column_that_is_cut_off_is_refused(tmp_path, compressed):
    header = write(tmp_path / "d", [4])
    shard = tmp_path / "d" / header.shards[0].file
    edit(tmp_path / "d", lambda fields: None)
    replace_column(shard, "reward", npy((5,), "<f4"), compressed)
    done = use(tmp_path / "d")
    assert (done.returncode, done.stdout[:7]) == (0, "refused"), done.stdout + done.stderr[-500:]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("steps",), 10**30),
        (("steps",), -5),
        (("frames",), 10**6),
        (("shards", 0, "steps"), 10**14),
        (("shards", 0, "steps"), 5.0),
        (("shards", 0, "episodes"), 0),
        (("shards",), []),
        (("observation", "shape"), [10**12, 10**12]),
        (("observation", "shape"), [2**40]),
        (("observation", "shape"), [-2]),
        (("observation", "shape"), [1] * 200),
        (("action", "num_values"), -1),
        (("action", "num_values"), 10**40),
        (("return_mean",), {}),
        (("env",), {"name": 5, "type": "auto", "options": {}}),
        (("env",), {"name": "a", "type": "auto", "options": {}, "num_envs": 10**9}),
        (("env",), None),
        (("observation",), {"list": 5}),
    ],
)
def test_absurd_numbers_are_refused_before_anything_is_allocated(tmp_path, path, value):
    write(tmp_path / "d", [4])
    edit(tmp_path / "d", lambda fields: set_in(fields, value, *path))
    with pytest.raises(DatasetError, match=str(tmp_path)):
        Dataset(tmp_path / "d")


def test_deep_nesting_is_refused(tmp_path):
    write(tmp_path / "d", [4])
    text = (tmp_path / "d" / "dataset.json").read_text()
    deep = '{"list": [' * 5000 + "1" + "]}" * 5000
    (tmp_path / "d" / "dataset.json").write_text(
        json.dumps({**json.loads(text), "observation": "DEEP"}).replace('"DEEP"', deep)
    )
    with pytest.raises(DatasetError, match="header of a dataset"):
        Dataset(tmp_path / "d")


@pytest.mark.parametrize(
    "how", ["absolute", "parent", "inside", "link", "pipe", "directory", "number"]
)
def test_shards_elsewhere_and_special_files_are_refused(tmp_path, how):
    header = write(tmp_path / "d", [4])
    shard, outside = tmp_path / "d" / header.shards[0].file, tmp_path / "outside.npz"
    shutil.copy(shard, outside)
    names = {
        "absolute": str(outside),
        "parent": "../outside.npz",
        "inside": "sub/../../outside.npz",
        "number": 5,
    }
    (tmp_path / "d" / "sub").mkdir()
    edit(tmp_path / "d", lambda f: set_in(f, names.get(how, shard.name), "shards", 0, "file"))
    if how in ("link", "pipe", "directory"):
        shard.unlink()
        make = {"link": lambda p: p.symlink_to(outside), "pipe": os.mkfifo, "directory": os.mkdir}
        make[how](shard)
    with pytest.raises(DatasetError, match=r"file name alone|in the directory|plain file"):
        Dataset(tmp_path / "d")


@pytest.mark.parametrize("old", [False, True])
def test_every_flipped_bit_of_a_shard_is_noticed_or_harmless(tmp_path, old):
    """One flipped bit of a reward was read as inf."""
    header = write(tmp_path / "d", [3], RICH)
    if old:
        as_old(tmp_path / "d")
    path = tmp_path / "d" / header.shards[0].file
    whole = path.read_bytes()
    wanted = Dataset(tmp_path / "d").read(np.arange(4))
    rng, noticed = np.random.default_rng(0), 0
    places = [*rng.integers(0, len(whole), 150), whole.index(b"\x00\x00\x80\x3f") + 3]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        try:
            found = Dataset(tmp_path / "d").read(np.arange(4))
        except DatasetError as error:
            assert "Copy the dataset again" in str(error) or "ecord it again" in str(error)
            noticed += 1
            continue
        # The file has bytes that say nothing, such as times and padding.
        for a, b in zip(_leaves(found), _leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    assert noticed > len(places) / 2


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_every_changed_character_of_a_header_is_noticed(tmp_path):
    write(tmp_path / "d", [3])
    file = tmp_path / "d" / "dataset.json"
    whole = file.read_text()
    for place, character in enumerate(whole):
        if character.isspace():
            continue
        file.write_text(f"{whole[:place]}{chr(ord(character) ^ 1)}{whole[place + 1 :]}")
        with pytest.raises(DatasetError, match=r"dataset\.json"):
            Dataset(tmp_path / "d")
    file.write_text(whole)
    assert Dataset(tmp_path / "d").note == ""


def test_an_old_dataset_is_read_with_a_note(tmp_path):
    write(tmp_path / "d", [3], shard_bytes=1)
    wanted = Dataset(tmp_path / "d").read(np.arange(4))[0]
    as_old(tmp_path / "d")
    dataset = Dataset(tmp_path / "d")
    assert "no checksum" in dataset.note
    np.testing.assert_array_equal(dataset.read(np.arange(4))[0].observation, wanted.observation)


def test_a_shard_of_another_recording_is_noticed(tmp_path):
    header = write(tmp_path / "d", [3])
    write(tmp_path / "e", [3], BARE)
    other = tmp_path / "e" / header.shards[0].file
    replace_column(other, "reward", npy((4,), "<f4", np.full(4, 7, "<f4").tobytes()))
    shutil.copy(other, tmp_path / "d" / header.shards[0].file)
    with pytest.raises(DatasetError, match="must have the CRC-32 with which it was written"):
        Dataset(tmp_path / "d")
