"""How XLA is to run on the CPU; it counts only before JAX computes for the first time."""

from __future__ import annotations

import importlib.metadata
import os

import jax

LEGACY_CPU_RUNTIME = "--xla_cpu_use_thunk_runtime=false"
SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false"
POOL_SIZE = "PJRT_NPROC"  # threads of a CPU client; all cores by default


def configure(*, convolutions: bool, single_thread: bool = False) -> None:
    """Suits XLA's CPU client to acting and learning in turn; other platforms are not touched.

    Computations run in the thread that asks for them. Handing them to another thread, as JAX does
    by default, costs two switches a call, more than acting on a small network itself, and gains
    nothing where each answer is waited for.

    Without convolutions, XLA's older CPU runtime is chosen where this jaxlib still has it: it runs
    small dense networks about twice as fast; in one thread, since it hands matrix products and
    fusions of some shapes to others at a cost above their own (SAC on Pendulum learns 1.3 times as
    fast without) and gains next to nothing from them up to layers of 1024 and batches of 256. What
    the user has set stays.

    Args:
      convolutions: whether the network has any.
      single_thread: whether one computation is to use one core, because there are other processes
        for the other cores.
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
    # An unknown flag aborts the process, so only versions known to have it are named here.
    major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) == (0, 5)
