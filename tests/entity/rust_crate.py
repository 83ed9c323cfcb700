"""The Rust crate for tests: its examples, built once into a directory that git ignores."""

import shutil
import subprocess
from pathlib import Path

import pytest

CRATE = Path(__file__).resolve().parents[2] / "clients" / "rust"
NEEDS_CARGO = pytest.mark.skipif(
    shutil.which("cargo") is None, reason="cargo is not installed; the Rust crate cannot be built"
)


def cargo(*arguments):
    """Runs cargo without network; processes that build at the same time wait for each other."""
    command = ["cargo", *arguments, "--offline", "--locked", "--target-dir", str(CRATE / "target")]
    done = subprocess.run(command, cwd=CRATE, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def examples():
    """The directory of the built example programs."""
    cargo("build", "--examples")
    return CRATE / "target" / "debug" / "examples"
