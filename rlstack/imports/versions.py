"""The optional libraries whose environments the adapters know, and their versions.

A new major version may change what the end of an episode means, without an error: gymnax 1.0 no
longer counts a time limit as the end. So other versions are refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import NamedTuple


class JaxLibrary(NamedTuple):
    """A library of environments in JAX, as `JAX_LIBRARIES` has it by its distribution's name.

    The names of its environments begin with that name and "/", as "brax/ant" does. Those of gymnax
    have no such prefix. `rlstack.jax_envs.factory` finds the adapter by the name.
    """

    title: str
    extra: str  # the extra that installs it
    versions: tuple[str, str]


JAX_LIBRARIES = {
    "gymnax": JaxLibrary("gymnax", "jax-envs", ("0.0.9", "2")),
    "brax": JaxLibrary("brax", "brax", ("0.14.2", "1")),
    "craftax": JaxLibrary("Craftax", "craftax", ("1.6", "2")),
    "jaxmarl": JaxLibrary("JaxMARL", "jaxmarl", ("0.2", "1")),
}
PREFIXED = tuple(f"{name}/" for name in JAX_LIBRARIES if name != "gymnax")

# Distribution -> the first version that is known, and the first that is not.
KNOWN = {
    "envpool": ("0.8.4", "2"),
    "gymnasium": ("1.0", "2"),
    "mpe2": ("1.0", "2"),
    "pettingzoo": ("1.25", "2"),
} | {name: library.versions for name, library in JAX_LIBRARIES.items()}


def installed(distribution: str) -> str:
    """Returns the version of a distribution; "" if it is not installed as one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def unknown(distribution: str) -> str:
    """Returns what is wrong with the installed version of a library; "" if it is known.

    Args:
      distribution: one of `KNOWN`. A package without metadata has no version to refuse.
    """
    found = installed(distribution)
    low, above = KNOWN[distribution]
    if not found or _parts(low) <= _parts(found) < _parts(above):
        return ""
    return (
        f"the version of {distribution} must be at least {low} and below {above}, because the end "
        f"of an episode may mean something else in others; got {found}. "
        f"pip install '{distribution}>={low},<{above}'."
    )


def _parts(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without zeros at the end."""
    parts = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)
