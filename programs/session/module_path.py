"""The module search path, with the stack's package first; excludes modules from garbage collection.

`python -m` puts the current directory first. A file `rlstack.py` there, or a folder of that name,
would take the place of the stack's package.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence

_PACKAGE = "rlstack"
_ROOT = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))


def arranged(path: Sequence[str]) -> list[str]:
    """Returns a module search path on which no directory of the user hides the stack's package.

    The current directory comes last, and so do directories that have a module with the package's
    name. All others stay in their order.
    """
    here = os.getcwd()
    path = list(dict.fromkeys(os.path.abspath(entry) if entry else here for entry in path))
    users = [p for p in path if p != _ROOT and (p == here or _hides_the_stack(p))]
    first = [p for p in path if p not in users]
    if _ROOT not in first:
        first.append(_ROOT)
    last = [] if here == _ROOT else [here]
    return [*first, *(p for p in users if p != here), *last]


def _hides_the_stack(directory: str) -> bool:
    names = (_PACKAGE, f"{_PACKAGE}.py")
    return any(os.path.exists(os.path.join(directory, name)) for name in names)


def arrange() -> None:
    """Arranges the module path of this process; the current directory is added if it is missing."""
    sys.path[:] = arranged(sys.path)


def for_children() -> str:
    """Returns ``PYTHONPATH`` for another process that imports the same modules."""
    return os.pathsep.join(arranged(sys.path))


def code_of(module: str) -> str:
    """Returns code for ``python -c`` that runs the `main` of a module.

    ``python -m`` would find modules of the current directory first. So would ``-c``, which puts ""
    first, but not with PYTHONSAFEPATH: then the first entry is one of ``PYTHONPATH``.
    """
    first = "sys.path[:] = filter(None, sys.path)"
    return f"import sys; {first}; from {module} import main; sys.exit(main())"


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """Excludes objects that the body's imports create from garbage collection.

    Use it at the start of a process. JAX and the packages that use it create 250,000 objects, which
    the garbage collector would otherwise scan again and again: during the imports, while functions
    are traced, and at the end of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
