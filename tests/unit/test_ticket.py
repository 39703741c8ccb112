"""The ticket: whatever ranks have to say, all of them read the same."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moc.choose.pick import ChooseState
from moc.choose.policy import Policy
from moc.choose.ticket import Closing, Ticket, Words, decide

POLICY = Policy(snapshot_every=5, persist_every=10, k_snapshot=4, k_persist=1)
HOLDERS = [[0, 0, 0, 0, 2, 2, 2, 2]] * 2


def words(rank: int, **changes: Any) -> Words:
    facts = {"step": 20, "attempt": 1, "plan": 77, "unchanged": 1, "held": (0, 1), "failed": -1}
    known = {"committed": 10, "abandoned": -1} if rank == 0 else {}
    return Words(**{**facts, **known, **changes})


def together(*said: Words) -> Ticket:
    return Ticket.unpack([min(column) for column in zip(*(w.pack() for w in said), strict=True)])


def test_rank_0_alone_speaks_of_commits() -> None:
    ticket = together(words(0), words(1), words(2))
    assert ticket.differ == ()
    assert (ticket.committed, ticket.abandoned, ticket.held) == (
        10,
        -1,
        (False, True, *[False] * 6),
    )
    assert ticket.unchanged


def test_what_all_ranks_hold_and_the_newest_failure_count() -> None:
    ticket = together(
        words(0, held=(1, 0, 1)), words(1, held=(0, 1, 1), failed=10), words(2, held=(1,) * 9)
    )
    assert ticket.held == (False, False, True, *[False] * 5), "the newest of each is not of all"
    assert ticket.failed == 10
    assert not together(words(0), words(1, unchanged=0)).unchanged


@given(st.booleans())
def test_rank_0s_clock_alone_says_that_a_persist_is_due(overdue: bool) -> None:
    policy = Policy(snapshot_every=5, persist_every=timedelta(hours=1))
    ticket = together(words(0, overdue=int(overdue)), words(1), words(2))
    assert ticket.overdue == overdue
    state = ChooseState.fresh([8, 8])
    decision = decide(20, ticket, state, HOLDERS, policy, last_marked=10, has_base=True)
    assert (decision.due, decision.marked) == (overdue, overdue)
    # In steps, no clock counts.
    in_steps = decide(20, ticket, state, HOLDERS, POLICY, last_marked=20, has_base=True)
    assert not in_steps.due
    outstanding = decide(20, ticket, state, HOLDERS, policy, last_marked=15, has_base=True)
    assert (outstanding.due, outstanding.marked) == (overdue, False)


@given(st.sampled_from(["attempt", "plan"]), st.integers(0, 1 << 61), st.integers(0, 1 << 61))
def test_a_difference_is_seen_by_all(field: str, one: int, other: int) -> None:
    ticket = together(words(0, **{field: one}), words(1, **{field: other}))
    assert ticket.differ == ((field,) if one != other else ())


def test_a_save_is_marked_only_when_the_one_before_is_resolved() -> None:
    state = ChooseState.fresh([8, 8])

    def marked(last: int, **said: int) -> bool:
        ticket = together(words(0, **said), words(1))
        return decide(20, ticket, state, HOLDERS, POLICY, last_marked=last, has_base=True).marked

    assert marked(10)
    assert not marked(15, committed=10), "15 is still outstanding"
    assert marked(15, committed=15)
    assert marked(15, abandoned=15)
    assert not marked(20), "not due again"


def test_without_a_base_a_marked_save_is_full() -> None:
    state = ChooseState.fresh([8, 8])
    ticket = together(words(0, committed=-1), words(1))
    first = decide(5, ticket, state, HOLDERS, POLICY, last_marked=-1, has_base=False)
    assert (first.marked, first.full) == (True, True)
    assert first.choice.persist == (tuple(range(8)),) * 2
    later = decide(25, ticket, state, HOLDERS, POLICY, last_marked=5, has_base=False)
    assert not later.marked, "the first one is outstanding"
    partial = decide(20, ticket, state, HOLDERS, POLICY, last_marked=-1, has_base=True)
    assert [len(ids) for ids in partial.choice.snapshot] == [4, 4]
    assert [len(ids) for ids in partial.choice.persist] == [1, 1]


def test_memory_only_marks_nothing() -> None:
    policy = Policy(snapshot_every=5, persist_every=None)
    ticket = together(words(0, committed=-1), words(1))
    state = ChooseState.fresh([8, 8])
    decision = decide(20, ticket, state, HOLDERS, policy, last_marked=-1, has_base=False)
    assert (decision.marked, decision.full) == (False, False)


def closed(*said: dict[str, int]) -> Closing:
    """What the ranks said, summed."""
    packed = [Closing(counts=[1, 2], **one).pack() for one in said]
    return Closing.unpack([sum(column) for column in zip(*packed, strict=True)])


def test_a_ticket_that_all_keep_or_all_drop_is_no_disagreement() -> None:
    kept = closed({}, {}, {"changed": 1})
    assert (kept.counts, kept.changed, kept.disagreement(10, 3)) == ([3, 6], 1, "")
    dropped = [{"dropped": 1, "ranks": rank, "steps": 11} for rank in range(3)]
    assert closed(*dropped).disagreement(10, 3) == ""


def test_a_ticket_that_some_drop_names_them_and_the_others() -> None:
    one = closed({}, {"dropped": 1, "ranks": 1, "steps": 11})
    assert one.disagreement(10, 2) == "rank 0: step 10, rank 1: step 11"
    waits = closed({}, {}, {"dropped": 1, "ranks": 2, "steps": -1})
    assert "rank 2: wait or close" in waits.disagreement(10, 3)
    assert "2 ranks: step 10" in waits.disagreement(10, 3)
    most = closed({}, *({"dropped": 1, "ranks": rank, "steps": 11} for rank in (1, 2)))
    assert "rank 0: step 10" in most.disagreement(10, 3)
    assert "2 ranks: step 11" in most.disagreement(10, 3)
