"""Checks which features work on this machine and says how to enable the others.

Packages are imported in child processes with a time limit, so that a package that crashes or hangs
does not end the report.
"""

from __future__ import annotations

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
from typing import NamedTuple

import rlstack
from rlstack.programs.cli import features
from rlstack.programs.config.layouts import LAYOUTS

# Module -> distribution. A single process needs these.
CORE = {
    "numpy": "numpy",
    "jax": "jax",
    "haiku": "dm-haiku",
    "optax": "optax",
    "gymnasium": "gymnasium",
    "orbax.checkpoint": "orbax-checkpoint",
    "tensorboardX": "tensorboardX",
    "tyro": "tyro",
    "rich": "rich",
}
POOLS = {"envpool": "envpool"}  # --env.type cpp needs it; all else works without it
SERVICES = {
    "launchpad": "dm-launchpad",
    "courier": "dm-launchpad",
    "reverb": "dm-reverb",
    "tensorflow": "tensorflow-cpu",
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
    found: str  # a version, a size or a list; empty if nothing was found
    usable: bool
    detail: str = ""  # the reason and the fix, if not usable; or a hint


def report(timeout: float = 120.0) -> list[Check]:
    """Checks this machine, the packages, and the topologies that they allow.

    Args:
      timeout: seconds after which an import counts as hanging.
    """
    # TensorFlow comes before Reverb, which imports it, so that its slow import happens once.
    pairs = (("launchpad", "courier"), ("tensorflow", "reverb"))
    groups = [CORE | POOLS, *({module: SERVICES[module] for module in pair} for pair in pairs)]
    # The threads only wait for child processes. More than two would overload a small machine.
    with ThreadPoolExecutor(2) as pool:
        probed = [
            found for group in pool.map(lambda g: probe(g, timeout), groups) for found in group
        ]
    packages = [_package(found) for found in probed]
    machine = [_python(), _environment(), _names(), _system(), _cores(), _memory(), _shm()]
    checks = [*machine, *packages]
    return [*checks, *_devices(probed), *_topologies(checks), *_choices(checks)]


def main(look: Callable[[], list[Check]] = report) -> int:
    """Prints the report; returns 0 if `single_process` is usable, else 1."""
    checks = look()
    print(render(checks))
    return 0 if any(c.name == "topology single_process" and c.usable for c in checks) else 1


def render(checks: Sequence[Check]) -> str:
    """Returns the report as a table of plain text."""
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


def probe(modules: dict[str, str], timeout: float) -> list[dict[str, str]]:
    """Imports modules in a child process, in their order.

    If the child crashes or hangs at one module, another child continues with the next.

    Args:
      modules: module name -> name of its distribution.
      timeout: seconds after which an import counts as hanging.

    Returns:
      One record for each module: module, version, error ("" if it imports), extra (JAX's devices).
    """
    results: list[dict[str, str]] = []
    names = list(modules)
    while len(results) < len(names):
        rest = [f"{name}={modules[name]}" for name in names[len(results) :]]
        command = [sys.executable, "-c", _PROBE, *rest]
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env
            )
            output, reason = done.stdout, f"importing it ended the process (code {done.returncode})"
        except subprocess.TimeoutExpired as error:
            output, reason = error.stdout or b"", f"importing it took over {timeout:.0f} s"
        lines = output.decode(errors="replace").splitlines()
        results += [json.loads(line[6:]) for line in lines if line.startswith("probe ")]
        if len(results) < len(names):
            name = names[len(results)]
            results.append({"module": name, "version": "", "error": reason, "extra": ""})
    return results


def how_to_fix(module: str, error: str, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """Returns how to fix a package that cannot be imported.

    Args:
      module: the name of the module.
      error: the error of the import.
      version: the version of the running Python.
    """
    if module in SERVICES and version >= (3, 11):
        python = ".".join(map(str, version))
        return (
            f"Launchpad, Reverb and their TensorFlow have no wheels for Python {python}. Use "
            f"CPython 3.10: {features.reinstall('3.10')}. Only distributed, --launch launchpad and "
            "the transport courier need them."
        )
    if "libpython" in error:
        return (
            "This Python has no shared library. Run `apt install libpython3.10`, or `uv python "
            "install 3.10` for a Python that has one, and then make the environment anew."
        )
    if "No module named" in error:
        if module in POOLS:
            return f"Only --env.type cpp needs it: {features.reinstall()}."
        return f"The package is not installed: {features.reinstall()}."
    if module == "envpool" and "shared object" in error:
        return (
            "It needs libraries of the system. On Debian and Ubuntu: "
            "`apt install libegl1 libopengl0`."
        )
    if sys.platform != "linux" and module in SERVICES:
        return "The package has wheels for Linux only."
    return (
        "Make the environment anew (in a checkout: `make clean venv`). If that does not help, "
        "import it in Python and read the error."
    )


def _package(found: dict[str, str]) -> Check:
    name, error = found["module"], found["error"]
    if not error:
        return Check(name, found["version"], True)
    first = error.strip().splitlines()[0][:200].rstrip(".")
    return Check(name, found["version"], False, f"{first}. {how_to_fix(name, error)}")


def _devices(probed: list[dict[str, str]]) -> list[Check]:
    devices = next((found["extra"] for found in probed if found["module"] == "jax"), "")
    if not devices:
        return []
    hint = ""
    if Path("/dev/nvidiactl").exists() and "cuda" not in devices.lower():
        hint = (
            "JAX does not use the NVIDIA device of this machine. It needs a plugin: "
            f"{features.install(['cuda'])}."
        )
    return [Check("jax devices", devices, True, hint)]


def _topologies(checks: list[Check]) -> list[Check]:
    """Returns a check for each topology; all of them need what a single process needs."""
    missing = [need for need in ("Python", *CORE) if not _works(checks, need)]
    why = f"needs {', '.join(missing)}: see above." if missing else ""
    return [Check(f"topology {name}", "", not missing, why) for name in LAYOUTS]


def _choices(checks: list[Check]) -> list[Check]:
    """Returns a check for each feature of `features.CHOICES`."""
    found = features.lines(lambda module: _works(checks, module), version=features.version_of)
    return [Check(*line) for line in found]


def _works(checks: list[Check], module: str) -> bool:
    """Returns whether a module was imported; of others, whether it is installed."""
    for check in checks:
        if check.name == module:
            return check.usable
    return importlib.util.find_spec(module) is not None


def _python() -> Check:
    low, high = _PYTHONS
    usable = low <= sys.version_info[:2] <= high and sys.implementation.name == "cpython"
    why = f"rlstack needs CPython {low[0]}.{low[1]} to {high[0]}.{high[1]}: `make venv`."
    found = f"{sys.implementation.name} {platform.python_version()}"
    return Check("Python", found, usable, "" if usable else why)


def _environment() -> Check:
    if sys.version_info[:2] == (3, 10):
        return Check("environment", "that of Launchpad and Reverb", True)
    found = "current packages, without Launchpad and Reverb"
    return Check("environment", found, True)


def _names() -> Check:
    """Checks that no other installed distribution has put files into the rlstack package."""
    others = features.owners("rlstack") - {"rlstack"}
    detail = (
        f"{', '.join(sorted(others))} also installs a package named rlstack, whose files replace "
        f"the stack's: pip uninstall {' '.join(sorted(others))}, then {features.reinstall()}."
    )
    return Check("package rlstack", rlstack.__version__, not others, detail if others else "")


def _system() -> Check:
    linux = sys.platform == "linux"
    why = "rlstack is tested on Linux only; Launchpad, Reverb and shared-memory pools need Linux."
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
        why = f"{error.strerror}. Process pools and shared-memory replay need it: mount a tmpfs."
        return Check(path, "", False, why)
    found = f"{_size(usage.total)}, {_size(usage.free)} free"
    if usage.free < _SMALL_SHM:
        why = (
            "This is little: process pools and shared-memory replay may not fit. Free some, or "
            "start the container with more (docker run --shm-size=4g)."
        )
        return Check(path, found, usage.free > 0, why)
    return Check(path, found, True)


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
