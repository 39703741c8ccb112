"""Lost tokens: eq. (7), what the state has lost, and the closed form under even routing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.choose.pick import ChooseState, choose
from moc.choose.policy import Policy
from moc.core.tokens import (
    lost_after,
    lost_in_fault,
    planned_routed,
    plt,
    plt_closed_form,
    plt_closed_form_two_level,
    plt_unique,
)


def test_lost_is_what_was_routed_since_the_version() -> None:
    routed_then, routed_now = [[10, 20], [5, 5]], [[10, 26], [7, 9]]
    assert lost_in_fault(routed_then, routed_now) == [[0, 6], [2, 4]]
    assert lost_after([[1, 2], [0, 3]], routed_then, routed_now) == [[1, 8], [2, 7]]


def test_a_version_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="more routed"):
        lost_in_fault([[5]], [[4]])
    with pytest.raises(ValueError, match="shorter"):
        lost_in_fault([[5, 5]], [[5]])


def test_restoring_twice_counts_once_in_the_state_and_twice_in_eq_7() -> None:
    """Two faults before the next commit restore the same versions at the same step."""
    version_lost, version_routed, routed = [[0, 0]], [[100, 60]], [[100, 100]]
    faults = [lost_in_fault(version_routed, routed) for _ in range(2)]
    states = [lost_after(version_lost, version_routed, routed) for _ in range(2)]
    assert states[0] == states[1] == [[0, 40]]
    assert plt(faults, [400.0]) == pytest.approx(0.2)
    assert plt_unique(states[1], [400.0]) == pytest.approx(0.1)


def test_plt_is_the_mean_over_layers() -> None:
    assert plt([[[10, 0], [0, 0]], [[0, 10], [5, 5]]], [100, 200]) == pytest.approx(0.125)
    assert plt([], [100, 200]) == 0.0
    assert plt([], []) == 0.0
    assert plt([[[0, 0]]], [0]) == 0.0
    with pytest.raises(ValueError, match="planned"):
        plt([[[1, 0]]], [0])
    with pytest.raises(ValueError, match="1 MoE layers"):
        plt([[[1, 0]]], [1, 1])


def test_planned_tokens() -> None:
    routed = [[30, 10], [20, 20]]
    assert planned_routed(routed, 10, 100) == [400, 400]
    assert planned_routed(routed, 10, 100, total_tokens=60, tokens_so_far=20) == [120, 120]
    assert planned_routed(routed, 10, 100, total_tokens=60) == [400, 400]
    assert planned_routed(routed, 10, None) == [40, 40]
    assert planned_routed(routed, 200, 100) == [40, 40]  # a run that outlived its plan
    assert planned_routed([[0, 0]], 0, 100) == [0]


# ------------------------------------------------------------------------------- the closed form


def test_the_paper_s_point() -> None:
    """3.75 % at K = 2, I = 32, N = 8 in a run of 1,280 iterations: 48 lost iterations."""
    assert plt_closed_form(8, 2, 32, 1, 1280) == 0.0375
    assert plt_closed_form(8, 2, 32, 1, 1280) * 1280 == 48


@pytest.mark.parametrize(
    ("k", "percent"),
    [
        (1, (2.19, 4.38, 8.75, 17.5)), (2, (0.94, 1.88, 3.75, 7.5)),
        (4, (0.31, 0.62, 1.25, 2.5)), (8, (0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_grid_of_one_fault(k: int, percent: tuple[float, ...]) -> None:
    for interval, expected in zip((8, 16, 32, 64), percent, strict=True):
        value = 100 * plt_closed_form(8, k, interval, 1, 1280)
        assert value == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(("fraction", "ratio"), [(1 / 2, 0.60), (1 / 8, 0.30), (1, 1.0), (0, 0.2)])
def test_two_levels_against_one(fraction: float, ratio: float) -> None:
    """K_snapshot = 4, K_persist = 1 of 16 against (1, 1)."""
    two = plt_closed_form_two_level(16, 4, 1, 20, 3, 1000, fraction)
    assert two / plt_closed_form(16, 1, 20, 3, 1000) == pytest.approx(ratio, abs=0.0051)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1))
def test_two_levels_lie_between_the_levels(n: int, k: int, fraction: float) -> None:
    k = min(k, n)
    value = plt_closed_form_two_level(n, n, k, 10, 1, 1000, fraction)
    assert 0 <= value <= plt_closed_form(n, k, 10, 1, 1000)


# ----------------------------------------------------------------------------------- as measured


def measure(
    experts: int, k_snapshot: int, k_persist: int, interval: int, saves: int, lost: frozenset[int]
) -> float:
    """PLT of one fault after ``saves`` saves of a run of 1,280 steps, every save persisted.

    Every expert is routed 10 tokens a step, so the closed form's assumptions hold. Holders in
    ``lost`` lose their memory, the others restore their experts' newest snapshots.
    """
    layers, per_step = 12, 10
    holders = [[e * 8 // experts for e in range(experts)]] * layers
    rule = Policy(k_snapshot=k_snapshot, k_persist=k_persist)
    state = ChooseState.fresh([experts] * layers)
    for save in range(saves + 1):
        choice = choose(state.last_snapshot, state.last_commit, holders, rule, full=save == 0)
        step = save * interval
        state = state.snapshotted(step, choice.snapshot).committed(step, choice.persist)
    routed = [
        [
            per_step * (state.last_commit if holder in lost else state.last_snapshot)[layer][e]
            for e, holder in enumerate(row)
        ]
        for layer, row in enumerate(holders)
    ]
    now = [[per_step * saves * interval] * experts] * layers
    planned = planned_routed(now, saves * interval, 1280)
    return plt([lost_in_fault(routed, now)], planned)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("interval", [8, 32])
def test_one_level_is_the_closed_form(k: int, interval: int) -> None:
    for saves in (16, 21):  # any point of the rotation
        value = measure(8, k, k, interval, saves, frozenset(range(8)))
        assert value == pytest.approx(plt_closed_form(8, k, interval, 1, 1280))


@pytest.mark.parametrize("gone", [0, 1, 4, 8])
def test_two_levels_are_the_closed_form(gone: int) -> None:
    """N / K_snapshot = 4 snapshots in memory; 12 layers on 8 holders are not quite even."""
    values = [measure(16, 4, 1, 16, saves, frozenset(range(gone))) for saves in range(32, 48)]
    expected = plt_closed_form_two_level(16, 4, 1, 16, 1, 1280, gone / 8)
    assert sum(values) / len(values) == pytest.approx(expected, rel=0.01)
    assert max(values) == pytest.approx(expected, rel=0.25)
