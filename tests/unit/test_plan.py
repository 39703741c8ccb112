"""Every byte has one writer, whatever the layout, and all ranks plan alike."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moc.core.box import Box, uncovered
from moc.core.piece import Piece
from moc.plan.balance import assign
from moc.plan.save import RankPlan, plan_save

EXPERTS = 4


@st.composite
def catalogues(draw: st.DrawFn) -> list[list[Piece]]:
    """What up to 6 ranks hold: replicated and owned dense pieces, experts of one layer."""
    world = draw(st.integers(1, 6))
    held: list[list[Piece]] = [[] for _ in range(world)]
    for i in range(draw(st.integers(1, 8))):
        rows = draw(st.integers(0, 5000))
        piece = Piece(f"dense{i}", "weight", Box((0, 0), (rows, 64)), "F32")
        holders = draw(st.sets(st.integers(0, world - 1), min_size=1))
        for rank in holders:
            held[rank].append(piece)
    for expert in range(EXPERTS):
        holders = draw(st.sets(st.integers(0, world - 1), min_size=1))
        for part in ("weight", "exp_avg"):
            piece = Piece("moe.w", part, Box((expert, 0), (1, 128)), "F32", 0, expert)
            for rank in holders:
                held[rank].append(piece)
    return held


def all_plans(held: list[list[Piece]]) -> list[RankPlan]:
    return [plan_save(held, rank, [EXPERTS]) for rank in range(len(held))]


def written(plan: RankPlan) -> list[Piece]:
    return [*plan.dense, *(p for pieces in plan.experts.values() for p in pieces)]


@given(catalogues())
def test_every_byte_is_written_exactly_once_and_by_a_holder(held: list[list[Piece]]) -> None:
    plans = all_plans(held)
    for original in {p.name: p for pieces in held for p in pieces}.values():
        tiles = [
            (rank, piece)
            for rank, plan in enumerate(plans)
            for piece in written(plan)
            if (piece.fqn, piece.part) == (original.fqn, original.part)
            and (piece.expert == original.expert)
        ]
        assert uncovered(original.box, [piece.box for _, piece in tiles]) == []
        assert sum(piece.nbytes for _, piece in tiles) == original.nbytes
        assert all(original in held[rank] for rank, _ in tiles)


@given(catalogues(), st.randoms(use_true_random=False))
def test_the_plan_depends_on_no_order_and_all_ranks_agree(
    held: list[list[Piece]], random: object
) -> None:
    shuffled = [list(pieces) for pieces in held]
    for pieces in shuffled:
        random.shuffle(pieces)  # type: ignore[attr-defined]
    plans, again = all_plans(held), all_plans(shuffled)
    assert plans == again
    assert len({plan.digest for plan in plans}) == 1
    assert len({plan.rank_bytes for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        assert sum(p.nbytes for p in written(plan)) == plan.rank_bytes[rank]


@given(catalogues())
def test_an_expert_counts_its_pieces_over_all_ranks(held: list[list[Piece]]) -> None:
    plans = all_plans(held)
    for expert in range(EXPERTS):
        found = sum(len(plan.experts.get((0, expert), ())) for plan in plans)
        assert plans[0].expert_pieces[0, expert] == found == 2
        lowest = min(r for r, pieces in enumerate(held) if any(p.expert == expert for p in pieces))
        assert plans[0].holders[0][expert] == lowest


@given(catalogues(), st.integers(1, EXPERTS))
def test_capacity_bounds_every_selection(held: list[list[Piece]], k: int) -> None:
    for plan in all_plans(held):
        sizes = sorted((sum(p.nbytes for p in v) for v in plan.experts.values()), reverse=True)
        worst = sum(p.nbytes for p in plan.dense) + sum(sizes[:k])
        assert plan.capacity({0: k}) == worst


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_greedy_is_within_one_item_of_even(sizes: list[int], ranks: int) -> None:
    items = {f"item{i}": size for i, size in enumerate(sizes)}
    writer = assign(items, dict.fromkeys(items, range(ranks)), [0] * ranks)
    load = [sum(size for n, size in items.items() if writer[n] == r) for r in range(ranks)]
    assert max(load) <= math.ceil(sum(sizes) / ranks) + max(sizes)


def test_what_cannot_move_is_placed_first() -> None:
    holders = {"owned": [1], "free": [0, 1], "small": [0, 1]}
    writer = assign({"owned": 100, "free": 60, "small": 30}, holders, [0, 0])
    assert writer == {"owned": 1, "free": 0, "small": 0}


def test_a_large_replicated_tensor_is_split_by_rows() -> None:
    piece = Piece("embed", "weight", Box((0, 0), (50_000, 64)), "F32")
    plans = all_plans([[piece, *_experts()]] * 4)
    shares = [sum(p.nbytes for p in plan.dense) for plan in plans]
    assert max(shares) <= 1.2 * piece.nbytes / 4


def _experts() -> list[Piece]:
    return [Piece("moe.w", "weight", Box((e, 0), (1, 8)), "F32", 0, e) for e in range(EXPERTS)]
