"""The arrays of a checkpoint on disk: written and read by Orbax, each with a digest.

Of several processes that are joined by ``jax.distributed``, each writes checkpoints of its own.
Orbax writes numpy's arrays in the first process only; the others write them as plain files.

A digest is the CRC-32 of an array's dtype, shape and bytes. It finds every single flipped bit and
every burst of up to 32, and misses other damage once in 2**32. `zlib.crc32` is several times faster
than `hashlib.blake2b`, whose protection against forgery is no use here: whoever can change the
arrays can change their digests too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.storage import allocator

_PLAIN = "arrays.json"  # describes arrays that are plain files


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


def load_libraries() -> None:
    """Imports Orbax."""
    with _orbax():
        pass


def write(folder: Path, arrays: dict[int, np.ndarray]) -> None:
    """Writes arrays, each under its number."""
    if jax.process_index():
        return _write_plain(folder, arrays)
    with _orbax() as ocp:
        checkpointer = _checkpointer(ocp)
        checkpointer.save(
            folder, args=ocp.args.PyTreeSave({str(i): array for i, array in arrays.items()})
        )
        checkpointer.close()
    return allocator.return_free_memory()


def read(folder: Path, numbers: list[int]) -> dict[int, np.ndarray]:
    """Returns the arrays of these numbers; raises whatever Orbax raises."""
    if not numbers:
        return {}
    if (folder / _PLAIN).exists():
        return _read_plain(folder, numbers)
    with _orbax() as ocp:
        how = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in numbers}
        checkpointer = _checkpointer(ocp)
        found = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                dict.fromkeys(how, 0), restore_args=how, partial_restore=True
            ),
        )
        checkpointer.close()
    return {i: np.asarray(found[str(i)]) for i in numbers}


def _checkpointer(ocp: Any) -> Any:
    """Returns a checkpointer of this process alone; Orbax would wait for all that are joined."""
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _write_plain(folder: Path, arrays: dict[int, np.ndarray]) -> None:
    folder.mkdir()
    for number, array in arrays.items():
        array.tofile(folder / f"{number}.bin")
    described = {str(i): [array.dtype.name, array.shape] for i, array in arrays.items()}
    (folder / _PLAIN).write_text(json.dumps(described))


def _read_plain(folder: Path, numbers: list[int]) -> dict[int, np.ndarray]:
    described = json.loads((folder / _PLAIN).read_text())
    found = {}
    for number in numbers:
        name, shape = described[str(number)]
        dtype = jnp.dtype(name)  # numpy itself does not know bfloat16
        found[number] = np.fromfile(folder / f"{number}.bin", dtype).reshape(shape)
    return found


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
