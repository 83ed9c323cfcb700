"""How glibc's memory allocator keeps the memory that a learner frees.

Other C libraries have none of these functions, and then nothing is done.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # M_ARENA_MAX ... of malloc.h
_LARGEST_KEPT = 1 << 30  # bytes; larger blocks, such as tables of replays, are returned if freed
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees, in one arena that all threads share.

    XLA allocates the memory of all intermediate results of a computation with each call. By default
    glibc returns blocks of more than 32 MB to the system as soon as they are freed, so each update
    of a network with convolutions waits for thousands of new pages: on two cores, 30 of 145 ms of
    the Nature network's gradients for 256 frames. Only the first arena can keep such blocks.

    More arenas also keep more. By default glibc has 8 for each processor, each of which grows to
    the most memory that one of its threads has used. Orbax writes checkpoints with threads of its
    own, so a learner grew for hours, by about a megabyte for each checkpoint in an arena that no
    writer had used before.

    It must be called while there are few threads, because a thread keeps the arena that it has.
    Threads that allocate at the same time may wait for each other, so it is for processes whose
    threads mostly wait, such as learners.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_ARENA_MAX, 1)
    # Before 2.35, glibc refuses thresholds of more than 32 MB. It must then keep its own rule for
    # both, which a second threshold alone would end.
    if mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_TRIM_THRESHOLD, _NEVER)


def return_free_memory() -> None:
    """Returns free memory to the system: 30 MB after some hundred checkpoints."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
