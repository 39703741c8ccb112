"""When a step is snapshotted and persisted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moc.choose.cadence import is_persist_due, is_snapshot_due, next_snapshot
from moc.choose.policy import Policy


def test_snapshots_at_multiples() -> None:
    rule = Policy(snapshot_every=10)
    assert [s for s in range(35) if is_snapshot_due(s, rule)] == [10, 20, 30]
    assert [next_snapshot(s, rule) for s in (0, 9, 10, 11)] == [10, 10, 20, 20]


@given(st.integers(0, 1000), st.integers(1, 50))
def test_next_snapshot_is_the_first_due_step(step: int, every: int) -> None:
    rule = Policy(snapshot_every=every)
    due = next_snapshot(step, rule)
    assert [s for s in range(step + 1, due + 1) if is_snapshot_due(s, rule)] == [due]


def test_persist_is_the_first_snapshot_at_or_after_a_multiple() -> None:
    rule = Policy(snapshot_every=20, persist_every=50)
    marked: list[int] = []
    for step in range(20, 320, 20):
        if is_persist_due(step, marked[-1] if marked else None, rule):
            marked.append(step)
    assert marked == [60, 100, 160, 200, 260, 300]


def test_due_stays_due_while_a_persist_is_outstanding() -> None:
    rule = Policy(persist_every=50)
    assert is_persist_due(110, 50, rule)
    assert is_persist_due(160, 50, rule)  # two multiples passed, one persist
    assert not is_persist_due(190, 160, rule)


def test_nothing_marked_yet_counts_from_the_start() -> None:
    rule = Policy(persist_every=50)
    assert not is_persist_due(10, None, rule)
    assert not is_persist_due(10, -1, rule)
    assert is_persist_due(50, None, rule)


def test_memory_only_is_never_due() -> None:
    assert not is_persist_due(1000, None, Policy(persist_every=None))
