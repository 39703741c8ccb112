"""What is known of one run, folded from the records of its ranks; no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["RunLog"]

Record = dict[str, Any]


@dataclass(kw_only=True)
class RunLog:
    """Grows by `feed`, which also says what a person wants to read about it.

    Attributes:
        world_size: ranks of the run.
        pids: rank to process id, of the newest attempt.
        curves: for each attempt the (step, loss) of its steps.
        validation: step to loss on held-out text.
        step: newest step of the newest attempt.
        snapshot: newest step that all ranks hold in memory.
        marked: steps chosen to be persisted.
        commit: newest step that is committed.
        reports: what each restore told, None where there was nothing.
        final: the record of the end.
    """

    world_size: int
    pids: dict[int, int] = field(default_factory=dict)
    curves: list[list[tuple[int, float]]] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    step: int = 0
    rate: float = 0.0
    snapshot: int = 0
    commit: int = 0
    marked: set[int] = field(default_factory=set)
    committed_bytes: list[int] = field(default_factory=list)
    reports: list[Record | None] = field(default_factory=list)
    final: Record | None = None
    _snapshots: dict[tuple[int, int], dict[int, Record]] = field(default_factory=dict)
    _waiting: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    _stalls: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _blocking: dict[int, list[float]] = field(default_factory=dict)

    def feed(self, rank: int, record: Record) -> list[str]:
        """Take in a record of a rank.

        Returns:
            Lines for people, mostly none.
        """
        handler = getattr(self, f"_on_{record['kind']}", None)
        return handler(rank, record) or [] if handler else []

    def may_lose_node(self, not_before: int) -> bool:
        """Whether a loss now would show all: something committed, something newer in memory."""
        return (
            self.step >= max(not_before, self.snapshot + 2)
            and 0 < self.commit < self.snapshot
            and self.snapshot not in self.marked
        )

    def stall_secs(self) -> float | None:
        """Median over saves of the longest that a rank waited; None if nothing was saved."""
        return (
            median(max(secs.values()) for secs in self._stalls.values()) if self._stalls else None
        )

    def blocking_secs(self) -> float | None:
        """Median over blocking saves of the longest that a rank waited."""
        return median(max(secs) for secs in self._blocking.values()) if self._blocking else None

    def saves(self) -> int:
        """How many saves there were."""
        return len(self._stalls)

    def checkpoint_bytes(self) -> tuple[int, int]:
        """Bytes of a full checkpoint (the first) and of a partial one, all ranks together."""
        sizes = self.committed_bytes or [0]
        return sizes[0], round(median(sizes[1:] or sizes))

    def _on_start(self, rank: int, record: Record) -> None:
        self.pids[rank] = record["pid"]

    def _on_ready(self, rank: int, record: Record) -> None:
        if rank == 0:
            self.curves.append([])
            self.reports.append(record["report"])

    def _on_step(self, rank: int, record: Record) -> None:
        if rank != 0:
            return
        self.step = record["step"]
        self.curves[-1].append((record["step"], record["loss"]))
        rate = record["tokens"] / record["secs"]
        self.rate = rate if not self.rate else 0.9 * self.rate + 0.1 * rate

    def _on_validation(self, rank: int, record: Record) -> None:
        if rank == 0:
            self.validation[record["step"]] = record["loss"]

    def _on_blocking(self, rank: int, record: Record) -> None:
        self._blocking.setdefault(record["step"], []).append(record["secs"])

    def _on_end(self, rank: int, record: Record) -> list[str]:
        if rank != 0:
            return []
        self.final = record
        return [f"step {self.step:>5}  finished       validation loss {record['val_loss']:.4f}"]

    def _on_event(self, rank: int, record: Record) -> list[str]:
        attempt, step, kind = record["attempt"], record["step"], record["event"]
        if kind == "snapshot_done":
            ranks = self._snapshots.setdefault((attempt, step), {})
            ranks[rank] = record
            if len(ranks) == self.world_size:
                self.snapshot = max(self.snapshot, step)
                nbytes = sum(each["nbytes"] for each in ranks.values())
                secs = max(each["secs"] for each in ranks.values())
                line = f"step {step:>5}  snapshot done  {_megabytes(nbytes)} in {secs:.3f} s"
                return [line, *self._waiting.pop((attempt, step), [])]
        elif kind == "stalled":
            ranks_waited = self._stalls.setdefault((attempt, step), {})
            ranks_waited[rank] = ranks_waited.get(rank, 0.0) + record["secs"]
        elif kind == "marked":
            self.marked.add(step)
        elif kind == "committed":
            self.commit = max(self.commit, step)
            self.committed_bytes.append(record["nbytes"])
            line = f"step {step:>5}  committed      {_megabytes(record['nbytes'])}"
            # A rank tells of its snapshot in its next step: the commit may be heard of before.
            if 0 < len(self._snapshots.get((attempt, step), {})) < self.world_size:
                self._waiting[attempt, step] = [line]
                return []
            return [line]
        elif kind in ("abandoned", "failed", "torn", "warning"):
            return [f"step {step:>5}  {kind} on rank {rank}: {record['text']}"]
        return []


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
