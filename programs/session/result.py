"""The result of a run, as ``result.json`` holds it."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import platform
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import rlstack
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import files

_log = logging.getLogger(__name__)
_PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "gymnasium", "envpool")
# Libraries of environments and of planning, which count in a process that has imported them.
_LIBRARIES = (
    *("ale-py", "brax", "bsuite", "craftax", "dm-control", "gymnax", "jaxmarl", "mctx", "minatar"),
    *("minigrid", "mpe2", "mujoco", "pettingzoo"),
)


class Result(NamedTuple):
    """The result of a run: the last evaluation, what it took, and what was run."""

    eval_return_mean: float
    eval_return_std: float
    eval_episodes: int
    env_frames: int
    learner_steps: int
    # Of all commands of the run, each from when it makes and compiles its parts to its last update.
    wall_seconds: float
    frames_per_second: float
    seed: int
    topology: str
    preset: str
    git_commit: str
    eval_return_by_opponent: Mapping[str, float] = MappingProxyType({})  # empty without opponents
    ended_by: str = "frames"  # the budget that was spent, or what a stop rule says
    # The evaluation, env_frames and learner_steps of each policy that learns; empty for one policy.
    policies: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    # What the last command of the run found; empty in results of earlier versions.
    versions: Mapping[str, str] = MappingProxyType({})  # of Python, rlstack and packages, by name
    machine: str = ""  # operating system, processor, cores and GPUs


def read_result(directory: RunDir) -> Result | None:
    """Returns the result of a run; None if there is no result or it cannot be read."""
    if not directory.result.exists():
        return None
    try:
        found = Result(**files.read_json(directory.result))
        # A number that is not finite is a text in JSON.
        mean, deviation = float(found.eval_return_mean), float(found.eval_return_std)
        return found._replace(
            eval_return_mean=mean, eval_return_std=deviation, env_frames=int(found.env_frames)
        )
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        _log.warning("%s cannot be read, and does not count: %s", directory.result, error)
        return None


def git_commit() -> str:
    """Returns the commit of the running source, with "-dirty" if files differ from it.

    Of an installed wheel it is the commit that the wheel was built from. It is "unknown" if git is
    missing, or if the source is neither from a wheel nor the root of a git checkout.
    """
    built_from = Path(rlstack.__file__).with_name("commit.txt")  # setup.py writes it
    if built_from.exists():
        return built_from.read_text().strip()
    return _commit_of(Path(__file__).resolve().parents[2])


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that decide about results."""
    found = {"python": platform.python_version(), "rlstack": rlstack.__version__}
    libraries = [name for name in _LIBRARIES if name.replace("-", "_") in sys.modules]
    for name in (*_PACKAGES, *libraries):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> str:
    """Returns the operating system, the processor, its cores, and the GPUs of NVIDIA if any."""
    models = _values("/proc/cpuinfo", "model name")[:1] or [platform.machine()]
    gpus = Counter(
        value
        for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information"))
        for value in _values(path, "Model")
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counted = [f"{count} x {name}" for name, count in gpus.items()]
    cores_text = f"{cores} core{'s' * (cores != 1)}"
    return ", ".join([platform.system(), *models, cores_text, *counted])


def _values(path: str, name: str) -> list[str]:
    """Returns the values of ``NAME : VALUE`` lines of a file; [] if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            pairs = [line.partition(":")[::2] for line in file]
    except OSError:
        return []
    return [value.strip() for key, value in pairs if key.strip() == name]


@functools.cache
def commit_at_start() -> Future[str]:
    """Returns the `git_commit` at the first call in this process; a thread runs git.

    The files and the commit may change during a long run; the source that runs does not.
    """
    found: Future[str] = Future()
    threading.Thread(
        target=lambda: found.set_result(git_commit()), name="commit", daemon=True
    ).start()
    return found


# A forked child has no such thread.
os.register_at_fork(after_in_child=commit_at_start.cache_clear)


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
    except Exception:  # whatever it is: a run must not fail because of it
        return "unknown"
