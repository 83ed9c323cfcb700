"""Draws windows of a dataset in epochs; an offline learner uses this instead of replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import Sample, as_logs
from rlstack.storage.datasets.header import DatasetError, Header, check_specs
from rlstack.storage.datasets.reader import Dataset
from rlstack.types import (
    AgentState,
    Batch,
    EnvSpec,
    Logs,
    PyTree,
    StepType,
    TimeStep,
    Transition,
)


class Windows:
    """Samples of recorded steps: each window once per epoch, in an order given by the seed.

    A window corresponds to an item of replay: ``unroll_length + 1`` consecutive steps. It may
    extend from one episode into the next, because learners do not treat LAST -> FIRST as a
    transition. The config's batch_size, unroll_length, period, context and starts apply, and the
    last window ends with the last step. If an epoch does not fill its last batch, the batch takes
    the rest from the next epoch. Recorded steps have no agent state. Each step has the initial
    state, so a recurrent agent begins every window with its initial state.
    """

    def __init__(
        self,
        dataset: Dataset,
        cfg: ReplayConfig,
        spec: EnvSpec,
        step: Transition,
        initial_state: AgentState,
        seed: int,
    ) -> None:
        """Lists the windows.

        Args:
          dataset: the dataset to draw from.
          cfg: the sizes of windows and batches.
          spec: the spec of the environment that the agent acts in.
          step: the spec of a step that the agent learns from, from
              `rlstack.acting.actor.transition_spec`.
          initial_state: the agent's initial state, ``[batch_size, ...]``.
          seed: the seed of the order.

        Raises:
          DatasetError: the dataset is of another environment, is shorter than a window, or lacks
              data that the agent learns from.
          ValueError: the sampler is prioritized.
        """
        check_steps(dataset.header, spec, step, f"Windows of {dataset.path}")
        self._check(cfg)
        self._dataset, self._cfg, self._spec = dataset, cfg, spec
        self._output: Any = type(step.agent_output)
        steps = cfg.unroll_length + 1
        self._state = jax.tree.map(
            lambda x: np.broadcast_to(x, (steps, *np.shape(x))), initial_state
        )
        self._starts = window_starts(dataset, cfg)
        self._seed = seed
        self._drawn = 0  # number of windows drawn, which gives the epoch and the position
        self._orders: dict[int, np.ndarray] = {}

    @staticmethod
    def _check(cfg: ReplayConfig) -> None:
        if cfg.needs_table:
            raise ValueError(
                "Windows: a dataset is drawn in epochs and as it is, which no option can change; "
                f"got replay.{cfg.needs_table}. Leave it out with --data."
            )
        if cfg.sampler == "prioritized":
            raise ValueError(
                "Windows: a dataset is drawn in epochs, without priorities; got replay.sampler "
                "prioritized. Use --replay.sampler uniform."
            )

    @property
    def num_windows(self) -> int:
        """Number of windows in an epoch."""
        return len(self._starts)

    def sample(self) -> Sample:
        """Returns the next batch, in new arrays."""
        numbers = self._drawn + np.arange(self._cfg.batch_size)
        epochs, places = np.divmod(numbers, self.num_windows)
        which = np.concatenate(
            [self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        )
        self._drawn += self._cfg.batch_size
        steps = self._starts[which] + np.arange(self._cfg.unroll_length + 1)[:, None]
        timestep, action = self._dataset.read(steps, self._spec)
        return Sample(self._batch(timestep, action), which.astype(np.uint64))

    def _batch(self, timestep: TimeStep, action: PyTree) -> Batch:
        version = np.zeros(timestep.step_type.shape, np.int32)
        trajectory = Transition(timestep, self._output(action), self._state, version)
        return Batch(trajectory, np.ones(self._cfg.batch_size, np.float32))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Does nothing: an epoch has no priorities."""

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Does nothing: recorded steps stay as they are."""

    def set_params_version(self, version: int) -> None:
        """Does nothing: recorded steps have no params version."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until told to stop."""
        while stop is None or not stop():
            yield self.sample()

    def stats(self) -> Logs:
        """Returns the number of epochs so far, and the number of windows."""
        return as_logs(epochs=self._drawn / self.num_windows, windows=self.num_windows)

    def save(self) -> PyTree:
        """Returns the position in the dataset, and the dataset's fingerprint."""
        return {
            "drawn": np.int64(self._drawn),
            "num_windows": np.int64(self.num_windows),
            "fingerprint": np.int64(self._dataset.fingerprint),
        }

    def load(self, saved: PyTree) -> None:
        """Continues from the position where `save` was called.

        Raises:
          DatasetError: the dataset or its windows differ from the saved ones.
        """
        for name, value in self.save().items():
            if name != "drawn" and int(saved[name]) != int(value):
                raise DatasetError(
                    f"Windows.load: {self._dataset.path} must be the dataset that the run began "
                    f"with, cut into the same windows; its {name} was {int(saved[name])} and is "
                    f"{int(value)}. Put the old one back, or start a new run."
                )
        self._drawn = int(saved["drawn"])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a batch spans at most two epochs
                del self._orders[min(self._orders)]
            rng = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = rng.permutation(self.num_windows)
        return self._orders[epoch]


def check_steps(header: Header, spec: EnvSpec, step: Transition, where: str) -> None:
    """Checks that an agent can learn from the steps of a dataset.

    Args:
      header: the description of the dataset.
      spec: the spec of the environment that the agent acts in.
      step: the spec of a step that the agent learns from, from
        `rlstack.acting.actor.transition_spec`.
      where: the beginning of the error message.

    Raises:
      DatasetError: the dataset is of another environment, or lacks data that the agent learns from.
    """
    check_specs(header.spec, spec, where)
    output = type(step.agent_output)
    if output._fields != ("action",):
        raise DatasetError(
            f"{where}: recorded steps hold actions alone, but {output.__name__} needs "
            f"{', '.join(output._fields)}. Learn with an agent that takes anybody's actions, "
            "such as bc, dqn or sac."
        )


def window_starts(dataset: Dataset, cfg: ReplayConfig) -> np.ndarray:
    """Returns the first step of every window of a dataset, int64 ``[windows]``.

    Raises:
      DatasetError: the dataset is shorter than a window, or has no window that may be drawn.
    """
    step_type = dataset.step_type
    final = len(step_type) - 1 - cfg.unroll_length
    starts = np.append(np.arange(0, final, cfg.step_period), max(final, 0)).astype(np.int64)
    if cfg.starts == "not_last":
        starts = starts[step_type[starts + cfg.context] != StepType.LAST]
    if final < 0 or not len(starts):
        raise DatasetError(
            f"Windows: {dataset.path} must hold a window of unroll_length + 1 "
            f"({cfg.unroll_length + 1}) steps; it has {dataset.header.steps} steps. Lower "
            "--replay.unroll-length, or record more."
        )
    return starts
