"""Reverb's C++ binding, without the Python half of TensorFlow.

``import reverb`` imports TensorFlow, which takes 5 CPU seconds and 320 MB in every process, only to
describe signatures. The binding itself needs no more than one of TensorFlow's shared libraries. It
is loaded under its own name, ``reverb.libpybind``, so that a later ``import reverb`` in the same
process still works and shares it. All this leans on private names of dm-reverb 0.7.3: where
something is missing, the whole package is imported instead. Only here is Reverb imported at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

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


def available() -> bool:
    """Whether Reverb is installed; imports nothing."""
    return importlib.util.find_spec("reverb") is not None


def load() -> Any:
    """Returns Reverb's C++ binding as a module; the first call takes a third of a second.

    Raises:
      ImportError: Reverb is not installed, or has not the parts that are used here.
    """
    with _lock:
        module = sys.modules.get(_NAME)
        if module is None:
            module = _load()
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            raise ImportError(
                f"rlstack.replay: dm-reverb 0.7.3 is needed; the one installed lacks "
                f"{', '.join(missing)}. Install the pinned version."
            )
        return module


def _load() -> Any:
    if not available():
        raise ImportError(
            "rlstack.replay: ReverbReplayBuffer needs dm-reverb, which is not installed (it has "
            f"wheels for CPython 3.8 to 3.10; this is {sys.version.split()[0]}). Use the reference "
            "lane, or the in-process or shared-memory replay."
        )
    try:
        return _binding()
    except Exception:  # whatever is not where 0.7.3 has it
        sys.modules.pop(_NAME, None)
    _load_libpython()
    with contextlib.suppress(Exception):
        return _binding()
    sys.modules.pop(_NAME, None)
    importlib.import_module("reverb")
    return sys.modules[_NAME]


def _binding() -> Any:
    """Loads the binding and the shared library it needs, and nothing else."""
    # Global symbols would clash with those that the binding brings along: RTLD_LOCAL, the default.
    ctypes.CDLL(str(_folder("tensorflow") / "libtensorflow_framework.so.2"))
    path = _folder("reverb") / "libpybind.so"
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _folder(package: str) -> Path:
    """Where a package lies, without running it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"rlstack.replay: {package} is not installed.")
    return Path(spec.submodule_search_locations[0])


def _load_libpython() -> None:
    """Loads the shared libpython, which the binding is linked to, for interpreters without it."""
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")):
        if folder and (Path(folder) / name).exists():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(folder) / name))
                return
