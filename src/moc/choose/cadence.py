"""When a step is snapshotted, and when a snapshot is marked to be persisted."""

from __future__ import annotations

from datetime import timedelta

from moc.choose.policy import Policy

__all__ = ["NEVER", "is_overdue", "is_persist_due", "is_snapshot_due", "next_snapshot"]

NEVER = 1 << 62
"""A step that no training reaches."""


def is_snapshot_due(step: int, policy: Policy, timed: int = -1) -> bool:
    """Whether the state after optimizer step ``step`` is snapshotted.

    Args:
        step: the step just made.
        policy: ``snapshot_every``; in steps, every multiple is due.
        timed: where it is a time, the step that all ranks agreed on; -1 for none yet.
    """
    every = policy.snapshot_every
    if isinstance(every, timedelta):
        return 0 < timed <= step
    return step > 0 and step % every == 0


def next_snapshot(step: int, policy: Policy, timed: int = -1) -> int:
    """The first step after ``step`` at which a snapshot is known to be due; `NEVER` for none.

    Arguments are those of `is_snapshot_due`.
    """
    every = policy.snapshot_every
    if isinstance(every, timedelta):
        return timed if timed > step else NEVER
    return (step // every + 1) * every


def is_persist_due(
    step: int, last_marked_step: int | None, policy: Policy, *, overdue: bool = False
) -> bool:
    """Whether a snapshot at ``step`` is the first at or after a multiple of ``persist_every``.

    Due stays due: a multiple that was passed while a persist was outstanding, or where no snapshot
    was taken, counts at the next snapshot; several of them count once.

    Args:
        step: step of the snapshot.
        last_marked_step: step of the newest save that was marked to persist, of this attempt or
            the step it resumed from; None (or -1) where there is none yet, which counts as step 0.
        policy: ``persist_every``; None there is never due.
        overdue: where that is a time, what rank 0 said in the ticket; see `is_overdue`.
    """
    every = policy.persist_every
    if every is None:
        return False
    if isinstance(every, timedelta):
        return overdue
    return step // every > max(last_marked_step or 0, 0) // every


def is_overdue(elapsed_secs: float, gap_secs: float, every: timedelta) -> bool:
    """Whether of all snapshots this one is the nearest to the time when a persist is due.

    Without that, snapshots every 10 minutes and persists every 30 would, by one step's time, be
    persists every 40.

    Args:
        elapsed_secs: since the last marked save, or since training began.
        gap_secs: since the last snapshot; the next one is thought to come as much later.
        every: ``persist_every``.
    """
    return elapsed_secs + gap_secs / 2 >= every.total_seconds()
