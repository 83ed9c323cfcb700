"""Settings of glibc's memory allocator. With other C libraries the functions do nothing."""

from __future__ import annotations

import ctypes

# M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_LARGEST_KEPT = 1 << 30  # bytes; larger blocks, such as tables of replays, are returned if freed
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees, in one arena that all threads share.

    XLA allocates the memory of all intermediate results each time that a computation is called.
    By default glibc returns blocks of more than 32 MB to the system as soon as they are freed, so
    each update of a network with convolutions waits for thousands of page faults: 30 of 145 ms for
    the gradients of the Nature network for 256 frames, on two cores. Only the first arena can keep
    such blocks.

    More arenas also use more memory. By default glibc has 8 for each processor, and each grows to
    the most memory that one of its threads has used. Orbax writes checkpoints in new threads, so
    a learner grew for hours, by about a megabyte each time that a writer got an arena that no
    writer had used before.

    Call it while there are few threads, because a thread keeps the arena that it has.
    Threads that allocate at the same time may wait for each other, so it is for processes whose
    threads mostly wait, such as learners.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_ARENA_MAX, 1)
    # Before 2.35, glibc refuses thresholds of more than 32 MB. Setting only the second threshold
    # would then turn off the rule by which glibc adjusts both.
    if mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_TRIM_THRESHOLD, _NEVER)


def return_free_memory() -> None:
    """Returns free memory to the system: 30 MB after some hundred checkpoints."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
