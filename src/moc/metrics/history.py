"""What a run's events tell: read from JSON lines of all ranks, folded into saves and spans."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

import msgspec

from moc.core.events import Event
from moc.errors import ConfigError

__all__ = ["Attempt", "History", "Phase", "Save", "Span", "fold", "read_events"]

Phase = Literal["COPY", "SNAPSHOT", "PERSIST", "RECOVERY"]
"""What a buffer is: written to, or one of the roles of the paper's triple buffer."""

Fate = Literal["committed", "failed", "abandoned", "in memory", "not resolved"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A buffer in one phase; times in seconds since 1970."""

    rank: int
    buffer: int
    step: int
    phase: Phase
    start: float
    end: float


@dataclass(kw_only=True)
class Save:
    """One save of one attempt; figures by rank where they are a rank's own.

    Attributes:
        attempt: that made it.
        step: optimizer step.
        marked: it was to be persisted.
        fate: what became of it.
        why: of a failure or an abandonment.
        stall_secs: what training waited.
        snapshot_secs: duration of the overlapped copy.
        snapshot_bytes: of the snapshot.
        persist_secs: until a rank's files were durable.
        persist_bytes: of a rank's files.
        commit_secs: from the start of the persist on rank 0 to the commit.
        commit_bytes: of the files of all ranks.
        slowest_rank: with the longest persist, -1 where it is not known.
        slowest_secs: what it took.
    """

    attempt: int
    step: int
    marked: bool = False
    fate: Fate = "in memory"
    why: str = ""
    stall_secs: dict[int, float] = field(default_factory=dict)
    snapshot_secs: dict[int, float] = field(default_factory=dict)
    snapshot_bytes: dict[int, int] = field(default_factory=dict)
    persist_secs: dict[int, float] = field(default_factory=dict)
    persist_bytes: dict[int, int] = field(default_factory=dict)
    commit_secs: float = 0.0
    commit_bytes: int = 0
    slowest_rank: int = -1
    slowest_secs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of training, as far as its events tell.

    Attributes:
        number: of the attempt.
        ranks: that told anything.
        start: time of the first event.
        end: time of the last one.
        starts: when rank 0 (or the lowest there is) started which snapshot: (step, time).
        spans: of all buffers.
        restored: the event of the restore on the lowest rank, None for a fresh start.
    """

    number: int
    ranks: tuple[int, ...]
    start: float
    end: float
    starts: tuple[tuple[int, float], ...]
    spans: tuple[Span, ...]
    restored: Event | None


@dataclass(frozen=True, kw_only=True)
class History:
    """All of it.

    Attributes:
        attempts: in order.
        saves: in order of attempt and step.
        troubles: events that tell of something wrong, in order of time.
    """

    attempts: tuple[Attempt, ...]
    saves: tuple[Save, ...]
    troubles: tuple[Event, ...]


def read_events(source: str) -> tuple[list[Event], list[str]]:
    """Events of a file, of the files of a glob, or of ``events-*.jsonl`` in a run directory.

    Returns:
        Events in order of time, and one line per file with lines that could not be read: the last
        line of a killed rank is often cut off.

    Raises:
        ConfigError: there is no such file, or no event in any.
    """
    if "://" in source:
        raise ConfigError(f"{source}: events are read from a local disk; name the files")
    if os.path.isdir(source):
        files = sorted(Path(source).glob("events-*.jsonl"))
        where = f"{source} has no events-*.jsonl; give the manager on_event=JsonlSink(...)"
    else:
        files = [Path(p) for p in sorted(glob(source))] if has_magic(source) else [Path(source)]
        where = f"no file is named {source}"
    files = [file for file in files if file.is_file()]
    if not files:
        raise ConfigError(where)
    events: list[Event] = []
    problems = []
    decoder = msgspec.json.Decoder(Event)
    for file in files:
        bad = []
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    events.append(decoder.decode(line))
            except msgspec.MsgspecError:
                bad.append(number)
        if bad:
            shown = ", ".join(map(str, bad[:4])) + ", ..." * (len(bad) > 4)
            problems.append(f"{file}: {len(bad)} lines are no events and were left out: {shown}")
    if not events:
        raise ConfigError(f"no event in {', '.join(map(str, files[:4]))}: {problems or 'empty'}")
    return sorted(events, key=lambda e: (e.attempt, e.time)), problems


def fold(events: Iterable[Event]) -> History:
    """Events of all ranks into what is drawn."""
    by_attempt: dict[int, list[Event]] = {}
    for event in events:
        by_attempt.setdefault(event.attempt, []).append(event)
    attempts = [_attempt(number, told) for number, told in sorted(by_attempt.items())]
    saves: dict[tuple[int, int], Save] = {}
    for number, told in sorted(by_attempt.items()):
        for event in sorted(told, key=lambda e: e.time):
            _account(saves, number, event)
    for save in saves.values():
        if save.marked and save.fate == "in memory":
            save.fate = "not resolved"
    troubles = [
        event
        for _, told in sorted(by_attempt.items())
        for event in sorted(told, key=lambda e: e.time)
        if event.kind in ("failed", "abandoned", "torn", "warning")
    ]
    return History(
        attempts=tuple(attempts),
        saves=tuple(saves[key] for key in sorted(saves)),
        troubles=tuple(troubles),
    )


def _account(saves: dict[tuple[int, int], Save], attempt: int, event: Event) -> None:
    """Add an event to the save that it is about."""
    key, rank = (attempt, event.step), event.rank
    if event.kind == "snapshot_started":
        saves.setdefault(key, Save(attempt=attempt, step=event.step))
    save = saves.get(key)
    if save is None:
        return
    match event.kind:
        case "snapshot_done":
            save.snapshot_secs[rank] = event.secs
            save.snapshot_bytes[rank] = event.nbytes
        case "stalled":
            save.stall_secs[rank] = save.stall_secs.get(rank, 0.0) + event.secs
        case "marked":
            save.marked = True
        case "persisted":
            save.persist_secs[rank], save.persist_bytes[rank] = event.secs, event.nbytes
        case "committed":
            save.fate, save.commit_secs, save.commit_bytes = "committed", event.secs, event.nbytes
            save.slowest_rank, save.slowest_secs = event.slowest_rank, event.slowest_secs
        case "failed" | "abandoned" if save.fate not in ("committed", "failed"):
            save.fate = "failed" if event.kind == "failed" else "abandoned"
            save.why = save.why or event.text


def _attempt(number: int, events: Sequence[Event]) -> Attempt:
    ranks = tuple(sorted({e.rank for e in events}))
    restored = [e for e in events if e.kind == "restored"]
    # A restore is noted at its end, and warnings may come before an attempt has its number.
    start = min(e.time - e.secs * (e.kind == "restored") for e in events)
    end = max(e.time for e in events)
    spans: list[Span] = []
    for rank in ranks:
        buffers = _Buffers(rank)
        for event in sorted(events, key=lambda e: e.time):
            if event.rank == rank or event.kind in ("committed", "abandoned"):
                buffers.hear(event)
        spans += buffers.end(end)
    return Attempt(
        number=number,
        ranks=ranks,
        start=start,
        end=end,
        starts=tuple(
            (e.step, e.time)
            for e in sorted(events, key=lambda e: e.time)
            if e.kind == "snapshot_started" and e.rank == ranks[0]
        ),
        spans=tuple(spans),
        restored=min(restored, key=lambda e: e.rank) if restored else None,
    )


class _Buffers:
    """The phases of one rank's buffers. What all ranks share, rank 0 alone tells."""

    def __init__(self, rank: int) -> None:
        self.spans: list[Span] = []
        self._rank = rank
        self._now: dict[int, tuple[int, Phase, float]] = {}
        self._committed: set[int] = set()

    def hear(self, event: Event) -> None:
        """Take in an event; in order of time."""
        step, time = event.step, event.time
        match event.kind:
            case "snapshot_started":
                self._turn(event.buffer, step, "COPY", time)
            case "snapshot_done":
                phase: Phase = "PERSIST" if event.role == "PERSIST" else "SNAPSHOT"
                if step in self._committed:  # clocks of two nodes differ
                    phase = "RECOVERY"
                self._turn(event.buffer, step, phase, time)
            case "committed":
                self._committed.add(step)
                for buffer, (held, phase, _) in list(self._now.items()):
                    if phase == "RECOVERY":
                        self._turn(buffer, held, "SNAPSHOT", time)
                    elif held == step and phase != "COPY":
                        self._turn(buffer, held, "RECOVERY", time)
            case "abandoned" | "failed":
                for buffer, (held, phase, _) in list(self._now.items()):
                    if held == step and phase in ("PERSIST", "COPY"):
                        self._turn(buffer, held, "SNAPSHOT", time)

    def end(self, time: float) -> list[Span]:
        """All spans, the last ones cut there."""
        for buffer, (step, phase, _) in list(self._now.items()):
            self._turn(buffer, step, phase, time)
        return [span for span in self.spans if span.end > span.start]

    def _turn(self, buffer: int, step: int, phase: Phase, time: float) -> None:
        if buffer in self._now:
            held, old, since = self._now[buffer]
            time = max(time, since)
            self.spans.append(
                Span(rank=self._rank, buffer=buffer, step=held, phase=old, start=since, end=time)
            )
        self._now[buffer] = (step, phase, time)
