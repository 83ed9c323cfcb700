"""Resolves names that users give, and suggests corrections of misspelt names."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any


def load_object(reference: str) -> Any:
    """Imports "module:name".

    Raises:
      ValueError: there is no such module or name.
    """
    module_name, _, name = reference.partition(":")
    if not (module_name and name):
        raise ValueError(f'{reference!r}: must be of the form "module:name".')
    try:
        module = importlib.import_module(module_name)
        return getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ValueError(
            f"{reference!r}: there is no module {module_name!r}; run where it can be imported."
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"{reference!r}: module {module_name} has no {name!r}{nearest(name, vars(module))}."
        ) from error


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """Returns "; did you mean X?" if a known name is similar, else a list of some known names."""
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(sorted(known))}" if len(known) <= 20 else ""


def import_modules(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, in alphabetical order, so that each registers itself.

    Args:
      package: the package's name.
      path: its ``__path__``.
    """
    for module in sorted(found.name for found in pkgutil.iter_modules(path)):
        importlib.import_module(f"{package}.{module}")
