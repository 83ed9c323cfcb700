"""Orbax without its warnings, log lines and late tracebacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[Any]:
    """Gives ``orbax.checkpoint``, imported late because it costs a second."""
    logger = logging.getLogger("absl")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import orbax.checkpoint as ocp

        logger.setLevel(logging.CRITICAL)
        shown = sys.unraisablehook
        sys.unraisablehook = functools.partial(_unless_late, shown)
        try:
            yield ocp
            sys.unraisablehook = shown  # after an error the late ones are still to come
        finally:
            logger.setLevel(level)


def _unless_late(shown: Any, error: sys.UnraisableHookArgs) -> None:
    """Show an error of a thread that has no caller, but for those of writers that come too late.

    When one array cannot be written Orbax closes its event loop under the other arrays' writers,
    and each of their threads prints a traceback about that in the middle of what others print.
    """
    if str(error.exc_value) != "Event loop is closed":
        shown(error)
