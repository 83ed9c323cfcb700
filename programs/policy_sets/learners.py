"""The learners of several policies, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlstack.types import Params, PyTree


class Learner(Protocol):
    """What has learned one policy, such as a `rlstack.learning.learner.Learner`."""

    version: int  # number of updates
    params: Params

    def save(self) -> PyTree:
        """Returns params, learner state and version, by these names."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""


class Learners:
    """Learners by the name of their policies, with the attributes of a `Learner` that runs read.

    What a `Learner` saves under a name, this saves as a dict of all policies. So the params of a
    policy are at ``["learner"]["params"][policy]`` of a checkpoint.
    """

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self.by_name = dict(learners)

    @property
    def version(self) -> int:
        """The number of updates that every learner has made."""
        return min(learner.version for learner in self.by_name.values())

    @property
    def params(self) -> dict[str, Params]:
        """The newest params of each policy."""
        return {name: learner.params for name, learner in self.by_name.items()}

    def save(self) -> PyTree:
        """Returns what each learner saves, by its parts and then by policy."""
        saved = {name: learner.save() for name, learner in self.by_name.items()}
        parts = next(iter(saved.values()))
        return {part: {name: tree[part] for name, tree in saved.items()} for part in parts}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        for name, learner in self.by_name.items():
            learner.load({part: by_name[name] for part, by_name in saved.items()})
