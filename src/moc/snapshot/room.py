"""How much memory there is: on the tmpfs of the memory tier, and in the machine or container."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_ram", "usable_bytes"]

_GROUPS = (  # limit, use, statistics, and the name of what can be dropped; v2, then v1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def usable_bytes(memory_dir: Path) -> int:
    """Free bytes of the file system that holds the memory tier."""
    facts = os.statvfs(memory_dir)
    return facts.f_bavail * facts.f_frsize


def available_ram(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can be taken without swapping: the machine's, or less where a cgroup limits it.

    Args:
        meminfo: the kernel's table.
        groups: where cgroups are mounted; in a container its own group is the root there.

    Returns:
        None where the kernel does not say.
    """
    known = []
    try:
        lines = meminfo.read_text().splitlines()
        known += [int(n.split()[1]) * 1024 for n in lines if n.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, use, stat, droppable in _GROUPS:
        try:
            most = int((groups / limit).read_text())  # "max" is no number: no limit
            used = int((groups / use).read_text())
            table = dict(line.split() for line in (groups / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        known.append(max(0, most - used + int(table.get(droppable, 0))))
    return min(known, default=None)
