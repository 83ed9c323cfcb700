"""The learner's node of a run that learns from a dataset before actors act."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.recorded import make_windows
from rlstack.programs.program.base import RUNNING
from rlstack.programs.program.learner import LearnerNode
from rlstack.storage.datasets import Dataset, located
from rlstack.types import PyTree


class OfflineFirstLearnerNode(LearnerNode):
    """A `LearnerNode` that first makes ``offline_updates`` from ``data``.

    It counts the steps that it learns from as frames. Actors wait until the coordinator has heard
    of the last of these updates, see `ProgramState.learns_from_data`.
    """

    def _restore(self) -> None:
        experiment, spec = self._setup.experiment, self._setup.spec
        dataset, agent = Dataset(located(experiment.data)), make_agent(experiment, spec)
        self._windows = make_windows(experiment, dataset, spec, agent)
        super()._restore()

    def _learn(self) -> None:
        self._learn_from_data()
        super()._learn()

    def _learn_in_lock_step(self) -> None:
        self._learn_from_data()
        super()._learn_in_lock_step()

    def _learn_from_data(self) -> None:
        experiment, frames = self._setup.experiment, 0
        cfg = experiment.replay
        while self._learner.version < experiment.offline_updates:
            state = self._poll()
            if state.phase != RUNNING or self._has_learned_enough():
                return
            self._save_if_due(state)
            self._update(self._windows.sample())
            frames += cfg.batch_size * cfg.unroll_length
            self._program.count(env_frames=frames)

    def _tree(self) -> tuple[PyTree, Mapping[str, Any]]:
        tree, metadata = super()._tree()
        return tree | {"windows": self._windows.save()}, metadata

    def _read(self, path: Path, target: PyTree) -> Any:
        saved = super()._read(path, target | {"windows": self._windows.save()})
        self._windows.load(saved["windows"])
        return saved

    def _gauges(self) -> dict[str, Any]:
        of_data = {f"dataset/{name}": value for name, value in self._windows.stats().items()}
        return super()._gauges() | of_data
