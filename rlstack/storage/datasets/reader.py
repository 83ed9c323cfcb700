"""Reads a dataset: its header, and any of its steps, from files mapped into memory."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.envs.nest import Nest
from rlstack.storage.datasets import header as headers
from rlstack.storage.datasets.header import DatasetError, Header
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep


class Dataset:
    """The steps of a dataset as one long stream of whole episodes.

    Attributes:
      path: the directory.
      header: the description of the dataset.
      fingerprint: a number that differs between recordings.
      step_type: the step types of all steps, ``[steps]`` int32.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a dataset.

        Raises:
          DatasetError: there is no dataset, or one of its files is missing or damaged.
        """
        self.path = Path(path).absolute()
        self.header, self.fingerprint = _read_header(self.path)
        self._columns = headers.columns(self.header.spec)
        self._shards = [self._open(shard.file, shard.steps) for shard in self.header.shards]
        self._ends = np.cumsum([shard.steps for shard in self.header.shards])
        self.step_type = np.concatenate([shard["step_type"] for shard in self._shards])
        whole = self.step_type[0] == StepType.FIRST and self.step_type[-1] == StepType.LAST
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
          (timestep, action), with leaves ``[..., *shape]``, which are new arrays.
        """
        spec = self.header.spec if like is None else like
        found = {name: self._gather(name, steps) for name in self._columns}
        parts = [
            Nest(tree).unflatten([found[f"{name}{path}"] for path in Nest(tree).paths])
            for name, tree in spec._asdict().items()
        ]
        timestep = TimeStep(found["step_type"], found["reward"], found["discount"], parts[0])
        return timestep, parts[1]

    def _gather(self, name: str, steps: np.ndarray) -> np.ndarray:
        if len(self._shards) == 1:
            return self._shards[0][name][steps]
        spec = self._columns[name]
        found = np.empty((*steps.shape, *spec.shape), spec.dtype)
        shard_of = np.searchsorted(self._ends, steps, side="right")
        for i in np.unique(shard_of):
            inside = shard_of == i
            begin = self._ends[i] - self.header.shards[i].steps
            found[inside] = self._shards[i][name][steps[inside] - begin]
        return found

    def _open(self, file: str, steps: int) -> dict[str, np.ndarray]:
        """Maps a shard's columns and checks that they match the header."""
        path = self.path / file
        try:
            arrays = _mapped(path)
        except (OSError, ValueError, zipfile.BadZipFile, struct.error, EOFError) as error:
            raise DatasetError(
                f"Dataset: {path} must be a readable shard; {error}. Copy the dataset again, or "
                "record it again."
            ) from error
        for name, spec in self._columns.items():
            wanted = (steps, *spec.shape), np.dtype(spec.dtype)
            held = (arrays[name].shape, arrays[name].dtype) if name in arrays else None
            if held != wanted:
                raise DatasetError(
                    f"Dataset: {name} of {path} must be {wanted[1]}{list(wanted[0])}, as the "
                    f"header says; got {f'{held[1]}{list(held[0])}' if held else 'nothing'}. "
                    "Record it again."
                )
        return arrays


def _read_header(path: Path) -> tuple[Header, int]:
    file = path / headers.NAME
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"Dataset: {path} must be a dataset; {headers.NAME} there cannot be read "
            f"({getattr(error, 'strerror', None) or error}). Make one with rlstack record RUN_DIR."
        ) from error
    return headers.decode(text, file), zlib.crc32(text.encode())


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file, mapped into memory if they are not compressed."""
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type != zipfile.ZIP_STORED:
                with archive.open(info) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                continue
            # A member begins with a header of 30 bytes, its name and an extra field. The header
            # ends with the lengths of these two.
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            file.seek(name_length + extra_length, os.SEEK_CUR)
            arrays[name] = _mapped_array(file)
    return arrays


def _mapped_array(file: Any) -> np.ndarray:
    """Maps the .npy file that begins at the position of an open file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if 0 in shape:  # there is nothing to map
        return np.zeros(shape, dtype)
    order = "F" if fortran else "C"
    # Convert to a plain array, because indexing a memmap instance is slower.
    return np.asarray(
        np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)  # type: ignore[call-overload]
    )
