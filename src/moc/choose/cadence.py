"""When a step is snapshotted, and when a snapshot is marked to be persisted."""

from __future__ import annotations

from moc.choose.policy import Policy

__all__ = ["is_persist_due", "is_snapshot_due", "next_snapshot"]


def is_snapshot_due(step: int, policy: Policy) -> bool:
    """Whether the state after optimizer step ``step`` is snapshotted: at every multiple."""
    return step > 0 and step % policy.snapshot_every == 0


def next_snapshot(step: int, policy: Policy) -> int:
    """The first step after ``step`` at which a snapshot is due."""
    return (step // policy.snapshot_every + 1) * policy.snapshot_every


def is_persist_due(step: int, last_marked_step: int | None, policy: Policy) -> bool:
    """Whether a snapshot at ``step`` is the first at or after a multiple of ``persist_every``.

    Due stays due: a multiple that was passed while a persist was outstanding, or where no snapshot
    was taken, counts at the next snapshot; several of them count once.

    Args:
        step: step of the snapshot.
        last_marked_step: step of the newest save that was marked to persist, of this attempt or
            the step it resumed from; None (or -1) where there is none yet, which counts as step 0.
        policy: ``persist_every``; None there is never due.
    """
    every = policy.persist_every
    return every is not None and step // every > max(last_marked_step or 0, 0) // every
