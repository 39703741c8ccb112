"""The look: time and signals, decided alike by all ranks at steps that nobody knew in advance."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.choose.cadence import NEVER, is_overdue, is_persist_due, is_snapshot_due, next_snapshot
from moc.choose.look import Look, LookWords, judge, look_after
from moc.choose.policy import Policy
from moc.errors import ConfigError

usecs = st.integers(1, 10**9)


def together(*said: LookWords) -> Look:
    return Look.unpack([min(column) for column in zip(*(w.pack() for w in said), strict=True)])


def said(step: int = 10, step_usecs: int = 1000, **more: int) -> LookWords:
    return LookWords(step=step, step_usecs=step_usecs, **more)


def test_the_slowest_rank_the_first_clock_and_the_shortest_grace_count() -> None:
    look = together(
        said(step_usecs=5, left_usecs=900),
        said(step_usecs=7),
        said(step_usecs=5, grace_usecs=70, signum=10),
        said(step_usecs=5, grace_usecs=50, signum=15),
    )
    assert (look.step, look.step_usecs, look.left_usecs) == (10, 7, 900)
    assert (look.grace_usecs, look.signum) == (50, 15)
    quiet = together(said(), said())
    assert (quiet.left_usecs, quiet.grace_usecs, quiet.signum) == (None, None, 0)


@given(st.sampled_from([10, 15]), usecs, st.integers(0, 16))
def test_a_signal_on_any_rank_stops_all(signum: int, grace: int, later: int) -> None:
    look = together(said(), said(grace_usecs=grace, signum=signum), said(left_usecs=0))
    assert judge(10 + later, look, patience_usecs=10**6, last_save=-1).stop


@given(st.integers(0, 10**6), usecs, st.integers(0, 10**9))
def test_a_look_is_1_to_16_steps_ahead_and_within_the_horizon(
    step: int, step_usecs: int, horizon: int
) -> None:
    ahead = look_after(step, step_usecs, horizon) - step
    assert 1 <= ahead <= 16
    assert ahead == 1 or ahead * step_usecs <= horizon


@given(
    interval=st.integers(10, 3000),
    seed=st.integers(0, 1000),
    spread=st.integers(0, 2),
    patience=st.one_of(st.none(), st.integers(1, 100)),
)
def test_time_based_snapshots_come_when_they_should(
    interval: int, seed: int, spread: int, patience: int | None
) -> None:
    """Played on a clock of its own: steps of 2 to 2 + spread units, looks as in the engine."""
    dice = random.Random(seed)
    durations = [dice.randint(2, 2 + spread) for _ in range(400)]
    now = saved = looked = 0
    look, look_step, next_look, due, last_save = None, 0, 1, -1, -1
    gaps, looks = [], 0
    for step, duration in enumerate(durations, start=1):
        now += duration
        if step >= next_look:
            next_look = step + 1
            if look is not None:
                verdict = judge(step, look, patience_usecs=patience, last_save=max(last_save, due))
                next_look, due = verdict.next, max(due, verdict.due)
            words = said(
                step,
                (now - looked) // (step - look_step),
                left_usecs=max(0, saved + interval - now),
            )
            look, looked, look_step = together(words, said(step, 2)), now, step
            looks += 1
        if 0 < due <= step:
            gaps.append(now - saved)
            saved, last_save, due = now, step, -1
    # Up to 16 steps are foreseen by those before them, and each may differ by `spread`.
    slack = 16 * spread + 3 * (2 + spread)
    assert all(abs(gap - interval) <= slack for gap in gaps), (interval, gaps)
    assert len(gaps) >= now // (interval + slack)
    if patience is None and interval > 1000:
        assert looks < len(durations) / 4, "looks are rare while nothing is near"


def test_what_was_posted_before_a_save_says_nothing_of_the_next() -> None:
    look = together(said(10, 1000, left_usecs=0))
    assert judge(11, look, patience_usecs=None, last_save=-1).due == 12
    assert judge(11, look, patience_usecs=None, last_save=9).due == 12
    for last_save in (10, 11):
        verdict = judge(11, look, patience_usecs=None, last_save=last_save)
        assert (verdict.due, verdict.next) == (-1, 12)


def test_a_time_based_snapshot_is_due_at_the_agreed_step() -> None:
    rule = Policy(snapshot_every=timedelta(minutes=10))
    assert not any(is_snapshot_due(step, rule) for step in range(1000))
    assert next_snapshot(7, rule) == NEVER
    assert next_snapshot(7, rule, 8) == 8
    assert next_snapshot(8, rule, 8) == NEVER
    assert [is_snapshot_due(step, rule, 8) for step in (7, 8, 9)] == [False, True, True]


def test_a_time_based_persist_is_the_snapshot_nearest_to_it() -> None:
    half_an_hour = timedelta(minutes=30)
    # Snapshots every 10 minutes, a hair early: the third, not the fourth.
    assert [is_overdue(600 * n - 1, 600, half_an_hour) for n in (1, 2, 3)] == [False, False, True]
    assert is_overdue(420, 420, timedelta(minutes=10))  # 7 is nearer to 10 than 14 is
    rule = Policy(persist_every=half_an_hour)
    assert is_persist_due(10, 9, rule, overdue=True)
    assert not is_persist_due(1000, None, rule, overdue=False)
    assert not is_persist_due(1000, None, Policy(persist_every=None), overdue=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"snapshot_every": "10min"}, "datetime.timedelta"),
        ({"snapshot_every": None}, "datetime.timedelta"),
        ({"snapshot_every": timedelta(0)}, "give a positive"),
        ({"persist_every": timedelta(seconds=-1)}, "give a positive"),
        ({"persist_every": 1.5}, "a positive number of steps"),
        ({"preempt_grace_secs": 0}, "give a positive"),
        ({"preempt_exit_code": 256}, "0 to 255"),
    ],
)
def test_bad_intervals_are_refused_with_the_remedy(options: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Policy(**options)
