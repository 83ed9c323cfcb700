"""The parts of a checkpoint that learners of several policies write together.

The learner of the first policy writes the checkpoint. It asks the other learners for their parts by
number. Each writes its part to a file of its own, between two of its updates, and goes on. So a
checkpoint has all policies or does not exist, and is like that of a single process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rlstack.programs.session.progress import Progress
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import PyTree


class Part(NamedTuple):
    """The part of one policy, with arrays in numpy."""

    # {"learner": {name: ...}, "replay": ..., "versions": those of it, by who plays them}
    tree: PyTree
    metadata: Mapping[str, Any]
    progress: Progress  # of the run, as far as this learner knew


def joined(trees: Mapping[str, PyTree]) -> PyTree:
    """Returns the trees of several policies as one, in the form of `SeveralPolicies.save`."""
    parts = next(iter(trees.values()))["learner"]
    whole = {
        "learner": {
            part: {name: t["learner"][part] for name, t in trees.items()} for part in parts
        },
        "replay": {name: t["replay"] for name, t in trees.items()},
    }
    versions = {name: v for t in trees.values() for name, v in t["versions"].items()}
    if versions:
        whole["policies"] = {n: {"inferencer": {"versions": v}} for n, v in versions.items()}
    return whole


def part_of(tree: PyTree, policy: str) -> PyTree:
    """Returns the tree of one policy, of what `joined` returned for it alone."""
    versions = {n: t["inferencer"]["versions"] for n, t in tree.get("policies", {}).items()}
    learner = {part: by_policy[policy] for part, by_policy in tree["learner"].items()}
    return {"learner": learner, "replay": tree["replay"][policy], "versions": versions}


class PartFiles:
    """The files through which the learners of one run pass parts."""

    def __init__(self, directory: RunDir) -> None:
        """Reads nothing yet."""
        self._folder = directory.parts

    def remove(self, policy: str) -> None:
        """Removes the parts of a policy, such as those of a command that was killed."""
        for path in self._folder.glob(f"{policy}-*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have parts there, or there is no folder
            self._folder.rmdir()

    def write(self, policy: str, number: int, part: Part) -> None:
        """Writes a part; a reader sees all of it or nothing.

        Raises:
          OSError: the file system refuses it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(policy, number)
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                found = (jax.device_get(part.tree), dict(part.metadata), part.progress)
                pickle.dump(found, file, protocol=5)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise type(error)(
                error.errno, f"{path} could not be written: {error.strerror}. Free space there (df)"
            ) from error

    def take(self, policy: str, number: int) -> Part | None:
        """Reads and removes a part; None if it is not there yet."""
        path = self._path(policy, number)
        try:
            with open(path, "rb") as file:
                part = pickle.load(file)
        except FileNotFoundError:
            return None
        self.remove(policy)
        return Part(*part)

    def _path(self, policy: str, number: int) -> Path:
        return self._folder / f"{policy}-{number}"
