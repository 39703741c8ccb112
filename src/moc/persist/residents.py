"""Helper processes of a run on this machine, and whether their trainers live.

A helper names its run, its folder in the memory tier and its trainer on its command line. The
kernel gives a child to another parent in the moment its own ends, so "my parent is the trainer
that started me" is true exactly while that trainer lives; a reused process id cannot fake it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

__all__ = ["Resident", "live_trainers", "residents", "start_time"]

_MARK = b"moc.persist.agent"


class Resident(msgspec.Struct, frozen=True):
    """A helper.

    Attributes:
        pid: process id.
        folder: the run's folder in the memory tier.
        url: of the run.
        trainer: process id of the trainer that started it; 0 where that is gone.
    """

    pid: int
    folder: str
    url: str
    trainer: int = 0


def residents() -> list[Resident]:
    """Helpers on this machine whose command line can be read, by process id."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            if _MARK not in words:
                continue
            parent = _stat(int(entry.parent.name))[1]
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime
        said = dict(pairwise(words))
        trainer = said.get(b"--trainer", b"")
        found.append(
            Resident(
                pid=int(entry.parent.name),
                folder=os.fsdecode(said.get(b"--memory", b"")),
                url=os.fsdecode(said.get(b"--run", b"")),
                trainer=int(parent) if parent.encode() == trainer else 0,
            )
        )
    return sorted(found, key=lambda r: r.pid)


def start_time(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None where there is none."""
    try:
        ticks = int(_stat(pid)[19])
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def live_trainers(folder: str, url: str, ours: Sequence[int]) -> list[Resident]:
    """Helpers of a run whose trainers live and are not ``ours``.

    Args:
        folder: the run's folder in the memory tier.
        url: of the run; a trainer with another memory directory works on it all the same.
        ours: process ids of the job that asks.
    """
    return [
        r
        for r in residents()
        if r.trainer and r.trainer not in ours and (r.folder == folder or r.url == url)
    ]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: state, parent, ..., [19] start in ticks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
