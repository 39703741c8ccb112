"""Which experts a save holds: Figure 4, gaps, balance, memory windows.

The gap of an expert is counted in *successful* commits: from one commit that holds it to the next,
both ends counted once, so that K_persist = N gives 1. Failed persists are no commits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.choose.pick import Choice, ChooseState, _capped, caps, choose, deal, pick, rotation
from moc.choose.policy import Policy


def spread(experts: int, holders: int) -> list[int]:
    """Contiguous placement: expert e is held by e // (N / EP)."""
    return [e * holders // experts for e in range(experts)]


def seeded(experts: int, layers: int) -> ChooseState:
    """The state after a full first save at step 0."""
    everything = [range(experts)] * layers
    return ChooseState.fresh([experts] * layers).snapshotted(0, everything).committed(0, everything)


def policy(k_snapshot: int, k_persist: int) -> Policy:
    return Policy(k_snapshot=k_snapshot, k_persist=k_persist)


def run(
    state: ChooseState,
    holders: Sequence[Sequence[int]],
    rule: Policy,
    saves: int,
    marked: Callable[[int], bool] | None = None,
    fails: Callable[[int], bool] | None = None,
) -> tuple[ChooseState, list[Choice], list[bool]]:
    """Save ``saves`` times; also returns the choices and which of them were committed.

    Every save is marked unless ``marked(t)`` says otherwise; ``fails(t)`` loses its persist.
    """
    choices, committed = [], []
    start = max(max(row) for row in state.last_snapshot) + 1
    for t in range(start, start + saves):
        wanted = marked is None or marked(t)
        choice = choose(state.last_snapshot, state.last_commit, holders, rule, marked=wanted)
        state = state.snapshotted(t, choice.snapshot)
        done = wanted and not (fails is not None and fails(t))
        if done:
            state = state.committed(t, choice.persist)
        choices.append(choice)
        committed.append(done)
    return state, choices, committed


def worst_gap(choices: Sequence[Choice], committed: Sequence[bool], experts: int) -> int:
    """Largest gap in commits of any expert of any layer, a full commit before the first one."""
    worst = 0
    for layer in range(len(choices[0].snapshot)):
        last = dict.fromkeys(range(experts), 0)
        number = 0
        for choice, done in zip(choices, committed, strict=True):
            number += done
            for expert in choice.persist[layer] if done else ():
                worst = max(worst, number - last[expert])
                last[expert] = number
        worst = max(worst, *(number - seen for seen in last.values()))
    return worst


def most_per_holder(
    ids: Sequence[Sequence[int]], holders: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Most and fewest experts that a holder gets, over all MoE layers."""
    load = Counter(dict.fromkeys(holders[0], 0))
    load.update(holders[layer][e] for layer, row in enumerate(ids) for e in row)
    return max(load.values()), min(load.values())


# -------------------------------------------------------------------------------------- the parts


def test_rotation_goes_round_the_holders() -> None:
    assert rotation([0, 0, 1, 1, 2, 2], 0) == (0, 2, 4, 1, 3, 5)
    assert rotation([0, 0, 1, 1, 2, 2], 2) == (4, 1, 3, 5, 0, 2)
    assert rotation([0, 0, 1, 1, 2, 2], 8) == (4, 1, 3, 5, 0, 2)
    assert rotation([7, 3, 7, 3, 3], 0) == (1, 0, 3, 2, 4)  # any holder numbers, uneven too
    assert rotation([], 3) == ()


def test_pick_takes_smallest_keys_then_first_in_order() -> None:
    assert pick([5, 1, 1, 0], 2, [2, 1, 0, 3]) == (2, 3)
    assert pick([0, 0, 0], 2, [2, 0, 1]) == (0, 2)
    assert pick([0, 0, 0], 9, [2, 0]) == (0, 2)
    assert pick([], 1, []) == ()


def test_deal_gives_blocks_to_windows_like_cards() -> None:
    assert deal(range(8), 1, 2) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert deal(range(8), 2, 2) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert deal(range(8), 4, 2) == tuple(range(8))
    assert deal(range(5), 2, 2) == (0, 1, 4, 2, 3)


def test_persist_outside_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 persists"):
        Choice(((0, 1),), ((2,),))


def test_differing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        choose([[0, 0]], [[0, 0, 0]], [[0, 0]], policy(1, 1))


def test_state_transitions_never_go_back() -> None:
    state = ChooseState.fresh([2, 3])
    assert state.last_commit == ((-1, -1), (-1, -1, -1))
    state = state.snapshotted(4, [[0], [1, 2]]).snapshotted(2, [[0, 1], [0]])
    assert state.last_snapshot == ((4, 2), (2, 4, 4))
    assert state.last_commit == ((-1, -1), (-1, -1, -1))
    assert state.committed(4, [[1], []]).last_commit == ((-1, 4), (-1, -1, -1))


# -------------------------------------------------------------------------------------- the paper


def test_figure_4() -> None:
    """Three ranks, three experts, MoE layers 1, 3, 5, 7: as drawn, t = 0 and t = 1."""
    _, choices, _ = run(seeded(3, 4), [spread(3, 3)] * 4, policy(1, 1), 2)
    assert choices[0].persist == ((0,), (1,), (2,), (0,))
    assert choices[1].persist == ((1,), (2,), (0,), (1,))


@pytest.mark.parametrize(("experts", "layers"), [(3, 4), (8, 6), (16, 12), (5, 11)])
def test_first_rotation_is_figure_4_for_k_1(experts: int, layers: int) -> None:
    holders = [spread(experts, experts)] * layers
    _, choices, _ = run(seeded(experts, layers), holders, policy(1, 1), 3 * experts)
    for t, choice in enumerate(choices):
        expected = tuple(((m + t) % experts,) for m in range(layers))
        assert choice.persist == choice.snapshot == expected


@pytest.mark.parametrize(
    ("ep", "k", "most", "fewest"),
    [
        (8, 1, 2, 1), (8, 2, 3, 3), (8, 4, 6, 6), (8, 8, 12, 12),
        (16, 1, 1, 0), (16, 2, 2, 1), (16, 4, 3, 3), (16, 8, 6, 6),
    ],
)  # fmt: skip
def test_balance_of_gpt_350m_16e(ep: int, k: int, most: int, fewest: int) -> None:
    """12 MoE layers, N = 16: what eq. (9) calls possible is reached, in every save."""
    holders = [spread(16, ep)] * 12
    for k_snapshot in {k, 8}:
        _, choices, _ = run(seeded(16, 12), holders, policy(k_snapshot, k), 40)
        for choice in choices:
            assert most_per_holder(choice.persist, holders) == (most, fewest)


# --------------------------------------------------------------------------------------- the gaps

GRID = [(16, 4, 1), (16, 4, 3), (8, 3, 2), (60, 8, 5)]


@pytest.mark.parametrize(("n", "k_snapshot", "k_persist"), GRID)
@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("failing", ["none", "second", "random"])
def test_worst_gap_is_one_rotation(
    n: int, k_snapshot: int, k_persist: int, every: int, failing: str
) -> None:
    rng = random.Random(7)
    bad = {t for t in range(2000) if rng.random() < 0.2}
    fails = {
        "none": None,
        "second": lambda t: t // every % 2 == 0,
        "random": lambda t: t in bad,
    }[failing]
    rotation_length = -(-n // k_persist)
    _, choices, committed = run(
        seeded(n, 3),
        [spread(n, 4)] * 3,
        policy(k_snapshot, k_persist),
        6 * rotation_length * every,
        lambda t: t % every == 0,
        fails,
    )
    assert sum(committed) > 2 * rotation_length
    assert worst_gap(choices, committed, n) == rotation_length


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_numbers_any_failures(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20), label="N")
    k_snapshot = data.draw(st.integers(1, n), label="K_snapshot")
    k_persist = data.draw(st.integers(1, k_snapshot), label="K_persist")
    layers = data.draw(st.integers(1, 3), label="layers")
    holders = [
        data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for _ in range(layers)
    ]
    rng = random.Random(data.draw(st.integers(0, 999), label="seed"))
    marks = [rng.random() < 0.7 for _ in range(500)]
    bad = [rng.random() < 0.3 for _ in range(500)]
    length = -(-n // k_persist)
    rule = policy(k_snapshot, k_persist)
    _, choices, committed = run(
        seeded(n, layers), holders, rule, 6 * length + 3, marks.__getitem__, bad.__getitem__
    )
    if sum(committed) > 2 * length:
        assert worst_gap(choices, committed, n) == length
    for choice in choices:
        for layer in range(layers):
            assert len(set(choice.snapshot[layer])) == k_snapshot
            assert len(choice.persist[layer]) in (0, k_persist)
            assert set(choice.persist[layer]) <= set(choice.snapshot[layer])
            assert list(choice.snapshot[layer]) == sorted(choice.snapshot[layer])


# ------------------------------------------------------------------------------------- the memory


def windows_until_covered(
    state: ChooseState, holders: Sequence[Sequence[int]], rule: Policy, *, marked: bool
) -> int:
    """Saves in a row after which every expert was snapshotted again."""
    start = max(max(row) for row in state.last_snapshot)
    count = 0
    while min(min(row) for row in state.last_snapshot) <= start:
        state, _, _ = run(state, holders, rule, 1, None if marked else lambda _: False)
        count += 1
    return count


@pytest.mark.parametrize(
    ("n", "k_snapshot", "k_persist", "ep"),
    [(16, 4, 1, 8), (16, 4, 3, 8), (8, 3, 2, 4), (60, 8, 5, 4), (16, 2, 1, 8), (16, 8, 2, 4)],
)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_memory_windows_cover_all_experts(
    n: int, k_snapshot: int, k_persist: int, ep: int, every: int
) -> None:
    """After any mix of persisted and other saves, ceil(N / K_snapshot) further ones cover."""
    holders = [spread(n, ep)] * 12
    rule = policy(k_snapshot, k_persist)
    state = seeded(n, 12)
    for _ in range(6):
        assert windows_until_covered(state, holders, rule, marked=False) == -(-n // k_snapshot)
        state, _, _ = run(state, holders, rule, 5, lambda t: t % every == 0)


@pytest.mark.parametrize(("n", "k_snapshot", "k_persist"), [*GRID, (64, 8, 2)])
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_the_cap_costs_the_windows_one_save_at_most(
    n: int, k_snapshot: int, k_persist: int, layers: int
) -> None:
    """Few layers on four holders: the windows that nest with persists are uneven over holders."""
    holders = [spread(n, 4)] * layers
    rule = policy(k_snapshot, k_persist)
    state = seeded(n, layers)
    for _ in range(8):
        windows = windows_until_covered(state, holders, rule, marked=False)
        assert 0 <= windows - -(-n // k_snapshot) <= 1
        state, _, _ = run(state, holders, rule, 3, lambda t: t % 2 == 0)


@pytest.mark.parametrize(
    ("n", "k_snapshot", "k_persist", "ep"), [(16, 4, 1, 8), (16, 8, 2, 4), (8, 4, 2, 4)]
)
def test_persisting_every_save_costs_the_windows_nothing(
    n: int, k_snapshot: int, k_persist: int, ep: int
) -> None:
    holders = [spread(n, ep)] * 12
    rule = policy(k_snapshot, k_persist)
    state = seeded(n, 12)
    for _ in range(n):
        assert windows_until_covered(state, holders, rule, marked=True) == n // k_snapshot
        state, _, _ = run(state, holders, rule, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_of_one_holder_cover_from_any_state(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    k_snapshot = data.draw(st.integers(1, n))
    rule = policy(k_snapshot, data.draw(st.integers(1, k_snapshot)))
    steps = st.lists(st.integers(-1, 50), min_size=n, max_size=n)
    state = ChooseState((tuple(data.draw(steps)),), (tuple(data.draw(steps)),))
    windows = windows_until_covered(state, [[0] * n], rule, marked=False)
    assert windows == -(-n // k_snapshot)


@pytest.mark.parametrize(
    ("n", "k_snapshot", "k_persist", "ep", "layers"),
    [(16, 4, 1, 8, 12), (60, 8, 5, 10, 24), (16, 2, 1, 8, 12), (64, 8, 2, 8, 1)],
)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_no_holder_goes_beyond_its_share_and_one(
    n: int, k_snapshot: int, k_persist: int, ep: int, layers: int, every: int
) -> None:
    holders = [spread(n, ep)] * layers
    rule = policy(k_snapshot, k_persist)
    limit = caps(holders, rule)
    assert set(limit.values()) == {-(-k_snapshot * layers // ep) + 1}
    _, choices, _ = run(seeded(n, layers), holders, rule, 60, lambda t: t % every == 0)
    for choice in choices:
        assert most_per_holder(choice.snapshot, holders)[0] <= max(limit.values())


def test_share_follows_what_a_holder_holds() -> None:
    holders = [[0, 0, 0, 1], [0, 0, 0, 1], [2, 2]]
    assert caps(holders, policy(2, 1)) == {0: 4, 1: 2, 2: 3}


# -------------------------------------------------------------------------------------- the flags


def test_full_takes_all() -> None:
    state = seeded(4, 2)
    keys = state.last_snapshot, state.last_commit
    everything = ((0, 1, 2, 3), (0, 1, 2, 3))
    holders = [[0, 0, 1, 1]] * 2
    assert choose(*keys, holders, policy(2, 1), full=True) == Choice(everything, everything)
    kept = choose(*keys, holders, policy(2, 1), full=True, marked=False)
    assert kept == Choice(everything, ((), ()))
    assert choose(*keys, holders, Policy()) == Choice(everything, everything)
    assert choose(*keys, holders, Policy(k_snapshot=1, k_persist=1, skip="full")).persist == (
        everything
    )


def test_k_is_clipped_per_layer() -> None:
    state = ChooseState.fresh([8, 2])
    choice = choose(state.last_snapshot, state.last_commit, [[0] * 8, [0] * 2], policy(4, 3))
    assert [len(row) for row in choice.snapshot] == [4, 2]
    assert [len(row) for row in choice.persist] == [3, 2]


def test_a_dense_model_has_no_experts() -> None:
    assert choose((), (), (), policy(1, 1)) == Choice((), ())
    assert caps([], policy(1, 1)) == {}


@given(st.data())
def test_layer_by_layer_is_the_walk_over_all_layers(data: st.DataObject) -> None:
    """The short way is taken where no cap binds, and gives what the long way gives."""
    experts = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    rows = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in experts]
    steps = [data.draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)) for n in experts]
    k_snapshot = data.draw(st.integers(1, 8))
    rule = policy(k_snapshot, data.draw(st.integers(1, k_snapshot)))
    choice = choose(steps, steps, rows, rule)
    orders, sizes = [], []
    for layer, row in enumerate(rows):
        k, block = rule.experts_per_save(len(row))
        orders.append(deal(rotation(row, block * layer), block, -(-len(row) // k)))
        sizes.append(k)
    walked = _capped(steps, orders, sizes, choice.persist, rows, caps(rows, rule))
    assert choice.snapshot == tuple(tuple(sorted(ids)) for ids in walked)
