"""Reads a dataset: its header, and any of its steps, from files mapped into memory."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

from rlstack.envs.nest import Nest
from rlstack.envs.values import counted_from_zero, own_spec
from rlstack.storage.datasets import header as headers
from rlstack.storage.datasets.header import DatasetError, Header
from rlstack.storage.datasets.shards import open_shard
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep

_NOTE = "its header has no checksum, so damage of the header would not be noticed"
_MOST_BYTES = 64 << 20  # largest size of a header


class Dataset:
    """The steps of a dataset as one long stream of whole episodes.

    Attributes:
      path: the directory.
      header: the description of the dataset.
      fingerprint: a number that differs between recordings.
      step_type: the step types of all steps, ``[steps]`` int32.
      note: a message for the user about what could not be checked; "" if everything was checked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a dataset and checks its files, which are read once (about a second for each GB).

        Raises:
          DatasetError: there is no dataset, or one of its files is missing or damaged.
        """
        self.path = Path(path).absolute()
        self.header, self.fingerprint = _read_header(self.path)
        self.note = "" if self.header.checked else _NOTE
        self._columns = headers.columns(self.header.spec)
        held = {name: own_spec(spec) for name, spec in self._columns.items()}
        self._shards = [open_shard(self.path, s, held) for s in self.header.shards]
        for shard, columns in zip(self.header.shards, self._shards, strict=True):
            where = f"Dataset: {self.path / shard.file}"
            headers.check_values(columns, self._columns, where)
        self._ends = np.cumsum([shard.steps for shard in self.header.shards])
        self.step_type = np.concatenate([shard["step_type"] for shard in self._shards])
        known = (self.step_type >= StepType.FIRST) & (self.step_type <= StepType.LAST)
        whole = (
            known.all()
            and self.step_type[0] == StepType.FIRST
            and self.step_type[-1] == StepType.LAST
        )
        if not whole or self.header.episodes != np.count_nonzero(self.step_type == StepType.LAST):
            raise DatasetError(
                f"Dataset: {self.path} must hold whole episodes, as many as its header says "
                f"({self.header.episodes}); it does not. Record it again."
            )

    @staticmethod
    def read_header(path: str | os.PathLike[str]) -> Header:
        """Returns a dataset's header, without reading anything else.

        Raises:
          DatasetError: there is no dataset.
        """
        return _read_header(Path(path).absolute())[0]

    def read(self, steps: np.ndarray, like: EnvSpec | None = None) -> tuple[TimeStep, PyTree]:
        """Returns some steps and the actions taken at them.

        Args:
          steps: the steps to read, ints of any shape ``[...]`` in ``[0, header.steps)``.
          like: determines the structure of nested observations and actions. The default is the
              header's spec, in which named tuples are plain tuples.

        Returns:
          (timestep, action), with leaves ``[..., *shape]``, which are new arrays. Discrete values
          count from 0, also those of spaces that start elsewhere, which the files hold.
        """
        spec = self.header.spec if like is None else like
        found = {name: self._gather(name, steps) for name in self._columns}
        parts = [
            Nest(tree).unflatten([found[f"{name}{path}"] for path in Nest(tree).paths])
            for name, tree in spec._asdict().items()
        ]
        observation, action, extras = parts
        numbers = found["step_type"], found["reward"], found["discount"]
        return TimeStep(*numbers, observation, extras), action

    def _gather(self, name: str, steps: np.ndarray) -> np.ndarray:
        spec = self._columns[name]
        if len(self._shards) == 1:
            found = self._shards[0][name][steps]
        else:
            found = np.empty((*steps.shape, *spec.shape), own_spec(spec).dtype)
            shard_of = np.searchsorted(self._ends, steps, side="right")
            for i in np.unique(shard_of):
                inside = shard_of == i
                begin = self._ends[i] - self.header.shards[i].steps
                found[inside] = self._shards[i][name][steps[inside] - begin]
        return counted_from_zero(found, spec).astype(spec.dtype, copy=False)


def _read_header(path: Path) -> tuple[Header, int]:
    file = path / headers.NAME
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError also for text that is not UTF-8
        raise DatasetError(
            f"Dataset: {path} must be a dataset; {headers.NAME} there cannot be read "
            f"({getattr(error, 'strerror', None) or error}). Make one with rlstack record RUN_DIR."
        ) from error
    return headers.decode(text, file), zlib.crc32(text.encode())
