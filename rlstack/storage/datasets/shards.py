"""Maps the columns of a shard into memory, after checking everything that the file says.

A dataset may come from anywhere. So nothing is mapped or allocated before its dtype, shape and
place in the file are known to be those that the header promises.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from dm_env import specs

from rlstack.storage.datasets.header import DatasetError, Shard

# A compressed column is read as a whole, and may be a thousand times as large as its file.
_MOST_COMPRESSED = 4 << 30


def open_shard(
    directory: Path, shard: Shard, columns: Mapping[str, specs.Array]
) -> dict[str, np.ndarray]:
    """Returns the columns of a shard by name; those that are not compressed are mapped.

    Args:
      directory: the directory of the dataset.
      shard: the shard, as the header describes it.
      columns: column name -> the spec of one step, as the header describes it.

    Raises:
      DatasetError: the file is missing or damaged, or is not as the header says.
    """
    path = directory / shard.file
    try:
        if path.resolve().parent != directory.resolve():
            raise ValueError("a shard must be a file in the directory of its dataset")
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("a shard must be a plain file")
        _check_crc(path, shard)
        return _map_columns(path, shard.steps, columns)
    except DatasetError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds, for a text that is not theirs
        raise DatasetError(
            f"Dataset: {path} must be a readable shard; {error}. Copy the dataset again, or "
            "record it again."
        ) from error


def _check_crc(path: Path, shard: Shard) -> None:
    """Checks the columns against their own CRCs and, except in an old dataset, the header's."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            _check_compression(info)
        damaged = archive.testzip()
    if damaged is None and shard.crc32 not in (None, crc32_of(path)):
        damaged = "the columns"
    if damaged is not None:
        raise ValueError(f"{damaged} must have the CRC-32 with which it was written; it differs")


def crc32_of(file: Path | BinaryIO) -> int:
    """Returns a checksum of the names and the CRCs of the columns of a shard.

    It does not depend on their order, nor on whether they are compressed.
    """
    with zipfile.ZipFile(file) as archive:
        found = {info.filename: info.CRC for info in archive.infolist()}
    return zlib.crc32(json.dumps(found, sort_keys=True).encode())


def _check_compression(info: zipfile.ZipInfo) -> None:
    """Refuses kinds of compression by which a small file could take hours and all memory."""
    limit = min(_MOST_COMPRESSED, 1100 * max(info.compress_size, 1000))
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    if info.compress_type not in (stored, deflated) or (
        info.compress_type == deflated and info.file_size > limit
    ):
        raise ValueError(
            f"{info.filename} may be compressed by deflate only, to at most {limit:,} bytes"
        )


def _map_columns(
    path: Path, steps: int, columns: Mapping[str, specs.Array]
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        members = {info.filename: info for info in archive.infolist()}
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for name, spec in columns.items():
            info, wanted = members.get(f"{name}.npy"), ((steps, *spec.shape), np.dtype(spec.dtype))
            if info is None:
                raise _differs(path, name, wanted, None)
            if info.compress_type != zipfile.ZIP_STORED:
                arrays[name] = _unpacked(path, name, archive, info, wanted)
                continue
            # A member begins with a header of 30 bytes, its name and an extra field. The header
            # ends with the lengths of these two.
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            file.seek(name_length + extra_length, os.SEEK_CUR)
            end = min(file.tell() + info.compress_size, size)
            fortran = _check_array(path, name, file, wanted)
            begin, count = file.tell(), _count(wanted)
            if begin + count * wanted[1].itemsize > end:
                raise ValueError(f"{name} must have {count} elements; the file has fewer")
            # A plain array, because indexing a memmap instance is slower.
            flat = (
                np.frombuffer(mapped, wanted[1], count, begin) if count else np.empty(0, wanted[1])
            )
            arrays[name] = flat.reshape(wanted[0], order="F" if fortran else "C")
    return arrays


def _unpacked(
    path: Path, name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, wanted: Any
) -> np.ndarray:
    """Returns a column that is compressed."""
    _check_compression(info)
    if _count(wanted) * wanted[1].itemsize > info.file_size:
        raise ValueError(f"{name} must have {_count(wanted)} elements; the file has fewer")
    with archive.open(info) as member:
        _check_array(path, name, member, wanted)
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _check_array(path: Path, name: str, file: Any, wanted: Any) -> bool:
    """Reads the description of an array in an .npy file; returns whether columns come first.

    Raises:
      DatasetError: the array does not have the wanted (shape, dtype).
    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"{name} must have version 1 or 2 of numpy's format; got {version}")
    if (shape, dtype) != wanted:
        raise _differs(path, name, wanted, (shape, dtype))
    return bool(fortran)


def _differs(path: Path, name: str, wanted: Any, held: Any) -> DatasetError:
    return DatasetError(
        f"Dataset: {name} of {path} must be {wanted[1]}{list(wanted[0])}, as the header says; got "
        f"{f'{held[1]}{list(held[0])}' if held else 'nothing'}. Record it again."
    )


def _count(wanted: Any) -> int:
    """Returns the number of elements; in Python's integers, which do not overflow."""
    count = 1
    for size in wanted[0]:
        count *= size
    return count
