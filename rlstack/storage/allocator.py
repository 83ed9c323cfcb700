"""What glibc's memory allocator keeps of the memory that threads have freed.

Orbax writes checkpoints with threads of its own. glibc gives threads one of 8 arenas for each
processor, each of which grows to the most memory that one of its threads has used, and keeps it. So
the process grew for hours, by about a megabyte for each checkpoint in an arena that no writer had
used before. Other C libraries have none of these functions, and then nothing is done.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_FEW = 2


def use_few_arenas() -> None:
    """Lets all threads of this process share two arenas.

    It must be called while there are few threads. Threads that allocate at the same time may wait
    for each other, so it is for processes whose threads mostly wait, such as learners.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _FEW)


def return_free_memory() -> None:
    """Returns free memory to the system: 30 MB after some hundred checkpoints."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
