"""Compares the versions of two nodes when one first calls the other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import rlstack
from rlstack.rpc.header import MAGIC

REFUSED = b"RLSTACK-VERSION "  # a text follows; never changes, so that all versions can read it
_UNKNOWN = "unknown"  # the version of a checkout that is not installed


@functools.cache
def own() -> bytes:
    """Returns what must be equal in all processes of a program.

    These are rlstack's version, the version of the format of messages, and those parts of the
    versions of Python, JAX and numpy between which pickles or random numbers differ. A build of a
    commit counts as the version that it leads to: an editable installation keeps the version of
    the day on which it was made.
    """
    version = rlstack.__version__.partition(".dev")[0]
    return f"{version} {MAGIC[-1]} {_packages(_version)}".encode()


def _packages(version: Callable[[str], str]) -> str:
    """Returns the versions of the packages, as in ``CPython-3.12,JAX-0.12,numpy-2``."""
    python = ".".join(map(str, sys.version_info[:2]))
    jax, numpy = version("jax").split("."), version("numpy").split(".")
    return f"CPython-{python},JAX-{'.'.join(jax[:2])},numpy-{numpy[0]}"


def _version(distribution: str) -> str:
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _UNKNOWN


def differences(theirs: bytes, place: str, mine: bytes | None = None) -> str:
    """Returns an error if another process's versions do not fit this one's; "" if they do.

    A version that is not known fits all: that of a checkout that is not installed, or what an older
    process does not send.

    Args:
      theirs: the result of `own` in the other process; empty for a version that does not send it.
      place: a description of the other process, for the error.
      mine: the result of `own` in this process; None computes it.
    """
    words = [side.decode(errors="replace").split() for side in (theirs, mine or own())]
    if not theirs:
        return ""
    (version, wire, packages), (my_version, my_wire, my_packages) = (
        [*side, "", "", ""][:3] for side in words
    )
    fits = version == my_version or _UNKNOWN in (version, my_version)
    if not fits or wire != my_wire:
        return (
            f"rlstack must have the same version everywhere; {place} has {version} with messages "
            f"of version {wire}, and this process has {my_version} with version {my_wire}. Install "
            "one version on all hosts."
        )
    return _other_packages(packages, my_packages, place)


def _other_packages(theirs: str, mine: str, place: str) -> str:
    pairs = zip(theirs.split(","), mine.split(","), strict=False)
    if all(a == b or not a or not b or _UNKNOWN in a + b for a, b in pairs):
        return ""
    shown, my_shown = (side.replace("-", " ").replace(",", ", ") for side in (theirs, mine))
    return (
        f"all processes of a program must have the same environment; {place} has {shown}, and this "
        f"process has {my_shown}. Install one environment on all hosts (`rlstack doctor` shows it)."
    )
