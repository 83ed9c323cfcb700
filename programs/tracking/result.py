"""The result of a run, as ``result.json`` holds it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Result(NamedTuple):
    """The result of a run: the last evaluation, what it took, and what was run."""

    eval_return_mean: float
    eval_return_std: float
    eval_episodes: int
    env_frames: int
    learner_steps: int
    wall_seconds: float  # of training
    frames_per_second: float
    seed: int
    topology: str
    preset: str
    git_commit: str
    eval_return_by_opponent: Mapping[str, float] = MappingProxyType({})  # empty without opponents


def git_commit() -> str:
    """Returns the commit of the running source, with "-dirty" if files differ from it.

    It is "unknown" if git is missing, or if the source is not the root of a git checkout. That is
    so for an installed wheel, also inside the checkout of another project.
    """
    return _commit_of(Path(__file__).resolve().parents[2])


def _commit_of(root: Path) -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain") else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"
