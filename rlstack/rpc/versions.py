"""Compares the versions of two nodes when one first calls the other."""

from __future__ import annotations

import functools

import rlstack
from rlstack.rpc.header import MAGIC

REFUSED = b"RLSTACK-VERSION "  # a text follows; never changes, so that all versions can read it
_UNKNOWN = "unknown"  # of a checkout that is not installed


@functools.cache
def own() -> bytes:
    """Returns this process's version of rlstack and its version of the format of messages."""
    return f"{rlstack.__version__} {MAGIC[-1]}".encode()


def differences(theirs: bytes, place: str, mine: bytes | None = None) -> str:
    """Returns an error if another process's versions do not fit this one's; "" if they do.

    The version of rlstack of a checkout that is not installed is unknown, and fits all.

    Args:
      theirs: what `own` returned there; empty for a version that does not send it.
      place: the other process, in words.
      mine: what `own` returned here, by default.
    """
    words = [side.decode(errors="replace").split() for side in (theirs, mine or own())]
    if not theirs:
        return ""
    (version, wire), (my_version, my_wire) = ([*side, "", ""][:2] for side in words)
    fits = version == my_version or _UNKNOWN in (version, my_version)
    if fits and wire == my_wire:
        return ""
    return (
        f"rlstack must have the same version everywhere; {place} has {version} with messages of "
        f"version {wire}, and this process has {my_version} with version {my_wire}. Install one "
        "version on all hosts."
    )
