"""The titles of processes, as ``ps`` shows them."""

from __future__ import annotations

import contextlib


def set_title(title: str) -> None:
    """Sets this process's title; without the package setproctitle, the title stays."""
    with contextlib.suppress(ImportError):  # also runs where only JAX and a few wheels are
        from setproctitle import setproctitle

        setproctitle(title)
