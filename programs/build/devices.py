"""Which devices learn and which act: the check of their indices, and the choice for each node."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import jax

from rlstack import devices
from rlstack.programs.config.experiment import Experiment
from rlstack.replay.memory import available_memory

_COUNT = "import jax; d = jax.local_devices(); print(len(d), d[0].platform)"
_FREE = (
    "import jax; s = jax.local_devices()[{}].memory_stats() or dict(); "
    "print(s['bytes_limit'] - s['bytes_in_use'] if 'bytes_limit' in s else -1)"
)
MOST_ACTING = 2  # threads that act on a GPU before CUDA graphs, or several threads, cost too much
_PATIENCE = 120.0  # seconds until JAX must have found its devices


def check_devices(experiment: Experiment) -> str:
    """Checks that the devices that the config names exist; does nothing if it names none.

    On several hosts, these may differ, and each node checks its own.

    Returns:
      What learns and acts where, for ``--dry-run``.

    Raises:
      ValueError: a device does not exist, or actors cannot share a thread that acts.
    """
    acting_of(experiment)
    named = _named(experiment)
    if not any(named.values()):
        return "JAX's default device"
    text = ", ".join(f"{field} {' '.join(map(str, at))}" for field, at in named.items() if at)
    if experiment.program.on_several_hosts and not experiment.in_one_process:
        return f"{text} (of each host)"
    count, platform = _count()
    for field, indices in named.items():
        devices.check(indices, count, f"Experiment: {field}")
    return f"{text} (of {count}: {platform})"


def check_free(experiment: Experiment, num_bytes: int) -> None:
    """Checks that an experiment's arrays fit into what is free of the device that learns.

    Without an accelerator's plugin of JAX, the device's memory is that of the machine.

    Args:
      experiment: the experiment.
      num_bytes: their bytes, at least.

    Raises:
      ValueError: less is free.
    """
    free = available_memory()
    if _has_accelerator():
        (index,) = experiment.learner.devices[:1] or (0,)
        found = int(_asked(_FREE.format(index)))
        free = free if found < 0 else found
    if free is not None and num_bytes > free:
        raise ValueError(
            f"Experiment: its arrays on the device that learns must fit into what is free there; "
            f"they take {num_bytes:,} bytes at least ({num_bytes / 2**30:.1f} GiB), and {free:,} "
            "are free. Lower --replay.max-size if the replay is on the device, or the sizes of "
            "network and batch."
        )


def single_process_device(experiment: Experiment) -> jax.Device | None:
    """Returns where a single process acts: by default on the learner's first device."""
    chosen = experiment.inferencer.devices or experiment.learner.devices
    return devices.local(chosen[:1], "Experiment: inferencer.devices")[0] if chosen else None


def learner_device(experiment: Experiment) -> jax.Device | None:
    """Returns the first device that learns; None for JAX's default device."""
    chosen = experiment.learner.devices
    return devices.local(chosen[:1], "Experiment: learner.devices")[0] if chosen else None


def actor_device(experiment: Experiment, rank: int) -> jax.Device | None:
    """Returns where an actor computes its own actions: by default on the CPU.

    In threads, an actor would otherwise compete with the learner for the accelerator.
    """
    chosen = experiment.inferencer.devices
    if chosen:
        return _one_of(chosen, rank, "inferencer.devices")
    return None if jax.default_backend() == "cpu" else jax.local_devices(backend="cpu")[0]


def acting_of(experiment: Experiment) -> tuple[bool, str]:
    """Returns whether actors in threads share one that acts for each device, and why.

    Several threads that act make each call slower on a GPU: XLA changes the CUDA graph of a call
    when its arrays have other addresses. On a CPU, actors that act by themselves are faster
    (docs/devices.md). In lock-step they also are what a run is equal to bit for bit.

    Raises:
      ValueError: ``program.acting`` is shared, and cannot be.
    """
    program = experiment.program
    fits = experiment.topology == "heavy_env" and program.launch == "threads"
    if program.acting == "shared":
        for holds, rule in (
            (fits, "with topology heavy_env and launch threads; light_env shares in any other"),
            (not experiment.env.wait_num, "with env.wait_num 0: requests have equal sizes"),
            (not experiment.policies, "without policies, each of which acts by itself"),
        ):
            if not holds:
                raise ValueError(
                    f"Experiment: program.acting may be shared only {rule}. Use --program.acting "
                    "own."
                )
    if program.acting != "auto":
        return program.acting == "shared", "as program.acting says"
    if not (experiment.inferencer.devices and _has_accelerator()):
        return False, "which is the fastest on a CPU (program.acting)"
    if program.num_actors <= MOST_ACTING:
        return False, "which is the fastest on an accelerator for so few (program.acting)"
    if experiment.env.wait_num or experiment.policies:
        return False, "because only batches of equal sizes are joined"
    if program.pacing == "lock_step":
        return False, "so that results in lock-step do not depend on the size of batches"
    return fits, "which is the fastest on an accelerator for so many (program.acting)"


def _has_accelerator() -> bool:
    """Whether a plugin of JAX for one is installed; does not start JAX."""
    return bool(importlib.metadata.entry_points(group="jax_plugins"))


def num_services(experiment: Experiment) -> int:
    """Returns the number of threads or nodes that act for the actors; 0 if each acts by itself."""
    if acting_of(experiment)[0]:
        return min(max(1, len(experiment.inferencer.devices)), experiment.program.num_actors)
    return experiment.program.num_inferencers if experiment.layout.has_services else 0


def service_device(experiment: Experiment, index: int) -> jax.Device | None:
    """Returns where an inference service acts; None for JAX's default device."""
    chosen = experiment.service.devices or experiment.inferencer.devices
    return _one_of(chosen, index, "service.devices") if chosen else None


def _one_of(indices: tuple[int, ...], number: int, field: str) -> jax.Device:
    return devices.local([indices[number % len(indices)]], f"Experiment: {field}")[0]


def _named(experiment: Experiment) -> dict[str, tuple[int, ...]]:
    return {
        "learner.devices": experiment.learner.devices,
        "inferencer.devices": experiment.inferencer.devices,
        "service.devices": experiment.service.devices,
    }


def _count() -> tuple[int, str]:
    """Returns the number of devices and their platform, found by another process.

    JAX must not start in this process: nodes are configured before JAX starts, and JAX would take
    the accelerator's memory.
    """
    count, platform = _asked(_COUNT).split()[-2:]
    return int(count), platform


def _asked(code: str) -> str:
    """Returns what another process prints that runs this code."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=_PATIENCE
    )
    if done.returncode:
        raise ValueError(
            "Experiment: JAX cannot start on this machine's devices: "
            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    return done.stdout
