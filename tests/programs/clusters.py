"""Ray clusters on this machine for tests, and a check that programs leave no processes there."""

import contextlib
import os
import shutil
import tempfile
import time

import psutil

# Ray listens on this host only, and starts no process before it is needed.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Else a file in the user's home decides, which any Ray of this user has made.
    "RAY_AUTH_MODE": "disabled",
}
NODE = {"num_cpus": 8, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def cluster(workers, **head):
    """A head, perhaps with other arguments, and some workers; stops all of them at the end."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short, because socket paths have a limit
    before = dict(os.environ)
    os.environ.update(VARIABLES, RAY_TMPDIR=folder)
    from ray.cluster_utils import Cluster

    made = None
    try:
        made = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, **head}
        )
        for _ in range(workers):
            made.add_node(**NODE)
        yield made
    finally:
        if made is not None:
            made.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def processes():
    """The Ray processes that run nodes, among the descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            # Ray of today calls its own agents so too, such as ray::RuntimeEnvAgent.
            if line.startswith("ray::") and not line.strip().endswith("Agent"):
                found.append(f"{process.pid} {line.strip()}")
    return found


def wait_until_empty(timeout=10.0):
    """Waits until no node process is left; returns those that still run."""
    until = time.monotonic() + timeout
    while (left := processes()) and time.monotonic() < until:
        time.sleep(0.1)
    return left
