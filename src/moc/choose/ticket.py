"""The ticket: one short vector per save that makes every rank decide alike.

A rank must not decide alone what concerns all: commits become known on each rank at another
time, copies take longer here than there, a helper dies on one. So everything a save decides is a
pure function of its step and of the ticket, the element-wise minimum over all ranks of a few
words, posted one step before the save is due and read when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moc.choose.cadence import is_persist_due
from moc.choose.pick import Choice, ChooseState, choose
from moc.choose.policy import Policy

__all__ = ["HELD", "Closing", "Decision", "Ticket", "Words", "decide"]

HELD = 8
"""How many of the newest saves a ticket asks about. A step is *sealed everywhere* only while every
rank still holds it: the newest that one has sealed may be overwritten on another."""

_NEUTRAL = 1 << 62  # never the minimum: "not mine to say"


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say.

    Attributes:
        step: the step whose save this is about; it travels in `moc.choose.call`.
        attempt: this rank's attempt.
        plan: digest of this rank's save plan, 0 before there is one.
        unchanged: 1 while the live state has the structure that was planned, else 0.
        settled: 1 if that cannot change between the posting and the save, else 0.
        held: for each of the newest saves, newest first, 1 if this rank holds it sealed, else 0;
            at most `HELD` of them.
        failed: newest marked step whose persist failed on this rank, -1 for none.
        committed: newest committed step, -1 for none; rank 0 knows, others pass None.
        abandoned: newest abandoned step, -1 for none; rank 0 knows, others pass None.
        overdue: 1 if a persist is due by time, else 0; rank 0's clock counts, others pass None.
        base_gone: committed step that was found gone from storage, -1 for none.
        troubled: 1 if failures of this rank are to be raised, else 0.
    """

    step: int
    attempt: int
    plan: int
    unchanged: int
    settled: int = 1
    held: tuple[int, ...] = ()
    failed: int
    committed: int | None = None
    abandoned: int | None = None
    overdue: int | None = None
    base_gone: int = -1
    troubled: int = 0

    def pack(self) -> list[int]:
        """Words for an all-reduce with MIN; a value beside its negative shows disagreement."""
        return [
            self.attempt,
            -self.attempt,
            self.plan,
            -self.plan,
            self.unchanged,
            -self.failed,
            _NEUTRAL if self.committed is None else self.committed,
            _NEUTRAL if self.abandoned is None else self.abandoned,
            self.settled,
            -self.base_gone,
            *(*self.held, *(0,) * HELD)[:HELD],
            _NEUTRAL if self.overdue is None else self.overdue,
            -self.troubled,
        ]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks have said, equal on all of them.

    Attributes:
        differ: names of the fields in which ranks differ; empty when all is well.
        unchanged: whether every rank's structure was the planned one when it posted.
        settled: whether it then stays so until the save, on every rank.
        held: for each of the newest saves, newest first, whether every rank holds it sealed.
        failed: newest marked step whose persist failed on some rank.
        committed: newest committed step.
        abandoned: newest step that the coordinator gave up.
        overdue: whether a persist is due by time.
        base_gone: committed step that some rank found gone from storage.
        troubled: whether some rank has failures to raise; then all raise them.
    """

    differ: tuple[str, ...]
    unchanged: bool
    settled: bool
    held: tuple[bool, ...]
    failed: int
    committed: int
    abandoned: int
    overdue: bool = False
    base_gone: int = -1
    troubled: bool = False

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Ticket:
        """Read the minimum over all ranks of `Words.pack`."""
        pairs = (("attempt", 0), ("plan", 2))
        return cls(
            differ=tuple(name for name, i in pairs if words[i] != -words[i + 1]),
            unchanged=words[4] == 1,
            settled=words[8] == 1,
            failed=-words[5],
            committed=words[6],
            abandoned=words[7],
            base_gone=-words[9],
            held=tuple(word == 1 for word in words[10 : 10 + HELD]),
            overdue=words[10 + HELD] == 1,
            troubled=words[11 + HELD] < 0,
        )

    def is_resolved(self, marked: int) -> bool:
        """Whether the fate of a marked step is known: committed, or given up somewhere."""
        return marked <= max(self.committed, self.abandoned, self.failed)


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What follows every ticket, summed over the ranks: the save is made, or the ticket dropped.

    A ticket is posted ahead, so it cannot tell that a rank then comes with another step. Without
    this, that rank's next reduction would meet another one of the others, which gloo answers by
    ending the process.

    Attributes:
        counts: routed tokens, all layers in one row.
        changed: ranks whose structure is no longer the planned one, though the ticket said so.
        dropped: ranks that dropped the ticket.
        ranks: sum of their numbers; one alone is named by it.
        steps: sum of the steps that they came with instead; -1 for `wait` and `close`.
    """

    counts: list[int]
    changed: int = 0
    dropped: int = 0
    ranks: int = 0
    steps: int = 0

    def pack(self) -> list[int]:
        """Words for an all-reduce with SUM."""
        return [*self.counts, self.changed, self.dropped, self.ranks, self.steps]

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Closing:
        """Read the sum over all ranks of `pack`."""
        *counts, changed, dropped, ranks, steps = words
        return cls(counts=counts, changed=changed, dropped=dropped, ranks=ranks, steps=steps)

    def disagreement(self, due: int, world_size: int) -> str:
        """Who did what, if some ranks made the save of step ``due`` and others did not."""
        kept = world_size - self.dropped
        if not kept or not self.dropped:
            return ""
        others = world_size * (world_size - 1) // 2 - self.ranks
        instead = f"step {self.steps / self.dropped:g}" if self.steps >= 0 else "wait or close"
        told = [(self.ranks, self.dropped, instead), (others, kept, f"step {due}")]
        return ", ".join(
            f"rank {numbers}: {what}" if count == 1 else f"{count} ranks: {what}"
            for numbers, count, what in sorted(told)
        )


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a save does, equal on all ranks.

    Attributes:
        due: a persist is due by the user's policy, whether or not it can be made.
        marked: it is persisted as soon as its copy is done.
        full: it holds every expert.
        choice: the experts of both levels.
    """

    due: bool
    marked: bool
    full: bool
    choice: Choice


def decide(
    step: int,
    ticket: Ticket,
    state: ChooseState,
    holders: Sequence[Sequence[int]],
    policy: Policy,
    *,
    last_marked: int,
    has_base: bool,
    full: bool = False,
    forced: bool = False,
) -> Decision:
    """Decide a save.

    A save is marked iff a persist is due and the one before is resolved; a marked one is never
    superseded. Without a committed step to inherit from, the marked save is full.

    Args:
        step: the step to save.
        ticket: what all ranks said.
        state: when each expert was last saved.
        holders: holder of each expert, [MoE layer][expert].
        policy: the user's.
        last_marked: newest marked step of this attempt, -1 for none.
        has_base: whether a committed step exists on this timeline.
        full: the caller asked for every expert.
        forced: the caller asked for a persist now.
    """
    due = is_persist_due(step, last_marked, policy, overdue=ticket.overdue)
    wanted = due or forced or (policy.persist_every is not None and not has_base)
    marked = wanted and (last_marked < 0 or ticket.is_resolved(last_marked))
    everything = full or (marked and not has_base)
    choice = choose(
        state.last_snapshot, state.last_commit, holders, policy, full=everything, marked=marked
    )
    return Decision(due=due, marked=marked, full=everything, choice=choice)
