"""The ladder: the newest whole step, the newest whole experts, the best source of every piece."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.core.box import Box
from moc.core.manifest import CommitHead, FileInfo, Manifest, Receipt, Seal, assemble, step_dir
from moc.core.piece import Piece, PieceRecord
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import NothingValid, StepNotFound
from moc.recover.ladder import STORAGE, Inventory, climb

WORLD, EXPERTS = 2, 4
"""Rank 0 writes experts 0 and 1 and one half of the dense part, rank 1 the other halves."""


def attempt(number: int = 1, resumed: int = 0) -> AttemptRecord:
    return AttemptRecord(
        attempt=number,
        parent=number - 1,
        resumed_step=resumed,
        world_size=WORLD,
        k_snapshot=2,
        k_persist=1,
    )


def pieces_of(rank: int, experts: list[int]) -> list[Piece]:
    dense = [Piece("dense", "weight", Box((4 * rank,), (4,)), "F32")]
    mine = [e for e in experts if e // 2 == rank]
    return dense + [
        Piece("moe.w", part, Box((e,), (1,)), "F32", 0, e)
        for e in mine
        for part in ("weight", "exp_avg")
    ]


def head(step: int, experts: list[int], base: Version | None) -> CommitHead:
    return CommitHead(
        model="m",
        base=base,
        layers=["moe"],
        saved=[experts],
        routed=[[10 * step] * EXPERTS],
        lost=[[0] * EXPERTS],
        k_snapshot=2,
        k_persist=1,
    )


def seal(rank: int, step: int, experts: list[int], number: int = 1) -> Seal:
    records = [PieceRecord(p, 0, 100 * i) for i, p in enumerate(pieces_of(rank, experts))]
    return Seal(
        run_id="r",
        version=Version(step, number),
        rank=rank,
        world_size=WORLD,
        plan=1,
        file=f"{rank:05d}-{step}.safetensors",
        pieces=records,
        expert_pieces=[(0, e, 2) for e in experts],
        head=head(step, experts, None),
    )


def manifest(step: int, experts: list[int], base: Manifest | None = None) -> Manifest:
    version = Version(step, 1)
    receipts = [
        Receipt(
            version=version,
            rank=rank,
            world_size=WORLD,
            files=[FileInfo(f"{step_dir(version)}/{rank}", 1000, "h")],
            pieces=[
                PieceRecord(p, 0, 100 * i, f"{step}-{rank}-{i}")
                for i, p in enumerate(pieces_of(rank, experts))
            ],
            head=head(step, experts, base.version if base else None) if rank == 0 else None,
        )
        for rank in range(WORLD)
    ]
    return assemble(receipts, base)


FULL = manifest(10, [0, 1, 2, 3])
NEXT = manifest(20, [1, 2], FULL)


def inventory(**facts: object) -> Inventory:
    return Inventory(**{"timeline": Timeline.of([attempt()]), **facts})  # type: ignore[arg-type]


def test_from_storage_experts_keep_the_versions_that_the_manifest_names() -> None:
    plan = climb(inventory(manifests=(FULL, NEXT)))
    assert plan.version == Version(20, 1)
    assert [v.step for v in plan.versions[0]] == [10, 20, 20, 10]
    assert plan.fault_lost == [[100, 0, 0, 100]]
    assert {s.node for f in plan.fetches for s in f.sources} == {STORAGE}


def test_a_survivor_has_fresher_experts_at_the_committed_step() -> None:
    left = ((0, seal(0, 20, [0, 1])), (0, seal(0, 30, [0, 1])))
    plan = climb(inventory(manifests=(FULL, NEXT), seals=left))
    assert plan.version == Version(20, 1), "step 30 misses rank 1's dense half"
    assert [v.step for v in plan.versions[0]] == [20, 20, 20, 10]
    assert "snapshots of ranks [1] are lost" in plan.reasons[0]
    assert plan.fault_lost == [[0, 0, 0, 100]]
    dense = [f for f in plan.fetches if not f.piece.is_expert]
    assert [f.sources[0].node for f in dense] == [0, STORAGE]
    digests = {s.digest for f in dense for s in f.sources}
    assert "" not in digests, "a buffer of a committed step is checked against the commit"


def test_all_memory_left_gives_the_newest_sealed_step() -> None:
    left = tuple(
        (rank, seal(rank, step, experts))
        for step, experts in ((20, [1, 2]), (30, [0, 3]))
        for rank in range(WORLD)
    )
    plan = climb(inventory(manifests=(FULL, NEXT), seals=left))
    assert plan.version == Version(30, 1)
    assert not plan.committed
    assert plan.base == Version(20, 1)
    assert [v.step for v in plan.versions[0]] == [30, 20, 20, 30]


def test_half_an_expert_is_none() -> None:
    half = seal(0, 20, [0, 1])
    kept = [r for r in half.pieces if (r.piece.expert, r.piece.part) != (0, "exp_avg")]
    torn = msgspec.structs.replace(half, pieces=kept)
    plan = climb(inventory(manifests=(FULL, NEXT), seals=((0, torn),)))
    assert plan.versions[0][0] == Version(10, 1), "its weight is newer, its moments are not"
    assert plan.versions[0][1] == Version(20, 1)


def test_a_struck_source_gives_way_to_the_next_and_then_to_an_older_step() -> None:
    facts = {"manifests": (FULL, NEXT), "seals": ((0, seal(0, 20, [0, 1])),)}
    plan = climb(inventory(**facts))
    dense = next(f for f in plan.fetches if not f.piece.is_expert)
    assert [s.node for s in dense.sources] == [0, STORAGE]
    once = climb(inventory(**facts, struck=frozenset({dense.sources[0].place})))
    assert next(f for f in once.fetches if not f.piece.is_expert).sources == dense.sources[1:]
    both = frozenset(s.place for s in dense.sources)
    older = climb(inventory(**facts, struck=both))
    assert older.version == Version(10, 1)
    assert "dense|weight" in older.reasons[0]


def test_a_damaged_expert_falls_back_alone() -> None:
    record = next(r for r in NEXT.experts if r.piece.expert == 2)
    bad = (STORAGE, NEXT.files[record.file].key, record.offset)
    plan = climb(inventory(manifests=(FULL, NEXT), struck=frozenset({bad})))
    assert plan.version == Version(20, 1)
    assert [v.step for v in plan.versions[0]] == [10, 20, 10, 10]


def test_a_dead_timeline_is_never_used() -> None:
    """Step 30 of attempt 1 was left behind by a rollback to 20; attempt 2 has sealed 30 anew."""
    timeline = Timeline.of([attempt(1), attempt(2, resumed=20)])
    old = tuple((rank, seal(rank, 30, [0, 3], 1)) for rank in range(WORLD))
    assert climb(
        inventory(timeline=timeline, manifests=(FULL, NEXT), seals=old)
    ).version == Version(20, 1)
    mixed = (old[0], (1, seal(1, 30, [0, 3], 2)))
    assert climb(
        inventory(timeline=timeline, manifests=(FULL, NEXT), seals=mixed)
    ).version == Version(20, 1)
    new = tuple((rank, seal(rank, 30, [0, 3], 2)) for rank in range(WORLD))
    plan = climb(inventory(timeline=timeline, manifests=(FULL, NEXT), seals=old + new))
    assert plan.version == Version(30, 2)
    assert all(f.version != Version(30, 1) for f in plan.fetches)


def test_an_asked_step_never_falls_back() -> None:
    assert climb(inventory(manifests=(FULL, NEXT)), 10).version == Version(10, 1)
    with pytest.raises(StepNotFound, match=r"step 15 cannot be restored.*\[10, 20\]"):
        climb(inventory(manifests=(FULL, NEXT)), 15)
    struck = frozenset((STORAGE, f.key, 0) for f in NEXT.files)
    with pytest.raises(StepNotFound, match="lost or damaged"):
        climb(inventory(manifests=(FULL, NEXT), struck=struck), 20)


def test_nothing_whole_is_an_error_that_says_why() -> None:
    with pytest.raises(NothingValid, match=r"ranks \[1\] are lost"):
        climb(inventory(seals=((0, seal(0, 20, [0, 1])),)))
    with pytest.raises(NothingValid, match="has no whole version"):
        climb(inventory(seals=tuple((0, seal(r, 20, [0, 1])) for r in range(WORLD))))


@given(st.sets(st.tuples(st.integers(0, 1), st.sampled_from([10, 20, 30, 40]))), st.data())
def test_the_plan_is_the_best_there_is(left: set[tuple[int, int]], data: st.DataObject) -> None:
    """Against an oracle of three lines: which step is whole, and how fresh each expert can be."""
    held = {10: [0, 1, 2, 3], 20: [1, 2], 30: [0, 3], 40: [1, 3]}
    seals = tuple((rank, seal(rank, step, held[step])) for rank, step in sorted(left))
    order = data.draw(st.permutations(seals))
    plan = climb(inventory(manifests=(FULL, NEXT), seals=tuple(order)))
    whole = [s for s in held if s in (10, 20) or {(0, s), (1, s)} <= left]
    assert plan.version.step == max(whole)
    for expert in range(EXPERTS):
        fresh = [10, 20] if expert in (1, 2) else [10]
        fresh += [s for r, s in left if expert // 2 == r and expert in held[s]]
        best = max(s for s in fresh if s <= plan.version.step)
        assert plan.versions[0][expert].step == best
    assert plan == climb(inventory(manifests=(NEXT, FULL), seals=seals))
    assert all(f.sources for f in plan.fetches)
