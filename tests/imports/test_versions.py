"""Versions of optional libraries: those that are known, and those that pyproject.toml allows."""

import re
from pathlib import Path

import pytest

from rlstack.imports import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("found", "is_known"),
    [
        *(("0.0.9", True), ("1.0.1", True), ("1.12", True), ("2.0a1", False), ("2", False)),
        *(("0.0.8", False), ("10.0", False), ("", True)),
    ],
)
def test_which_versions_are_known(found, is_known, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: found)
    text = versions.unknown.__wrapped__("gymnax")
    assert (text == "") == is_known
    assert is_known or (f"got {found}." in text and "pip install 'gymnax>=0.0.9,<2'" in text)


def test_the_bounds_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for name, (low, above) in versions.KNOWN.items():
        bounds = re.findall(rf'"{name}>=([\d.]+),<([\d.]+)', text)
        assert bounds, name
        if name != "envpool":  # Launchpad's lane has an older EnvPool
            assert bounds == [(low, above)], name
