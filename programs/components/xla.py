"""Configures XLA on the CPU; has no effect after JAX's first computation."""

from __future__ import annotations

import importlib.metadata
import os

import jax

LEGACY_CPU_RUNTIME = "--xla_cpu_use_thunk_runtime=false"
SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false"
POOL_SIZE = "PJRT_NPROC"  # threads of a CPU client; all cores by default


def configure(*, convolutions: bool, single_thread: bool = False) -> None:
    """Configures XLA's CPU client for acting and learning; other platforms are not changed.

    Computations run in the calling thread. JAX's default, another thread, costs two switches per
    call. That is more than acting with a small network takes, and the caller gains nothing if it
    waits for each result.

    Without convolutions, XLA's older CPU runtime is used where this jaxlib still has it: it runs
    small dense networks about twice as fast. It then runs in one thread. With more threads, it
    would pass matrix products and fusions of some shapes to other threads. Passing them costs more
    than computing them (SAC on Pendulum learns 1.3 times as fast with one thread), and gains almost
    nothing with layers of up to 1024 units and batches of up to 256. Values that the user has set
    are kept.

    Args:
      convolutions: whether the network has convolutions.
      single_thread: whether a computation uses one core only, because other processes use the
        others.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    older = not convolutions and _has_legacy_runtime()
    if older:
        _add_flag(LEGACY_CPU_RUNTIME)
    if single_thread or older:
        _add_flag(SINGLE_THREAD)
        os.environ.setdefault(POOL_SIZE, os.environ.get("NPROC", "1"))


def _add_flag(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _has_legacy_runtime() -> bool:
    # XLA aborts the process at an unknown flag, so only versions that have the flag get it.
    major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) == (0, 5)
