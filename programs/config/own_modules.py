"""Finds agents and presets of the user's own, so that nobody has to edit this checkout.

A module registers what it has when it is imported (`rlstack.agents.register`,
`rlstack.programs.config.presets.registry`). The modules come from the option ``--module``, and from
entry points of installed packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable

from rlstack.checks import ExitError, no_exits
from rlstack.references import import_named

AGENTS, PRESETS = "rlstack.agents", "rlstack.presets"  # groups of entry points


def load(name: str) -> None:
    """Imports a module.

    Raises:
      ValueError: there is no such module, or importing it fails.
    """
    try:
        with no_exits():
            import_named(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"--module {name}: it cannot be imported: {error}.") from error
        raise ValueError(
            f"--module {name}: there is no such module. Run where it can be imported, such as in "
            "its directory, or add its directory to PYTHONPATH."
        ) from error
    except (ImportError, ExitError) as error:
        raise ValueError(f"--module {name}: it cannot be imported: {error}.") from error


def load_all(names: Iterable[str]) -> None:
    """Imports modules; see `load`."""
    for name in names:
        load(name)


@functools.cache
def load_entry_points(group: str) -> None:
    """Imports what installed packages declare in a group of entry points, once.

    Raises:
      ImportError: an entry point cannot be imported.
    """
    for point in importlib.metadata.entry_points(group=group):
        try:
            with no_exits():
                point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else "a package"
            raise ImportError(
                f"the entry point {point.name} = {point.value} of {package}, in the group {group}, "
                f"must be importable; got {type(error).__name__}: {error}. Repair or uninstall it"
            ) from error
