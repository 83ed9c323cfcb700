"""Files that are replaced only by complete ones."""

import os

import pytest

from rlstack.storage import files


def test_content_replaces_a_file_and_nothing_else_stays(tmp_path):
    path = tmp_path / "a.json"
    files.write(path, "first")
    files.write(path, "zweites, größer".encode(), to_disk=True)
    assert path.read_text() == "zweites, größer"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    files.write(path, "old")

    def refuse():
        raise RuntimeError("claim lost")

    with pytest.raises(RuntimeError, match="claim lost"):
        files.write(path, "new", check=refuse)
    with pytest.raises(KeyError), files.replacing(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
