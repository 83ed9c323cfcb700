"""The XLA flags that suit a run's networks; they count only before JAX's first computation."""

from __future__ import annotations

import importlib.metadata
import os

LEGACY_CPU_RUNTIME = "--xla_cpu_use_thunk_runtime=false"


def prefer_small_networks() -> None:
    """Chooses XLA's older CPU runtime where this jaxlib still has it.

    It runs small dense networks about twice as fast, acting and learning. Convolutions lose by it.
    A flag that the user has set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_use_thunk_runtime" in flags or not _has_legacy_cpu_runtime():
        return
    os.environ["XLA_FLAGS"] = f"{flags} {LEGACY_CPU_RUNTIME}".strip()


def _has_legacy_cpu_runtime() -> bool:
    # An unknown flag aborts the process, so only versions known to have it are named here.
    major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) == (0, 5)
