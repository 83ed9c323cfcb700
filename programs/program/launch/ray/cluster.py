"""Joining and leaving a Ray cluster, and the resources reserved for each node."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rlstack
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.program_config import GROUPS, RayConfig
from rlstack.programs.program.topologies import environment
from rlstack.programs.session import module_path
from rlstack.rpc.addresses import LOOPBACK, is_all, is_loopback, split
from rlstack.rpc.socket_filter import address_of, address_towards

_NOT_JOINED = (ConnectionError, RuntimeError, ValueError, OSError)
_STORE_BYTES = 100 << 20  # size of Ray's object store, which holds almost nothing here


def load() -> Any:
    """Imports Ray.

    Raises:
      ValueError: Ray is not installed.
    """
    # No usage statistics, and no change of environment when started by `uv run`.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise ValueError(
            f"launch ray: Ray must be installed (the extra `cluster`); got {error}. "
            "pip install 'rlstack[cluster]', or --launch processes on this machine."
        ) from error
    return ray


@contextlib.contextmanager
def joined(cfg: ProgramConfig, policies: int = 1, processes: int = 1) -> Iterator[Any]:
    """Joins the cluster, or starts one on this machine, for as long as the context lasts.

    A Ray that is started here listens on loopback only, whatever the interface of the nodes is.
    If this process has joined a cluster already, as in a notebook, it stays in that one.

    Args:
      cfg: the program's config.
      policies: number of policies that learn.
      processes: number of learner processes.

    Raises:
      ValueError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = load()
    if ray.is_initialized():
        yield ray
        return
    address = cfg.ray.address or os.environ.get("RAY_ADDRESS", "")
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if own := _own_address(address, cfg.interface):
            options["_node_ip_address"] = own
        if not address:
            # A short path: names of Unix sockets are limited to about a hundred characters.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlray-", dir="/tmp"))
            options = {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, round(_cores(cfg, policies, processes) + 0.5)),
                "object_store_memory": _STORE_BYTES,
                "include_dashboard": False,
                # Ray runs code for everyone who reaches it. With this address all of its servers
                # listen on loopback; with any other, on all interfaces.
                "_node_ip_address": LOOPBACK,
                "_temp_dir": folder,
            }
        if cfg.ray.ship_code:
            options["runtime_env"] = {"py_modules": [str(Path(rlstack.__file__).parent)]}
        stack.callback(ray.shutdown)
        try:
            with _term_handler_kept(), _loopback(ray, not address):
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (*_NOT_JOINED, ray.exceptions.RayError) as error:
            raise ValueError(_refusal(address, _told(error), ray.__version__)) from error
        if not address:
            _check_loopback(ray)
        yield ray


@contextlib.contextmanager
def _loopback(ray: Any, wanted: bool) -> Iterator[None]:
    """Lets Ray take loopback as the address of this host, which newer ones otherwise replace."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = before and not wanted
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _check_loopback(ray: Any) -> None:
    """Checks that only this host reaches a Ray that was started here.

    Raises:
      ValueError: Ray is at another address than loopback, where it would run code for everyone.
    """
    found = {host["NodeManagerAddress"] for host in ray.nodes()}
    if found != {LOOPBACK}:
        raise ValueError(
            f"launch ray: a Ray that a run starts must listen on {LOOPBACK} only; Ray "
            f"{ray.__version__} took {', '.join(sorted(found))}. Start a cluster yourself "
            "(ray start --head) and name it with --ray-address."
        )


def _told(error: BaseException | None) -> str:
    """Returns what an error and those before it say; Ray hides some behind an empty one."""
    texts = []
    while error is not None:
        texts.append(" ".join(str(error).split()))
        error = error.__cause__ or error.__context__
    return " ".join(text for text in texts if text)


def _refusal(address: str, error: str, version: str) -> str:
    """Returns the error for a cluster that was not joined."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", error)
    if len(versions) == 2:  # the cluster's, then those of this process
        theirs, mine = (f"Ray {ray} on CPython {python}" for ray, python in versions)
        return (
            f"launch ray: all hosts must have the same environment; the cluster at {address} has "
            f"{theirs}, and this process has {mine}. Install one environment on all hosts."
        )
    return (
        f"launch ray: --ray-address must be the head of a running cluster with Ray {version} on "
        f"CPython {platform.python_version()}, as here; got {address or 'a Ray of its own'}: "
        f"{error or 'no answer'}"
    )


def _own_address(head: str, interface: str) -> str:
    """Returns the address by which hosts of the cluster reach this one; empty lets Ray choose.

    Ray would take the address of the default route, which may be missing or lead elsewhere.
    """
    if interface and not is_all(interface):
        return address_of(interface)
    host, port = split(head)
    with contextlib.suppress(OSError):
        found = address_towards(host) if port else ""
        return "" if not found or is_loopback(found) else found
    return ""


def _cores(cfg: ProgramConfig, policies: int, processes: int) -> float:
    """Cores that all of the program's nodes reserve together."""
    numbers = {
        "actor": cfg.num_actors,
        "inferencer": cfg.num_inferencers * policies,
        "learner": processes * (policies if cfg.trainers == "one_each" else 1),
        "replay": processes * policies,
    }
    return sum(numbers.get(group, 1) * cfg.ray.cpus_of(group) for group in GROUPS)


def reserved(cfg: RayConfig, group: str) -> dict[str, Any]:
    """Returns Ray's options for the process of a node of the group, without its placement."""
    cpus, gpus = cfg.cpus_of(group), cfg.gpus.get(group, 0.0)
    here = {} if cfg.ship_code else {"PYTHONPATH": module_path.for_children()}
    variables = {
        **here,
        **environment(group),
        **({} if gpus else {"JAX_PLATFORMS": "cpu"}),
        "OMP_NUM_THREADS": str(max(1, int(cpus))),
        **cfg.env_vars,
    }
    return {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "memory": int(cfg.memory_gb.get(group, 0.0) * (1 << 30)),
        "max_concurrency": 4,  # so that a waiting call does not block others
        "max_restarts": 0,  # the launcher restarts nodes
        "runtime_env": {"env_vars": variables},
    }


def needs(cfg: RayConfig, group: str) -> str:
    """Returns what a node of the group reserves, in words."""
    amounts = (cfg.cpus_of(group), cfg.gpus.get(group, 0.0), cfg.memory_gb.get(group, 0.0))
    return "{:g} CPUs, {:g} GPUs and {:g} GB".format(*amounts)


def on_host(ray: Any, node_id: str, *, soft: bool) -> Any:
    """Returns the strategy that places a process on a host; if `soft`, elsewhere if it is full."""
    strategies = ray.util.scheduling_strategies
    # By `soft` alone Ray goes elsewhere only if the host is gone, and waits while it is full.
    return strategies.NodeAffinitySchedulingStrategy(node_id, soft, _spill_on_unavailable=soft)


@contextlib.contextmanager
def _term_handler_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
