"""The arrays of a checkpoint on disk: written and read by Orbax, each with a digest.

A digest is the CRC-32 of an array's dtype, shape and bytes. It finds every single flipped bit and
every burst of up to 32, and misses other damage once in 2**32. `zlib.crc32` is several times faster
than `hashlib.blake2b`, whose protection against forgery is no use here: whoever can change the
arrays can change their digests too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def digest(array: np.ndarray) -> str:
    """Returns the digest of an array, eight hexadecimal digits."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    begin = zlib.crc32(f"{array.dtype.name}{list(array.shape)}".encode())
    if not array.size:
        return f"{begin:08x}"
    # As bytes, without a copy of arrays in C order.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return f"{zlib.crc32(flat, begin):08x}"


def write(folder: Path, arrays: dict[int, np.ndarray]) -> None:
    """Writes arrays, each under its number."""
    with _orbax() as ocp:
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        checkpointer.save(
            folder, args=ocp.args.PyTreeSave({str(i): array for i, array in arrays.items()})
        )
        checkpointer.close()
    _return_free_memory()


def read(folder: Path, numbers: list[int]) -> dict[int, np.ndarray]:
    """Returns the arrays of these numbers; raises whatever Orbax raises."""
    if not numbers:
        return {}
    with _orbax() as ocp:
        how = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in numbers}
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        found = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                dict.fromkeys(how, 0), restore_args=how, partial_restore=True
            ),
        )
        checkpointer.close()
    return {i: np.asarray(found[str(i)]) for i in numbers}


def _return_free_memory() -> None:
    """Returns free memory to the system.

    Orbax writes with threads of its own, and the allocator of glibc keeps what they freed: 30 MB
    after some hundred checkpoints. Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Yields ``orbax.checkpoint`` without its warnings, log lines and late tracebacks.

    The import takes a second, so it happens here.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import orbax.checkpoint as ocp

        logger.setLevel(logging.CRITICAL)
        shown = sys.unraisablehook
        sys.unraisablehook = functools.partial(_unless_late, shown)
        try:
            yield ocp
            sys.unraisablehook = shown  # not after an error: the late tracebacks follow it
        finally:
            logger.setLevel(level)


def _unless_late(
    shown: Callable[[sys.UnraisableHookArgs], Any], error: sys.UnraisableHookArgs
) -> None:
    """Shows an error of a background thread, except the error of a late writer.

    When one array cannot be written, Orbax closes its event loop while the writers of other arrays
    still use it. Each of their threads then prints a traceback between other output.
    """
    if str(error.exc_value) != "Event loop is closed":
        shown(error)
