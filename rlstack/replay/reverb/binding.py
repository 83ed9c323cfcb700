"""Reverb's C++ binding, loaded without TensorFlow's Python package.

``import reverb`` imports TensorFlow, only to describe signatures. This takes 5 CPU seconds and 320
MB in every process. The binding itself needs only one of TensorFlow's shared libraries. It is
loaded under its own name, ``reverb.libpybind``, so that a later ``import reverb`` in the same
process still works and shares it. This relies on private names of dm-reverb 0.7.3, which
pyproject.toml pins. No other module imports Reverb.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

_NAME = "reverb.libpybind"
_NEEDED = (
    "Client",
    "ConstantChunkerOptions",
    "FifoSelector",
    "PrioritizedSelector",
    "RateLimiter",
    "Server",
    "Table",
    "UniformSelector",
    "create_default_checkpointer",
)
_lock = threading.Lock()

RawItem = list[Any]  # an item as Reverb's sampler returns it; some of its fields:
KEY, PROBABILITY, TABLE_SIZE, DATA = 0, 1, 2, 4


class Sampler(Protocol):
    """A stream of sampled items."""

    GetNextTrajectory: Callable[[], RawItem]  # blocks until an item is available
    Close: Callable[[], None]  # makes a blocked call raise


class TrajectoryWriter(Protocol):
    """A stream of steps, and of items that refer to them."""

    ConfigureChunker: Callable[[int, object], None]  # a column's own chunking
    Append: Callable[[list[np.ndarray | None]], list[object]]  # a step; returns its references
    CreateItem: Callable[[str, float, list[list[object]], list[bool]], None]
    Flush: Callable[[int, int], None]  # number of items that may stay unsent, milliseconds to wait
    Close: Callable[[], None]


class Client(Protocol):
    """A connection to a server."""

    NewSampler: Callable[[str, int, int], Sampler]  # table, items in total (-1: no limit), prefetch
    NewTrajectoryWriter: Callable[[object, int], TrajectoryWriter]  # chunking, milliseconds
    MutatePriorities: Callable[[str, list[tuple[int, float]], list[int]], None]
    ServerInfo: Callable[[int], list[bytes]]  # a serialised message for each table
    Checkpoint: Callable[[], str]


class Server(Protocol):
    """A server in this process."""

    Stop: Callable[[], None]


def available() -> bool:
    """Whether Reverb is installed; does not import it."""
    return importlib.util.find_spec("reverb") is not None


def load() -> ModuleType:
    """Returns Reverb's C++ binding as a module. The first call takes a third of a second.

    Raises:
      ImportError: Reverb is not installed, or lacks a name that this package uses.
    """
    with _lock:
        module = sys.modules.get(_NAME)
        if module is None:
            module = _load()
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            raise ImportError(
                f"rlstack.replay: dm-reverb must be version 0.7.3; the installed one lacks "
                f"{', '.join(missing)}. Install the pinned version."
            )
        return module


def _load() -> ModuleType:
    if not available():
        raise ImportError(
            "rlstack.replay: ReverbReplayBuffer needs dm-reverb, which is not installed (it has "
            f"wheels for CPython 3.8 to 3.10; this is {sys.version.split()[0]}). Use CPython 3.10, "
            "or the replay in this process or in shared memory."
        )
    _load_libpython()
    # ctypes loads with RTLD_LOCAL. Global symbols would clash with the binding's own copies.
    ctypes.CDLL(str(_folder("tensorflow") / "libtensorflow_framework.so.2"))
    path = _folder("reverb") / "libpybind.so"
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _folder(package: str) -> Path:
    """Returns the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"rlstack.replay: {package} is not installed.")
    return Path(spec.submodule_search_locations[0])


def _load_libpython() -> None:
    """Loads the shared libpython that the binding links to, for interpreters built without it."""
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")):
        if folder and (Path(folder) / name).exists():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(folder) / name))
                return
