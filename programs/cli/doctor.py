"""What is usable on this machine and, for what is not, why and the way out.

Packages are imported in child processes with a time limit: one that crashes or hangs is a line of
the report, not the end of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# Module -> distribution. The first group is what a single process needs.
CORE = {
    "numpy": "numpy",
    "jax": "jax",
    "haiku": "dm-haiku",
    "optax": "optax",
    "gymnasium": "gymnasium",
    "envpool": "envpool",
    "orbax.checkpoint": "orbax-checkpoint",
    "tensorboardX": "tensorboardX",
    "tyro": "tyro",
    "rich": "rich",
}
SERVICES = {
    "launchpad": "dm-launchpad",
    "courier": "dm-launchpad",
    "reverb": "dm-reverb",
    "tensorflow": "tensorflow-cpu",
}
# What each topology needs beside the core.
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "single_process": (),
    "heavy_env": ("launchpad", "courier"),
    "light_env": ("launchpad", "courier"),
    "distributed": ("launchpad", "courier", "reverb"),
}
_PYTHONS = ((3, 10), (3, 13))
_SMALL_SHM = 1 << 30

_PROBE = """
import importlib, importlib.metadata, json, sys
for pair in sys.argv[1:]:
    module, distribution = pair.split("=")
    found = {"module": module, "version": "", "error": "", "extra": ""}
    try:
        found["version"] = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        loaded = importlib.import_module(module)
        if module == "jax":
            found["extra"] = ", ".join(str(device) for device in loaded.devices())
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
    print("\\nprobe " + json.dumps(found), flush=True)
"""


class Check(NamedTuple):
    """One line of the report."""

    name: str
    found: str  # a version, a size, a list; empty if there is nothing
    usable: bool
    detail: str = ""  # if not usable: why, and the way out


def report(timeout: float = 120.0) -> list[Check]:
    """Look at this machine, its packages and the topologies that they allow.

    Args:
      timeout: seconds that an import may take before it counts as hanging.
    """
    # TensorFlow before Reverb, which imports it: its seconds are then paid once.
    pairs = (("launchpad", "courier"), ("tensorflow", "reverb"))
    groups = [CORE, *({module: SERVICES[module] for module in pair} for pair in pairs)]
    # Threads only wait for children; two at a time keeps a small machine from thrashing.
    with ThreadPoolExecutor(2) as pool:
        probed = [
            found for group in pool.map(lambda g: probe(g, timeout), groups) for found in group
        ]
    packages = [_package(found) for found in probed]
    machine = [_python(), _system(), _cores(), _memory(), _shm()]
    topologies = _topologies([*machine, *packages])
    return [*machine, *packages, *_devices(probed), *topologies, _ray(topologies)]


def main(look: Callable[[], list[Check]] = report) -> int:
    """Print the report; returns 0 if `single_process` is usable, else 1."""
    checks = look()
    print(render(checks))
    return 0 if any(c.name == "topology single_process" and c.usable for c in checks) else 1


def render(checks: Sequence[Check]) -> str:
    """The report as a table of plain text."""
    rows = [
        ("", "found", "usable"),
        *((c.name, c.found, "yes" if c.usable else "no") for c in checks),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(rows[0], widths, strict=True)).rstrip()]
    for row, check in zip(rows[1:], checks, strict=True):
        lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        if check.detail:
            lines.append(f"    {check.detail}")
    return "\n".join(lines)


def probe(modules: dict[str, str], timeout: float) -> list[dict[str, Any]]:
    """Import `modules` (module -> distribution), in order, in a child process.

    A child that ends or hangs at one module is replaced by another that goes on with the next.

    Returns:
      One record a module: module, version, error ("" if it imports) and extra (JAX's devices).
    """
    results: list[dict[str, Any]] = []
    names = list(modules)
    while len(results) < len(names):
        rest = [f"{name}={modules[name]}" for name in names[len(results) :]]
        command = [sys.executable, "-c", _PROBE, *rest]
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env
            )
            output, died = done.stdout, f"importing it ended the process (code {done.returncode})"
        except subprocess.TimeoutExpired as error:
            output, died = error.stdout or b"", f"importing it took over {timeout:.0f} s"
        lines = output.decode(errors="replace").splitlines()
        results += [json.loads(line[6:]) for line in lines if line.startswith("probe ")]
        if len(results) < len(names):
            name = names[len(results)]
            results.append({"module": name, "version": "", "error": died, "extra": ""})
    return results


def way_out(module: str, error: str, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """What to do about a package that cannot be imported.

    Args:
      module: its name.
      error: what importing it said.
      version: of the Python that runs.
    """
    if module in SERVICES and version >= (3, 11):
        python = ".".join(map(str, version))
        return (
            f"Launchpad, Reverb and their TensorFlow have no wheels for Python {python}: use "
            "CPython 3.10, `make venv`. Everything in a single process works without them."
        )
    if "libpython" in error:
        return (
            "this Python was built without its shared library: `apt install libpython3.10`, or "
            "`uv python install 3.10`, which brings one, and then `make clean venv`."
        )
    if "No module named" in error:
        return "it is not installed: `make venv`."
    if sys.platform != "linux" and module in SERVICES:
        return "it has wheels for Linux only."
    return "run `make clean venv`; if it stays, import it in Python and read the whole error."


def _package(found: dict[str, Any]) -> Check:
    name, error = found["module"], found["error"]
    if not error:
        return Check(name, found["version"], True)
    first = error.strip().splitlines()[0][:200].rstrip(".")
    return Check(name, found["version"], False, f"{first}. The way out: {way_out(name, error)}")


def _devices(probed: list[dict[str, Any]]) -> list[Check]:
    devices = next((found["extra"] for found in probed if found["module"] == "jax"), "")
    if not devices:
        return []
    hint = ""
    if Path("/dev/nvidiactl").exists() and "cuda" not in devices.lower():
        hint = (
            'there is an NVIDIA device that JAX does not use: install "jax[cuda12]" at its version.'
        )
    return [Check("jax devices", devices, True, hint)]


def _topologies(checks: list[Check]) -> list[Check]:
    """Each topology is usable if all that it needs is usable."""
    usable = {check.name: check.usable for check in checks}
    found = []
    for name, services in TOPOLOGIES.items():
        missing = [need for need in ("Python", *CORE, *services) if not usable[need]]
        why = f"needs {', '.join(missing)}: see above." if missing else ""
        found.append(Check(f"topology {name}", "", not missing, why))
    return found


def _ray(topologies: list[Check]) -> Check:
    """Whether the distributed topology can be launched on a cluster; Ray itself takes a second."""
    name = "launch ray"
    if importlib.util.find_spec("ray") is None:
        why = "the extra `cluster` brings it (CPython 3.10): pip install 'rlstack[cluster]'."
        return Check(name, "", False, why)
    usable = any(c.name == "topology distributed" and c.usable for c in topologies)
    why = "" if usable else "needs the topology distributed: see above."
    return Check(name, importlib.metadata.version("ray"), usable, why)


def _python() -> Check:
    low, high = _PYTHONS
    usable = low <= sys.version_info[:2] <= high and sys.implementation.name == "cpython"
    why = f"rlstack needs CPython {low[0]}.{low[1]} to {high[0]}.{high[1]}: `make venv`."
    found = f"{sys.implementation.name} {platform.python_version()}"
    return Check("Python", found, usable, "" if usable else why)


def _system() -> Check:
    linux = sys.platform == "linux"
    why = "rlstack is tested on Linux; Launchpad, Reverb and shared-memory pools need it."
    return Check("system", f"{platform.system()} {platform.machine()}", linux, "" if linux else why)


def _cores() -> Check:
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return Check("cores", str(cores), True)


def _memory() -> Check:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return Check("memory", "unknown", True)
    return Check("memory", _size(size), True)


def _shm(path: str = "/dev/shm") -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        why = f"{error.strerror}; process pools and shared-memory replay need it: mount a tmpfs."
        return Check(path, "", False, why)
    found = f"{_size(usage.total)}, {_size(usage.free)} free"
    if usage.free < _SMALL_SHM:
        why = (
            "small: process pools and shared-memory replay may not fit. Free some, or start the "
            "container with more (docker run --shm-size=4g)."
        )
        return Check(path, found, usage.free > 0, why)
    return Check(path, found, True)


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
