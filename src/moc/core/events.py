"""What happened: one stream of frozen events to one callback."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Event", "EventKind"]

EventKind = Literal[
    "memory",
    "snapshot_started",
    "snapshot_done",
    "stalled",
    "torn",
    "marked",
    "committed",
    "abandoned",
    "failed",
    "pruned",
    "restored",
    "warning",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened on one rank.

    Attributes:
        kind: see `EventKind`. ``memory``: the memory tier was laid out. ``snapshot_done``: the
            optimizer may step; ``committed``: the machine may be lost. Only rank 0 sees
            ``memory``, ``committed`` and ``abandoned``.
        step: optimizer step.
        attempt: attempt number.
        rank: where it happened.
        secs: how long it took; for ``stalled`` what training waited for this save.
        nbytes: bytes of this rank.
        text: one line for people.
    """

    kind: EventKind
    step: int
    attempt: int
    rank: int
    secs: float = 0.0
    nbytes: int = 0
    text: str = ""
