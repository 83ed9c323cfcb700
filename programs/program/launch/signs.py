"""What a process shows: its title, and to its supervisor signs of life and its signals.

It imports almost nothing, because it runs before a node has imported anything.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from rlstack.programs.program import supervisor
from rlstack.programs.session import timing


def title(node: str, run_dir: str) -> str:
    """Returns the title of the process of a node, as `ps` shows it."""
    return f"rlstack: {node} {run_dir}"


def give() -> None:
    """Starts a thread that gives signs of life, and tells the supervisor of signals at once.

    Python runs handlers of signals only when the main thread returns from C, where XLA compiles for
    minutes. Without a supervisor this does nothing. Call it in the main thread.
    """
    handle = os.environ.get(supervisor.END)
    if handle is None:
        return
    receives, sends = os.pipe()
    os.set_blocking(sends, False)
    signal.set_wakeup_fd(sends, warn_on_full_buffer=False)
    # A forked child has the same handlers, but its signals are not this process's.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    arguments = (int(handle), receives, os.getppid())
    threading.Thread(target=_run, args=arguments, name="signs", daemon=True).start()


def _run(handle: int, signals: int, parent: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            os.utime(handle)
            if select.select([signals], [], [], timing.HEARTBEAT)[0]:
                told = {signal.SIGTERM, signal.SIGINT} & set(os.read(signals, 64))
                if told and os.getppid() == parent:
                    os.kill(parent, supervisor.ENDING)
