"""A group of processes whose devices compute together, by ``jax.distributed``.

Between CPUs the collectives are gloo's, between GPUs NCCL's. All processes must run the same
computations in the same order: one that runs another, or none, makes the others wait. So they first
agree on what comes next, with `Group.agree`.

Neither the service of ``jax.distributed`` nor gloo authenticates or encrypts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack import devices

_LEAVE_SECONDS = 2.0  # time for the other processes to leave, too
# What the messages of collectives contain when another process has ended.
_OF_LOSS = ("Gloo", "NCCL", "coordination service")


class GroupLostError(RuntimeError):
    """A collective failed because another process of the group has ended."""


class Group:
    """This process's membership in a group, which `join` has made.

    Attributes:
      index: the index of this process.
      count: number of processes.
    """

    def __init__(self, index: int, count: int) -> None:
        """Finds one device of each process, for `agree`."""
        self.index, self.count = index, count
        firsts = [of_process(process)[0] for process in range(count)]
        mesh = Mesh(np.array(firsts), ("process",))
        self._by_process = NamedSharding(mesh, PartitionSpec("process"))
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def agree(self, *values: int) -> np.ndarray:
        """Waits for all processes; returns the values of each: ``[count, len(values)]`` int64.

        Raises:
          GroupLostError: another process has ended.
        """
        row = np.array([values], np.int64).view(np.int32)  # JAX has no 64 bits by default
        with losses_named():
            shape = (self.count, row.shape[1])
            rows = jax.make_array_from_callback(shape, self._by_process, lambda _: row)
            return np.array(self._gather(rows).addressable_data(0)).view(np.int64)


def join(
    address: str, index: int, count: int, *, host: str, visible: Sequence[int] | None, timeout: int
) -> Group:
    """Joins a group; waits until all processes have joined. JAX must not have computed yet.

    Process 0 starts the service of ``jax.distributed`` at the address, and at no other.

    Args:
      address: "host:port" of process 0, free there.
      index: the index of this process.
      count: number of processes.
      host: the numeric address of this process, at which gloo listens.
      visible: the GPUs of this machine that this process may use; None for all.
      timeout: seconds within which all processes must join.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    devices.compile_collectives_anew()
    with _gloo_listens_at(host), _without_handlers_of_signals():
        jax.distributed.initialize(
            address,
            count,
            index,
            local_device_ids=visible,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout,
            coordinator_bind_address=address,
        )
        jax.local_devices()  # starts gloo
    atexit.register(_leave)  # before JAX's own function, which would wait for minutes
    return Group(index, count)


def of_process(process: int) -> list[jax.Device]:
    """Returns the devices of a process of the group, in the order of ``jax.local_devices()``."""
    return sorted((d for d in jax.devices() if d.process_index == process), key=lambda d: d.id)


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Replaces JAX's error for a process that ended during a collective by `GroupLostError`."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # gloo's is a ValueError
        if any(name in str(error) for name in _OF_LOSS):
            reason = str(error).splitlines()[0][:200]
            raise GroupLostError(f"another learner process has ended: {reason}") from error
        raise


@contextlib.contextmanager
def _gloo_listens_at(host: str) -> Iterator[None]:
    """Makes gloo listen at one address; its default is the address of the host's name.

    JAX has no option for it. Gloo's own thread, which receives messages, then preempts no other.
    """
    from jax._src import xla_bridge

    module: Any = getattr(xla_bridge, "_jax", None) or xla_bridge.xla_client._xla
    make = module.make_gloo_tcp_collectives

    def make_there(*arguments: Any, **options: Any) -> Any:
        before = _threads()
        made = make(*arguments, **options, hostname=host)
        for thread in _threads() - before:
            _preempt_no_other(thread)
        return made

    module.make_gloo_tcp_collectives = make_there
    try:
        yield
    finally:
        module.make_gloo_tcp_collectives = make


def _threads() -> set[int]:
    """Returns the threads of this process, as Linux numbers them; none on other systems."""
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except FileNotFoundError:
        return set()


def _preempt_no_other(thread: int) -> None:
    """Lets a thread that wakes up wait until the running one sleeps or has used its slice.

    Gloo's thread is woken while another thread sends, and holds the lock that it needs. It does not
    sleep until that is free, but asks again and again. If it has preempted the sender, which has no
    other core, it does so for a slice of some milliseconds, at each message.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def _without_handlers_of_signals() -> Iterator[None]:
    """Keeps JAX from handling SIGTERM, which ends this process; newer versions do not handle it."""
    from jax._src import distributed

    name = "initialize_preemption_sync_manager"
    setattr(distributed.global_state, name, lambda: None)
    try:
        yield
    finally:
        delattr(distributed.global_state, name)


def _leave() -> None:
    """Leaves the group at the end of this process; if the others do not leave, ends it at once."""
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
    if leaving.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
