"""What is added to the text of an error: the user's line that it passed, and open files."""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import traceback

from rlstack.checks import ReportedError, place_of

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


def described(error: BaseException) -> str:
    """Returns "KIND: TEXT (in FILE:LINE: CODE)", with the user's line that the error passed.

    An error that already names its place, or that passed no line of the user, is told without.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text}{where(error)}"


def where(error: BaseException) -> str:
    """Returns " (in FILE:LINE: CODE)" of the user's line that an error passed, if it lacks that."""
    if isinstance(error, ReportedError):
        return ""
    place = _definition(error) or place_of(error, users=True)
    return f" (in {place})" if place and place not in str(error) else ""


def _definition(error: BaseException) -> str:
    """Returns the place of the user's function that a call of the stack did not fit; else ""."""
    fits = re.match(r"([\w.<>]+)\(\) (?:missing|takes|got) ", str(error))
    if not (isinstance(error, TypeError) and fits and error.__traceback__):
        return ""
    *_, (caller, _) = traceback.walk_tb(error.__traceback__)
    if place_of(traceback.extract_stack(caller, limit=1), users=True):
        return ""
    near = list(caller.f_locals.values())
    inside = [one for value in near for one in getattr(value, "__dict__", {}).values()]
    methods = [getattr(type(value), fits[1].rpartition(".")[2], None) for value in near]
    for found in (*near, *inside, *methods):
        found = found.func if isinstance(found, functools.partial) else found
        code = getattr(found, "__code__", None)
        if code is not None and getattr(found, "__qualname__", "") == fits[1]:
            line = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
            return place_of(traceback.StackSummary.from_list([line]), users=True)
    return ""
