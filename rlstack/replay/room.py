"""How much memory there is, asked before it is taken."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int | None:
    """Returns the bytes this process can still take, None where the system does not say."""
    found = [_mem_available(), _cgroup_available()]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def _mem_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> int | None:
    """What the control group (version 2) leaves: its limit without what cannot be given back."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        fields = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = int(fields.get("inactive_file", 0))
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None


def check_room(num_bytes: int, where: str, folder: str | None = None) -> None:
    """Refuses what does not fit into memory.

    Args:
      num_bytes: to be taken.
      where: who asks, for the message.
      folder: where the memory has a file system, such as /dev/shm, which must have room too.

    Raises:
      ValueError: there is not that much.
    """
    rooms = [("memory", available_memory())]
    if folder is not None:
        status = os.statvfs(folder)
        rooms.append((folder, status.f_bavail * status.f_frsize))
    for name, available in rooms:
        if available is not None and num_bytes > available:
            raise ValueError(
                f"{where}: its {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB) must fit into "
                f"what is free of {name}; got {available:,} bytes. Lower max_size or "
                "max_size_per_env, or use a machine with more."
            )
