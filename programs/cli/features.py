"""What each feature of rlstack needs, for `rlstack doctor`.

A new choice of an option adds a line to `CHOICES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rlstack.imports import versions


class Choice(NamedTuple):
    """One choice of an option, or one part of a feature, and the modules that it needs."""

    feature: str  # the option, or what the choices have in common
    name: str
    needs: tuple[str, ...] = ()


_IN_JAX = versions.JAX_LIBRARIES.items()
CHOICES = (
    Choice("agents", "those that learn without a search"),
    Choice("agents", "MuZero, AlphaZero", ("mctx",)),
    Choice("--env.type", "cpp", ("envpool",)),
    Choice("--env.type", "for_loop"),
    Choice("--env.type", "thread"),
    Choice("--env.type", "process"),
    Choice("--env.type", "jax"),
    Choice("environments in JAX", "your own"),
    *(Choice("environments in JAX", one.title, (name,)) for name, one in _IN_JAX),
    Choice("games of several seats", "your own"),
    Choice("games of several seats", "PettingZoo", ("pettingzoo",)),
    Choice("games of several seats", "MPE", ("mpe2",)),
    Choice("--launch", "processes", ("zmq",)),
    Choice("--launch", "threads"),
    Choice("--launch", "launchpad", ("launchpad",)),
    Choice("--launch", "ray", ("zmq", "ray")),
    Choice("--launch", "hosts", ("zmq",)),
    Choice("--program.transport", "courier", ("courier",)),
    Choice("--program.transport", "zmq", ("zmq",)),
    Choice("--program.transport", "direct"),
    Choice("--replay.service", "reverb", ("reverb",)),  # the first that works is the default
    Choice("--replay.service", "table"),
    Choice("loggers", "jsonl"),
    Choice("loggers", "tensorboard", ("tensorboardX",)),
    Choice("loggers", "terminal"),
    Choice("loggers", "wandb", ("wandb",)),
    Choice("loggers", "mlflow", ("mlflow",)),
    Choice("loggers", "trackio", ("trackio",)),
    Choice("networks", "Haiku", ("haiku",)),
    Choice("networks", "from_flax", ("flax",)),
    Choice("networks", "from_equinox", ("equinox",)),
    Choice("run directories", "on a disk"),
    Choice("run directories", "s3://, gs://, az://", ("obstore",)),
    Choice("rlstack export", "npz"),
    Choice("rlstack export", "stablehlo", ("flatbuffers",)),
    Choice("rlstack export", "onnx", ("jax2onnx", "onnxruntime")),
    Choice("rlstack record --format", "rlstack"),
    Choice("rlstack record --format", "minari", ("minari",)),
    Choice("rlstack report", "tables, html, csv, latex"),
    Choice("rlstack report", "png and svg", ("matplotlib",)),
    Choice("rlstack sweep", "grid"),
    Choice("rlstack sweep", "optuna", ("optuna",)),
    Choice("rlstack watch", "terminal"),
    Choice("rlstack watch", "gif", ("PIL",)),
    Choice("rlstack watch", "mp4 and webm", ("PIL", "av")),
)

# The first choice that works is what `auto` takes, or the default.
CHOSEN = ("--launch", "--program.transport", "--replay.service")

# Module -> the extra that brings it. All others are in the default installation.
EXTRAS = {
    "PIL": "video",
    "av": "video",
    "pygame": "window",
    "equinox": "equinox",
    "flatbuffers": "stablehlo",
    "flax": "flax",
    "jax2onnx": "onnx",
    "matplotlib": "report",
    "mctx": "planning",
    "minari": "minari",
    "mlflow": "mlflow",
    "mpe2": "pettingzoo",
    "obstore": "store",
    "onnxruntime": "onnx",
    "optuna": "sweep",
    "pettingzoo": "pettingzoo",
    "ray": "cluster",
    "trackio": "trackio",
    "wandb": "wandb",
} | {name: library.extra for name, library in _IN_JAX}
# Module -> its distribution, where the two names differ.
DISTRIBUTIONS = {"PIL": "pillow", "pygame": "pygame-ce"}
# Modules that only CPython 3.10 can have.
REFERENCE_ONLY = ("launchpad", "courier", "reverb", "tensorflow")
# Modules that need a newer Python or JAX than CPython 3.10 can have beside the services.
CORE_ONLY = ("jax2onnx", "jaxmarl", "minari")


class Line(NamedTuple):
    """One feature: its choices that work, and how to get the others."""

    feature: str
    found: str
    usable: bool
    detail: str


def lines(
    works: Callable[[str], bool],
    choices: Iterable[Choice] = CHOICES,
    version: Callable[[str], str] = lambda _: "",
) -> list[Line]:
    """Returns one line for each feature.

    Args:
      works: returns whether a module can be imported.
      choices: the choices of all features.
      version: returns the version of a module; "" shows none.
    """
    by_feature: dict[str, list[Choice]] = {}
    for choice in choices:
        by_feature.setdefault(choice.feature, []).append(choice)
    found = []
    for feature, group in by_feature.items():
        missing = {c.name: [need for need in c.needs if not works(need)] for c in group}
        usable = [c.name for c in group if not missing[c.name]]
        rest = [f"{name}: {how_to_get(needs)}" for name, needs in missing.items() if needs]
        shown = [_shown(c, version) for c in group if c.name in usable]
        if usable and feature in CHOSEN:
            shown[0] += " (default)"
        found.append(Line(feature, ", ".join(shown), bool(usable), " ".join(rest)))
    return found


def _shown(choice: Choice, version: Callable[[str], str]) -> str:
    """Returns a choice with the versions of what it needs."""
    found = {need: version(need) for need in choice.needs}
    if list(found) == [choice.name.lower()]:
        return f"{choice.name} {found[choice.name.lower()]}".rstrip()
    texts = [f"{need} {text}" for need, text in found.items() if text]
    return f"{choice.name} ({', '.join(texts)})" if texts else choice.name


def how_to_get(modules: Iterable[str], version: tuple[int, int] = sys.version_info[:2]) -> str:
    """Returns in one sentence how to get modules that are missing.

    Args:
      modules: their names.
      version: the version of the running Python.
    """
    modules = list(modules)
    extras = sorted({EXTRAS[module] for module in modules if module in EXTRAS})
    if version >= (3, 11) and any(module in REFERENCE_ONLY for module in modules):
        return f"needs {', '.join(modules)}, and so CPython 3.10: {reinstall('3.10')}."
    if version < (3, 11) and any(module in CORE_ONLY for module in modules):
        return f"needs {', '.join(modules)}, and so CPython 3.11 or newer."
    if all(module in EXTRAS for module in modules):
        return f"{install(extras)}."
    return f"needs {', '.join(modules)}: see above."


def version_of(module: str) -> str:
    """Returns the version of an optional module that is installed; "" of others.

    A version that the stack does not know, and so refuses, is followed by its name.
    """
    if module not in EXTRAS:
        return ""
    distribution = DISTRIBUTIONS.get(module, module)
    if distribution in versions.KNOWN and versions.unknown(distribution):
        low, above = versions.KNOWN[distribution]
        return f"{versions.installed(distribution)}, refused: needs at least {low}, below {above}"
    return versions.installed(distribution)


def owners(package: str) -> set[str]:
    """Returns the names of the installed distributions that have files in a package."""
    if found := metadata.packages_distributions().get(package):
        return set(found)
    # CPython 3.10 knows only the packages of distributions with a file top_level.txt.
    return {
        one.metadata["Name"]
        for one in metadata.distributions()
        if any(file.parts[0] == package for file in one.files or ())
    }


def install(extras: Iterable[str]) -> str:
    """Returns the command that adds extras to this installation."""
    names = ",".join(extras)
    return f"pip install -e '.[{names}]'" if in_checkout() else f"pip install 'rlstack[{names}]'"


def reinstall(python: str = "") -> str:
    """Returns the command that installs rlstack anew.

    Args:
      python: the version of Python to do it with; "" for the one of this installation.
    """
    if in_checkout():
        return f"`make venv{' LANE=launchpad' if python == '3.10' else ''}`"
    return "pip install rlstack" + (f" with CPython {python}" if python else "")


def in_checkout() -> bool:
    """Returns whether this process runs a checkout, and not an installed wheel."""
    return (Path(__file__).resolve().parents[2] / "Makefile").exists()
