"""Records an actor's steps as a dataset: whole episodes, and a complete dataset or none."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.envs.nest import Nest
from rlstack.envs.values import own
from rlstack.storage.datasets import header as headers
from rlstack.storage.datasets.header import DatasetError, Header, Shard
from rlstack.storage.datasets.shards import crc32_of
from rlstack.types import EnvSpec, StepType, Transition

_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)
_Row = tuple[np.ndarray, ...]


class DatasetWriteError(OSError):
    """The file system refused a dataset; all its files are removed."""


class DatasetWriter:
    """Receives an Actor's steps instead of a replay, and writes them to a dataset.

    Episodes are recorded from their first step to their last. After the wanted number of frames, no
    recorded episode begins, and all episodes in progress are played to the end: stopping
    immediately would favour short episodes. So the dataset has some more frames, about half an
    episode per environment. Use it as a context manager: without `finish`, all its files are
    removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: EnvSpec,
        num_envs: int,
        frames: int,
        *,
        env: Mapping[str, Any],
        source: Mapping[str, Any],
        shard_bytes: int = 64 * 2**20,
    ) -> None:
        """Prepares to write.

        Args:
          path: the dataset's directory, new or empty.
          spec: the spec of one environment.
          num_envs: number of environments; ids are in ``[0, num_envs)``.
          frames: smallest number of environment steps to record.
          env: name, type and options of the environments, for the header.
          source: the agent that plays, for the header.
          shard_bytes: size of a file in bytes; twice this is held in memory.

        Raises:
          DatasetError: the directory exists and is not empty.
          DatasetWriteError: the directory cannot be created.
          ValueError: frames is not positive.
        """
        if frames < 1:
            raise ValueError(f"DatasetWriter: frames must be at least 1; got {frames}.")
        self._path = Path(path).absolute()
        self._spec, self._wanted, self._shard_bytes = spec, frames, shard_bytes
        self._env, self._source = env, source
        self._columns = headers.columns(spec)
        self._nests = Nest(spec.observation), Nest(spec.action), Nest(spec.extras)
        self._bounds = [_bounds(leaf) for leaf in self._nests[1].leaves]
        self._open: list[list[_Row] | None] = [None] * num_envs
        self._ended: list[list[_Row]] = []  # ended episodes of the shard that is not full yet
        self._ended_bytes = 0
        self._shards: list[Shard] = []
        self._returns: list[float] = []
        self._frames = 0  # frames of recorded episodes, including episodes in progress
        self._partial = self._path.with_name(f".partial-{self._path.name}-{os.getpid()}")
        _check_free(self._path)
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def extend(self, frames: int) -> None:
        """Records this number of frames more, for example with other params."""
        self._wanted += frames

    @property
    def done(self) -> bool:
        """Whether enough frames are recorded and no recorded episode is in progress."""
        return self._frames >= self._wanted and all(rows is None for rows in self._open)

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        """Receives one step of some environments; the Actor calls it.

        Args:
          env_ids: [n] ints; None for all environments in order.
          transition: leaves ``[n, ...]``.

        Raises:
          DatasetWriteError: a full shard could not be written.
        """
        timestep = transition.timestep
        step_type = np.asarray(timestep.step_type)
        leaves = [
            *(timestep.step_type, timestep.reward, timestep.discount),
            *self._nests[0].flatten(timestep.observation, "DatasetWriter: observation"),
            *self._actions(transition.agent_output.action),
            *self._nests[2].flatten(timestep.extras, "DatasetWriter: extras"),
        ]
        ids = range(len(step_type)) if env_ids is None else env_ids.tolist()
        for i, env_id in enumerate(ids):
            self._add_row(env_id, int(step_type[i]), tuple(np.array(x[i]) for x in leaves))
        if self._ended_bytes >= self._shard_bytes:
            self._write_shard()

    def finish(self) -> Header:
        """Writes the remaining episodes and renames the dataset; drops episodes in progress.

        Raises:
          DatasetError: no episode has ended, or another writer has used the path in the meantime.
          DatasetWriteError: the file system refuses the write.
        """
        self._write_shard()
        if not self._shards:
            raise DatasetError(
                "DatasetWriter.finish: an episode at least must have ended; none has. "
                "Record more frames."
            )
        header = self._header()
        try:
            _write_text(self._partial / headers.NAME, headers.encode(header))
            _sync(self._partial)
        except OSError as error:
            raise self._refused(error) from error
        _check_free(self._path)
        try:
            os.replace(self._partial, self._path)  # also replaces an empty directory
            _sync(self._path.parent)
        except OSError as error:
            raise self._refused(error) from error
        return header

    def _actions(self, action: Any) -> list[np.ndarray]:
        leaves = self._nests[1].flatten(action, "DatasetWriter: action")
        return [
            leaf if bounds is None else np.clip(leaf, *bounds)
            for leaf, bounds in zip(leaves, self._bounds, strict=True)
        ]

    def _add_row(self, env_id: int, step_type: int, row: _Row) -> None:
        rows = self._open[env_id]
        if step_type == _FIRST:
            if rows:  # the environment was restarted in mid-episode: drop the episode
                self._frames -= len(rows) - 1
            rows = self._open[env_id] = [] if self._frames < self._wanted else None
        if rows is None:
            return
        rows.append(row)
        self._frames += step_type != _FIRST
        if step_type == _LAST:
            self._open[env_id] = None
            self._ended.append(rows)
            self._ended_bytes += len(rows) * sum(x.nbytes for x in row)
            self._returns.append(float(sum(row[1] for row in rows)))

    def _write_shard(self) -> None:
        if not self._ended:
            return
        rows = [row for episode in self._ended for row in episode]
        arrays: dict[str, Any] = {
            name: own(np.stack([row[i] for row in rows]).astype(leaf.dtype, copy=False), leaf)
            for i, (name, leaf) in enumerate(self._columns.items())
        }
        headers.check_values(arrays, self._columns, f"DatasetWriter: {self._path}")
        # Pack in memory: on a full disk, zipfile would raise a second error later.
        packed = io.BytesIO()
        np.savez(packed, **arrays)
        name = f"shard-{len(self._shards):05}.npz"
        shard = Shard(name, len(rows), len(self._ended), crc32_of(packed))
        try:
            with open(self._partial / shard.file, "wb") as file:
                file.write(packed.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._refused(error) from error
        self._shards.append(shard)
        self._ended, self._ended_bytes = [], 0

    def _header(self) -> Header:
        steps = sum(shard.steps for shard in self._shards)
        episodes = sum(shard.episodes for shard in self._shards)
        return Header(
            env=self._env,
            spec=self._spec,
            frames=steps - episodes,
            steps=steps,
            episodes=episodes,
            return_mean=float(np.mean(self._returns)),
            return_std=float(np.std(self._returns)),
            shards=tuple(self._shards),
            source=self._source,
        )

    def _refused(self, error: OSError) -> DatasetWriteError:
        return DatasetWriteError(
            f"DatasetWriter: could not write the dataset {self._path}: "
            f"{error.strerror or error}. Nothing of it is kept. Free space there (df) or make it "
            "writable, or choose another place with --out."
        )


def _bounds(spec: specs.Array) -> tuple[Any, Any] | None:
    """Returns the bounds to which actions of real numbers are clipped, as in pools."""
    if isinstance(spec, specs.BoundedArray) and np.issubdtype(spec.dtype, np.floating):
        return spec.minimum, spec.maximum
    return None


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DatasetError(
            f"DatasetWriter: {path} must be new or empty, since no dataset is overwritten; it is "
            "not. Choose another place with --out, or remove it."
        )


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
