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
    "persisted",
    "committed",
    "abandoned",
    "failed",
    "pruned",
    "restored",
    "preempted",
    "warning",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened on one rank.

    Attributes:
        kind: see `EventKind`. ``memory``: the memory tier was laid out. ``snapshot_done``: the
            optimizer may step; ``persisted``: this rank's files are durable; ``committed``: the
            machine may be lost; ``preempted``: a signal asks for the end, and all ranks save this
            step first. Only rank 0 sees ``memory``, ``committed``, ``abandoned`` and
            ``pruned``.
        step: optimizer step. For ``restored`` the step that training goes on after: a logger that
            has later ones rewinds to it, as they are made again.
        attempt: attempt number; steps made again by a later attempt are told apart by it.
        rank: where it happened.
        time: when, in seconds since 1970 on that rank's machine. Events come in the order in
            which the rank heard of them.
        secs: how long it took, 0 where that means nothing. ``stalled``: a part of what training
            waited for this save, to be added up. ``committed``, ``abandoned``: since the persist
            started on rank 0. ``restored``: from the call to the end.
        nbytes: bytes of this rank; ``committed``: of the files that all ranks wrote; ``restored``:
            read by all ranks.
        slowest_rank: for what all ranks did, the one that took longest, -1 for none:
            ``committed`` (its persist) and ``restored`` (its load).
        slowest_secs: what it took.
        buffer: number of the buffer among this rank's, -1 for none: ``snapshot_started``,
            ``snapshot_done``, ``marked``.
        role: what the buffer is from then on, see `moc.choose.retention.Role`; it is RECOVERY
            once the step is committed.
        oldest_expert_age: ``committed``, ``restored``: steps between the step and the oldest
            version of an expert in it.
        sources: ``restored``: bytes by source over all ranks, see `moc.engine.report.SOURCES`.
        text: one line for people.
    """

    kind: EventKind
    step: int
    attempt: int
    rank: int
    time: float = 0.0
    secs: float = 0.0
    nbytes: int = 0
    slowest_rank: int = -1
    slowest_secs: float = 0.0
    buffer: int = -1
    role: Literal["", "SNAPSHOT", "PERSIST"] = ""
    oldest_expert_age: int = 0
    sources: dict[str, int] = {}
    text: str = ""
