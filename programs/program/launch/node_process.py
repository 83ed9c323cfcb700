"""What the process of one node runs, as the child of its supervisor.

The process has a title, gives signs of life, and says how it ends.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from rlstack.envs import watch
from rlstack.programs.program import supervisor
from rlstack.programs.program.launch import signs
from rlstack.programs.session import signals
from rlstack.programs.session.titles import set_title


def run(name: str, run_dir: str, program: bytes) -> None:
    """Runs a node and ends this process.

    Args:
      name: the name of the node.
      run_dir: the run directory, which the title of the process shows.
      program: the `rlstack.programs.program.launch.wiring.Program`, pickled.
    """
    set_title(signs.title(name, run_dir))
    signals.give_handlers_a_stack()
    signs.give()
    stop = threading.Event()

    def run_node() -> None:
        made = pickle.loads(program)  # imports the user's modules
        from rlstack.programs.program.launch import wiring

        _stop_on_signals(stop)
        wiring.run_node(made, name, stop)

    run_to_end(run_node, stop)


def _stop_on_signals(stop: threading.Event) -> None:
    """Sets the event on SIGTERM and SIGINT; until now, they ended the process at once."""

    def receive(*_: object) -> None:
        # In another thread: the main thread, which runs this, may hold the event's lock.
        _thread.start_new_thread(stop.set, ())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)


def run_to_end(run: Callable[[], None], stop: threading.Event) -> None:
    """Runs a node and ends this process; the supervisor records and restarts.

    Args:
      run: returns at the ordered end of the node.
      stop: the node's stop event.
    """
    code, end = 0, supervisor.End(ordered=True)
    try:
        with watch.at_last_resort(_end_now):
            run()
        if stop.is_set():  # by a signal; the supervisor knows who sent it
            end = supervisor.STOPPED
    except BaseException as error:
        code, end = 1, _end_of(error)
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
    supervisor.tell(end)
    _exit_process(code)


def _end_now(reason: str) -> None:
    """Ends this process while its main thread hangs in code of others."""
    supervisor.tell(supervisor.End(reason=reason))
    os._exit(1)


def _end_of(error: BaseException) -> supervisor.End:
    try:
        from rlstack.programs.program import base
        from rlstack.programs.program.stopping import end_of
    except Exception:  # which is the error itself
        reason = f"{type(error).__name__}: {error}"
        return supervisor.End(reason=reason, traceback="".join(traceback.format_exception(error)))
    return end_of(error, base.ran_seconds())


def _exit_process(code: int) -> None:
    """Ends the process without the interpreter's own teardown.

    During teardown, threads of Courier and of JAX may access freed memory and abort.
    """
    with contextlib.suppress(BaseException):  # flushing fails if the log is on a full disk
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
