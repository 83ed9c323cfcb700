"""A cache of compiled functions that the nodes of one program on one machine share.

Many nodes compile the same functions, such as the actors of `heavy_env`. JAX's persistent cache
lets one of them compile for the others. Several processes may write at once: an entry that another
process has not written completely cannot be decompressed; JAX then compiles it and warns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_PREFIX = "rlstack-program-"


@contextlib.contextmanager
def shared() -> Iterator[dict[str, str]]:
    """Makes a private folder for the cache, and removes it at the end.

    Yields:
      The environment variables that make JAX use it; none if the user has chosen a folder.
    """
    if _FOLDER in os.environ:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix=_PREFIX)  # whoever can write to it can run code in the nodes
    try:
        yield {
            _FOLDER: folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove() -> None:
    """Removes the folder of this process's environment, if `shared` has made it.

    The launcher's process calls this at its end, since the process that made it may be killed.
    """
    folder = os.environ.get(_FOLDER, "")
    if os.path.basename(folder).startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
