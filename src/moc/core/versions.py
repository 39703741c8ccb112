"""Versions and timelines: which checkpoints belong to the history that training is on.

A step number alone names nothing: after a rollback the same step is reached again with other
values. A version is (attempt, step), and the append-only list of attempts says which versions
are live. That one list is the fence against late writers of a dead attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["AttemptRecord", "Timeline", "Version"]


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """State after optimizer step ``step`` of attempt ``attempt``; ordered by step, then attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step} (attempt {self.attempt})"


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One start of training: ``attempts/NNNN.json``, put by rank 0 as the last act of restore.

    Attributes:
        attempt: number, counted from 1 in the store (torchrun's restart count starts over).
        parent: the attempt before it, 0 for the first.
        resumed_step: step that training resumed from; 0 for a fresh start.
        world_size: number of ranks.
        k_snapshot: experts per MoE layer and snapshot.
        k_persist: experts per MoE layer and persist.
        sources: restored bytes by source, summed over ranks.
        lost: tokens lost in this fault, [layer][expert] (L_ij of eq. 7).
        host: host name of rank 0.
        pid: process id of rank 0.
        time: ISO-8601 UTC.
        places: where each rank's data files are, ``host:/directory``, in rank order; empty where
            one store serves all.
    """

    attempt: int
    parent: int
    resumed_step: int
    world_size: int
    k_snapshot: int
    k_persist: int
    sources: dict[str, int] = {}
    lost: list[list[int]] = []
    host: str = ""
    pid: int = 0
    time: str = ""
    places: list[str] = []


class Timeline(msgspec.Struct, frozen=True):
    """The attempts of a run, oldest first.

    A version is live iff no later attempt resumed below its step: an attempt that resumed at
    step 100 makes every version beyond 100 of the attempts before it dead, for ever. This is the
    design's rule with the minimum taken over *all* later attempts, so that a rollback through
    several attempts kills what lies between.
    """

    attempts: tuple[AttemptRecord, ...] = ()

    @classmethod
    def of(cls, attempts: Sequence[AttemptRecord]) -> Timeline:
        """Timeline of attempts given in any order."""
        return cls(tuple(sorted(attempts, key=lambda a: a.attempt)))

    @property
    def head(self) -> int:
        """Number of the newest attempt, 0 where there is none."""
        return self.attempts[-1].attempt if self.attempts else 0

    def is_live(self, version: Version) -> bool:
        """Whether the version belongs to the history that the newest attempt is on."""
        if not any(a.attempt == version.attempt for a in self.attempts):
            return False
        return all(
            version.step <= a.resumed_step for a in self.attempts if a.attempt > version.attempt
        )

    def live_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempts whose resume point lies on the live history: their losses count."""
        return tuple(
            a
            for i, a in enumerate(self.attempts)
            if all(a.resumed_step <= later.resumed_step for later in self.attempts[i + 1 :])
        )
