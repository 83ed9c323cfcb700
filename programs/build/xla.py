"""Configures XLA before JAX's first computation, and says how an accelerator computes."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Sequence

import jax

from rlstack.programs.build.devices import MOST_ACTING, acting_of
from rlstack.programs.config.experiment import Experiment

LEGACY_CPU_RUNTIME = "--xla_cpu_use_thunk_runtime=false"
SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false"
POOL_SIZE = "PJRT_NPROC"  # threads of a CPU client; all cores by default
NO_CUDA_GRAPHS = "--xla_gpu_enable_command_buffer="
_LARGE = 2**20  # multiplications in a matrix product from which a compiled loop gains by threads

_log = logging.getLogger(__name__)


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
      convolutions: True if the network has convolutions.
      single_thread: True to run each computation on one core, when other processes use the other
        cores.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    older = not convolutions and _has_legacy_runtime()
    if older:
        _add_flag(LEGACY_CPU_RUNTIME)
    if single_thread or older:
        _add_flag(SINGLE_THREAD)
        os.environ.setdefault(POOL_SIZE, os.environ.get("NPROC", "1"))


def configure_node(experiment: Experiment, older: bool | None, *, single_thread: bool) -> None:
    """Configures XLA's CPU client for one node of a program.

    Nodes in threads share a client. The first node to start JAX would choose the number of the
    client's threads for all nodes, so their launcher calls `configure_runs` instead.

    Args:
      experiment: the program's experiment.
      older: True if all nodes can use XLA's older CPU runtime; None to choose by the experiment.
      single_thread: True to run each computation on one core.
    """
    if experiment.program.launch != "threads":
        older = experiment.older_runtime if older is None else older
        configure(convolutions=not older, single_thread=single_thread)


def configure_runs(experiments: Sequence[Experiment]) -> None:
    """Configures XLA for runs in this process, and starts JAX.

    XLA changes the CUDA graph of a call when its arrays have other addresses, which they have when
    several threads act. On one H200 four threads made 12,700 frames/s with graphs and 14,000
    without them (docs/devices.md).

    Programs that this process starts later do not inherit the configuration.

    Args:
      experiments: the experiment of each run; several runs share one compiled loop.
    """
    names = "XLA_FLAGS", POOL_SIZE
    before = {name: os.environ[name] for name in names if name in os.environ}
    one = experiments[0]
    single_thread = one.layout.is_compiled and suits_one_thread(experiments)
    configure(convolutions=not one.older_runtime, single_thread=single_thread)
    if _acting_threads(one) > MOST_ACTING:
        _add_flag(NO_CUDA_GRAPHS)
    jax.devices()  # makes the client, which reads the variables
    tell_accelerator()
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


def _acting_threads(experiment: Experiment) -> int:
    """Returns how many threads of this process may act on an accelerator."""
    layout = experiment.layout
    acts = layout.has_nodes and not layout.has_services and experiment.inferencer.devices
    own = experiment.program.launch == "threads" and not acting_of(experiment)[0]
    return experiment.num_actors if acts and own else 0


@functools.cache
def tell_accelerator() -> None:
    """Logs what JAX computes on and how exactly, once a process; nothing on a CPU. Starts JAX."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return
    precision = getattr(jax.config, "jax_default_matmul_precision", None) or "default"
    graphs = ", without CUDA graphs" if NO_CUDA_GRAPHS in os.environ.get("XLA_FLAGS", "") else ""
    _log.warning(
        "JAX computes on %s%s. Products of float32 matrices have %s precision%s.",
        device.device_kind,
        graphs,
        precision,
        " (JAX_DEFAULT_MATMUL_PRECISION=highest keeps all digits)" * (precision == "default"),
    )


def suits_one_thread(experiments: Sequence[Experiment]) -> bool:
    """Returns whether the compiled loop of some runs has small operations only.

    With several threads, XLA passes operations from one to another. On two cores, one thread makes
    1.5 times the frames/s of two for DQN, and 1.3 times for SAC, with layers of 64 units and
    batches of 128 (JAX 0.12). Where the largest matrix product has two million multiplications,
    both are equal. With eight million, two threads make 1.1 times the frames/s of PPO and 1.9 times
    those of SAC. Runs in one loop count together: three of such runs of DQN train 1.3 times as fast
    with two threads. The size of observations is not known here, so it does not count.
    """
    return sum(map(_largest_product, experiments)) < _LARGE


def _largest_product(experiment: Experiment) -> float:
    """Returns about how many multiplications the largest matrix product of an update has."""
    if experiment.policies:
        return sum(_largest_product(experiment.of_policy(name)) for name in experiment.policies)
    if experiment.may_convolve or len(experiment.learner.devices) > 1:
        return _LARGE
    replay = experiment.replay
    rows = (
        replay.batch_size * replay.unroll_length / getattr(experiment.agent, "num_minibatches", 1)
    )
    sizes: list[int] = []
    for network in (experiment.network, experiment.network.of_critic()):
        wide = 1 if network.torso == "mlp" else 2  # a block's layers have four times its size
        sizes += [wide * size for size in network.hidden_sizes]
        sizes += [network.core_size] if network.core != "none" else []
    return max(rows, experiment.env.num_envs) * max(sizes) ** 2


def _add_flag(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _has_legacy_runtime() -> bool:
    # XLA aborts the process at an unknown flag, so only versions that have the flag get it.
    major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) == (0, 5)
