"""What is added to the text of an error: the user's line that it passed, and open files."""

from __future__ import annotations

import errno
import os
import resource
import traceback

from rlstack.checks import place_of

_TEXT = os.strerror(errno.EMFILE)
_SPARE = 4  # a library may give up before the last descriptor is taken


def advice(text: str) -> str:
    """Returns the limit that an error's text is about and how to raise it; "" for other errors.

    Args:
      text: the error, with its traceback if there is one. Libraries in C++ pass on the system's
        words, but no number.
    """
    if _TEXT not in text:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"A process may have {limit} open files here (RLIMIT_NOFILE). Raise the limit with "
        f"`ulimit -n {max(4096, 4 * limit)}` before the command, or make fewer environments, "
        "workers and actors."
    )


def noted(text: str) -> str:
    """Returns an error's text, and says so if this process has no more files to open.

    An error that follows from it, such as a connection that cannot be made, may not say it.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        used = limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    return f"{text} ({_TEXT})" if _TEXT not in text and used >= limit - _SPARE else text


def user_place(error: BaseException, *, code: bool = True) -> str:
    """Returns "FILE:LINE: CODE" of the deepest line of the user that an error passed; "" for none.

    The error's causes count too.

    Args:
      error: the error.
      code: False for "FILE:LINE".
    """
    lines: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:
        lines += traceback.extract_tb(cause.__traceback__)
        cause = cause.__cause__
    place = place_of(traceback.StackSummary.from_list(lines), users=True)
    text = next((x.line for x in reversed(lines) if place == f"{x.filename}:{x.lineno}"), "")
    return f"{place}: {text}" if code and text else place
