"""The values everything else is made of: boxes, pieces, versions, manifests."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.core.box import Box, bounding_shape, uncovered
from moc.core.digest import digest_bytes, digest_plan
from moc.core.manifest import (
    FORMAT,
    CommitHead,
    FileInfo,
    Receipt,
    RunInfo,
    Seal,
    assemble,
    attempt_key,
    decode_json,
    encode_json,
    manifest_key,
    parse_attempt_key,
    parse_step_dir,
    receipt_key,
    sign,
    step_dir,
)
from moc.core.piece import Piece, PieceRecord
from moc.core.topology import Topology
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import DamagedError, LayoutError

# ------------------------------------------------------------------------------------------ boxes


def cells(box: Box) -> set[tuple[int, ...]]:
    """Every index in a box."""
    return set(
        itertools.product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True)))
    )


@st.composite
def boxes_of(draw: st.DrawFn, rank: int) -> Box:
    """A box within 6 ** rank cells, empty ones included."""
    numbers = st.tuples(*[st.integers(0, 3)] * rank)
    return Box(draw(numbers), draw(numbers))


ranks = st.integers(0, 3)
pairs = ranks.flatmap(lambda rank: st.tuples(boxes_of(rank), boxes_of(rank)))
groups = ranks.flatmap(lambda r: st.tuples(boxes_of(r), st.lists(boxes_of(r), max_size=5)))


@given(pairs)
def test_intersection_is_the_common_cells(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert common == b.intersect(a)
    assert (cells(common) if common else set()) == cells(a) & cells(b)


def test_boxes_of_different_rank_share_nothing() -> None:
    assert Box.whole((2, 2)).intersect(Box.whole((4,))) is None


@given(pairs)
def test_difference_tiles_what_is_left(pair: tuple[Box, Box]) -> None:
    a, b = pair
    parts = list(a.subtract(b))
    assert sum(p.numel for p in parts) == len(cells(a) - cells(b))
    assert set().union(*map(cells, parts)) == cells(a) - cells(b)


@given(groups)
def test_uncovered_tiles_what_nobody_holds(group: tuple[Box, list[Box]]) -> None:
    wanted, held = group
    left = uncovered(wanted, held)
    expected = cells(wanted).difference(*map(cells, held))
    assert sum(b.numel for b in left) == len(expected)
    assert set().union(*map(cells, left)) == expected


@given(ranks.flatmap(boxes_of), st.integers(1, 30))
def test_tiles_tile(box: Box, most: int) -> None:
    parts = list(box.tiles(most))
    assert sum(p.numel for p in parts) == box.numel
    assert set().union(*map(cells, parts)) == cells(box)
    assert all(p.numel <= most for p in parts)
    assert all(p.numel > 0 for p in parts) or parts == [box]


@given(pairs)
def test_within_selects_the_cells(pair: tuple[Box, Box]) -> None:
    inner = pair[0].intersect(pair[1])
    if inner:
        outer = pair[1]
        local = [range(s.start, s.stop) for s in inner.within(outer)]
        moved = {
            tuple(i + o for i, o in zip(index, outer.offsets, strict=True))
            for index in itertools.product(*local)
        }
        assert moved == cells(inner)


def test_bounding_shape() -> None:
    assert bounding_shape([Box((0, 2), (1, 2)), Box((3, 0), (2, 1))]) == (5, 4)


def test_nonsense_is_no_box() -> None:
    with pytest.raises(ValueError, match="rank"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((0,), (-1,))


# ----------------------------------------------------------------------------------------- pieces

dotted = st.from_regex(r"[a-z_]{1,4}(\.[a-z0-9_]{1,4}){0,3}", fullmatch=True)
parts = st.sampled_from(["weight", "exp_avg", "exp_avg_sq", "step@expert", "extra"])


@st.composite
def pieces(draw: st.DrawFn, *, expert: bool | None = None) -> Piece:
    """A piece of any kind."""
    box = draw(ranks.flatmap(boxes_of))
    dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
    routed = draw(st.booleans()) if expert is None else expert
    layer, number = (draw(st.integers(0, 3)), draw(st.integers(0, 9))) if routed else (-1, -1)
    rank = -1 if routed else draw(st.integers(-1, 20))
    return Piece(draw(dotted), draw(parts), box, dtype, layer, number, rank)


@given(pieces())
def test_names_parse_back(piece: Piece) -> None:
    fqn, part, region = piece.name.rsplit("|", 2)
    base, marker, rank = part.partition("@rank")
    offsets, sizes = (
        tuple(int(n) for n in numbers.split(",") if n) for numbers in region.split(":")
    )
    assert (fqn, base, Box(offsets, sizes)) == (piece.fqn, piece.part, piece.box)
    assert (int(rank) if marker else -1) == piece.rank


@given(pieces(), pieces())
def test_names_are_unique(a: Piece, b: Piece) -> None:
    same = (a.fqn, a.part, a.box, a.rank) == (b.fqn, b.part, b.box, b.rank)
    assert (a.name == b.name) == same


def test_piece_bytes_come_from_its_box() -> None:
    piece = Piece("w", "weight", Box((8, 0), (8, 4)), "BF16")
    assert piece.nbytes == 64
    assert piece.with_box(Box((0, 0), (1, 4))).nbytes == 8
    assert not piece.is_expert
    assert Piece("w", "weight", Box((), ()), "F64", 0, 3).is_expert


def test_nonsense_is_no_piece() -> None:
    with pytest.raises(ValueError, match="dtype"):
        Piece("w", "weight", Box((), ()), "FLOAT")
    with pytest.raises(ValueError, match="disagree"):
        Piece("w", "weight", Box((), ()), "F32", layer=1)


# --------------------------------------------------------------------------------------- versions


def attempt(number: int, resumed: int) -> AttemptRecord:
    return AttemptRecord(
        attempt=number,
        parent=number - 1,
        resumed_step=resumed,
        world_size=1,
        k_snapshot=1,
        k_persist=1,
    )


def timeline(*resumed: int) -> Timeline:
    return Timeline.of([attempt(i + 1, step) for i, step in reversed(list(enumerate(resumed)))])


def test_versions_are_ordered_by_step() -> None:
    assert sorted([Version(2, 1), Version(1, 2), Version(1, 1)]) == [
        Version(1, 1), Version(1, 2), Version(2, 1),
    ]  # fmt: skip


def test_what_a_rollback_leaves_behind_is_dead() -> None:
    history = timeline(0, 100)
    assert history.head == 2
    assert history.is_live(Version(100, 1))
    assert not history.is_live(Version(110, 1))
    assert history.is_live(Version(110, 2))


def test_a_rollback_through_several_attempts() -> None:
    """Attempt 3 resumes below where attempt 2 started: what 1 made in between is dead too."""
    history = timeline(0, 100, 60)
    assert history.is_live(Version(60, 1))
    assert not history.is_live(Version(80, 1))
    assert not history.is_live(Version(110, 2))
    assert history.is_live(Version(80, 3))
    assert [a.attempt for a in history.live_attempts()] == [1, 3]


def test_unknown_attempts_are_not_live() -> None:
    assert not timeline(0).is_live(Version(1, 2))
    assert not Timeline().is_live(Version(1, 1))
    assert Timeline().head == 0
    assert Timeline().live_attempts() == ()


@given(st.data())
def test_live_versions_are_the_states_training_went_through(data: st.DataObject) -> None:
    """Against a model: one path of states; a restart cuts it back and goes on."""
    path: list[Version] = []
    made: set[Version] = set()
    resumed = []
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        at = data.draw(st.sampled_from([0, *(v.step for v in path)])) if path else 0
        resumed.append(at)
        path = [v for v in path if v.step <= at]
        path += [Version(at + i + 1, number) for i in range(data.draw(st.integers(0, 4)))]
        made |= set(path)
    history = timeline(*resumed)
    assert {v for v in made if history.is_live(v)} == set(path)


# ---------------------------------------------------------------------------------------- the keys

versions = st.builds(Version, st.integers(0, 10**10), st.integers(0, 10**5))


@given(versions, st.integers(0, 10**6))
def test_keys_parse_back(version: Version, rank: int) -> None:
    assert parse_step_dir(step_dir(version)) == version
    assert parse_attempt_key(attempt_key(version.attempt)) == version.attempt
    for key in (manifest_key(version), receipt_key(version, rank)):
        assert parse_step_dir(key.partition("/")[0]) == version
        assert parse_attempt_key(key) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-100.bak", "step-1e3", "step--5", "step-", "step-00000100", "step-100-a1", "latest",
        "step-00000100-a0001.bak", "step-00000100-a0001/", " step-00000100-a0001",
        "step-00000100-a0001\n", "step-000000100-a0001", "step-00000100-a00001",
        "Step-00000100-a0001",
        "step-0000010\N{ARABIC-INDIC DIGIT ONE}-a0001", "step-00000100-a-001", "",
    ],
)  # fmt: skip
def test_what_merely_looks_like_a_step(name: str) -> None:
    assert parse_step_dir(name) is None


@pytest.mark.parametrize(
    "key", ["attempts/1.json", "attempts/00001.json", "attempts/0001.json.tmp", "0001.json", ""]
)
def test_what_merely_looks_like_an_attempt(key: str) -> None:
    assert parse_attempt_key(key) is None


# ------------------------------------------------------------------------------------ the manifest


def head(
    saved: list[list[int]], experts: int, base: Version | None = None, tokens: int = 0
) -> CommitHead:
    return CommitHead(
        model="m",
        base=base,
        layers=[f"layer{i}" for i in range(len(saved))],
        saved=saved,
        routed=[[tokens] * experts for _ in saved],
        lost=[[tokens // 10] * experts for _ in saved],
        k_snapshot=1,
        k_persist=1,
    )


def receipts(
    step: int, saved: list[list[int]], *, experts: int = 4, base: Version | None = None
) -> list[Receipt]:
    """Two ranks: the even experts on rank 0, the odd ones on rank 1; one dense piece each."""
    version = Version(step, 1)
    result = []
    for rank in range(2):
        folder = step_dir(version)
        files = [
            FileInfo(f"{folder}/dense-{rank:05d}.safetensors", 100, "d"),
            FileInfo(f"{folder}/experts-{rank:05d}.safetensors", 100, "e"),
        ]
        records = [PieceRecord(Piece(f"dense{rank}", "weight", Box((0,), (4,)), "F32"), 0, 8, "x")]
        for layer, ids in enumerate(saved):
            for e in ids:
                if e % 2 == rank:
                    piece = Piece(f"l{layer}.w", "weight", Box((e, 0), (1, 4)), "F32", layer, e)
                    records.append(PieceRecord(piece, 1, 16 * e, f"{step}"))
        result.append(
            Receipt(
                version=version,
                rank=rank,
                world_size=2,
                files=files,
                pieces=records,
                head=head(saved, experts, base, 10 * step) if rank == 0 else None,
            )
        )
    return result


FULL = [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_full_save_needs_no_base() -> None:
    manifest = assemble(receipts(10, FULL), None, "now")
    assert manifest.version == Version(10, 1)
    assert manifest.versions == [[Version(10, 1)] * 4] * 2
    assert manifest.version_routed == [[100] * 4] * 2
    assert manifest.version_lost == [[10] * 4] * 2
    assert len(manifest.files) == 4
    assert [r.piece.fqn for r in manifest.dense] == ["dense0", "dense1"]
    assert len(manifest.experts) == 8
    assert manifest.created == "now"


def test_the_order_of_receipts_does_not_matter() -> None:
    assert assemble(receipts(10, FULL)[::-1], None) == assemble(receipts(10, FULL), None)


def test_unsaved_experts_are_inherited() -> None:
    first = assemble(receipts(10, FULL), None)
    second = assemble(receipts(20, [[1], [2]], base=Version(10, 1)), first)
    third = assemble(receipts(30, [[2], [3]], base=Version(20, 1)), second)
    old, mid, new = Version(10, 1), Version(20, 1), Version(30, 1)
    assert third.versions == [[old, mid, new, old], [old, old, mid, new]]
    assert third.version_routed == [[100, 200, 300, 100], [100, 100, 200, 300]]
    assert third.version_lost == [[10, 20, 30, 10], [10, 10, 20, 30]]
    found = {}
    for record in third.experts:
        folder, _, _ = third.files[record.file].key.partition("/")
        found[record.piece.layer, record.piece.expert] = parse_step_dir(folder)
        assert record.digest == str(third.versions[record.piece.layer][record.piece.expert].step)
    assert len(third.experts) == len(found) == 8
    assert found == {(i, e): third.versions[i][e] for i in range(2) for e in range(4)}
    used = {record.file for record in [*third.experts, *third.dense]}
    named = {key for key in (info.key for info in third.files)}
    assert used <= set(range(len(third.files)))
    assert len(named) == len(third.files)
    assert not any(key.startswith(f"{step_dir(mid)}/dense") for key in named)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=2), max_size=6))
def test_every_expert_has_the_record_of_its_version(saves: list[list[set[int]]]) -> None:
    manifest = assemble(receipts(1, FULL), None)
    for step, saved in enumerate(saves, 2):
        chosen = [sorted(ids) for ids in saved]
        manifest = assemble(receipts(step, chosen, base=manifest.version), manifest)
        for record in manifest.experts:
            version = manifest.versions[record.piece.layer][record.piece.expert]
            assert record.digest == str(version.step)
            assert manifest.files[record.file].key.startswith(step_dir(version))
        assert len({r.piece for r in manifest.experts}) == len(manifest.experts) == 8


def test_missing_or_foreign_receipts_are_refused() -> None:
    both = receipts(10, FULL)
    for bad in (both[:1], both[1:], [both[0], both[0]], [], [both[0], receipts(20, FULL)[1]]):
        with pytest.raises(DamagedError):
            assemble(bad, None)
    with pytest.raises(DamagedError, match="belong"):
        assemble([msgspec.structs.replace(both[0], head=None), both[1]], None)


def test_the_wrong_base_is_refused() -> None:
    first = assemble(receipts(10, FULL), None)
    partial = receipts(30, [[1], [2]], base=Version(20, 1))
    for base in (None, first):
        with pytest.raises(DamagedError, match="builds on"):
            assemble(partial, base)
    with pytest.raises(DamagedError, match="builds on"):
        assemble(receipts(20, FULL), first)


def test_an_expert_without_a_version_is_refused() -> None:
    with pytest.raises(DamagedError, match="no version of experts"):
        assemble(receipts(10, [[0, 1, 2, 3], [0, 2, 3]]), None)


def test_experts_and_records_that_disagree_are_refused() -> None:
    """An expert that is said to be saved but in no file, and one in a file but not said to be."""
    first, second = receipts(10, FULL)
    lacking = msgspec.structs.replace(second, pieces=second.pieces[:-1])
    with pytest.raises(DamagedError, match="record"):
        assemble([first, lacking], None)
    base = assemble([first, second], None)
    first, second = receipts(20, [[1], [2]], base=base.version)
    surplus = receipts(20, [[1, 3], [2]])[1]
    with pytest.raises(DamagedError, match="record"):
        assemble([first, surplus], base)


# ---------------------------------------------------------------------------------------- the JSON


def test_round_trip() -> None:
    first = assemble(receipts(10, FULL), None, "2020-01-01T00:00:00Z")
    manifest = assemble(receipts(20, [[1], [2]], base=Version(10, 1)), first)
    receipt = receipts(20, FULL)[0]
    seal = Seal(
        run_id="r",
        version=Version(20, 1),
        rank=0,
        world_size=2,
        plan=(1 << 62) - 1,
        file="0-1.safetensors",
        pieces=receipt.pieces,
        expert_pieces=[(0, 1, 2)],
        head=head(FULL, 4),
    )
    info = RunInfo(run_id="r", model="m")
    for value in (manifest, first, receipt, receipts(20, FULL)[1], seal, info, attempt(2, 7)):
        data = encode_json(value)
        assert data.endswith(b"\n")
        assert data.count(b"\n") == 1
        assert decode_json(data, type(value), "it") == value


@given(pieces(), st.integers(0, 2**50))
def test_piece_records_round_trip(piece: Piece, offset: int) -> None:
    record = PieceRecord(piece, 3, offset, "ab")
    data = msgspec.json.encode(record)
    assert msgspec.json.decode(data, type=PieceRecord) == record


def test_unknown_fields_are_ignored_and_newer_formats_refused() -> None:
    data = sign(b'{"run_id": "r", "model": "m", "colour": "blue"}')
    assert decode_json(data, RunInfo, "run.json") == RunInfo(run_id="r", model="m")
    newer = sign(b'{"run_id": "r", "model": "m", "format": %d}' % (FORMAT + 1))
    with pytest.raises(DamagedError, match=r"run\.json has format"):
        decode_json(newer, RunInfo, "run.json")


@given(st.data())
def test_damaged_json_is_never_another_error(data: st.DataObject) -> None:
    good = encode_json(receipts(10, FULL)[0])
    cut = data.draw(st.integers(0, len(good) - 2))
    with pytest.raises(DamagedError, match="it is damaged"):
        decode_json(good[:cut], Receipt, "it")
    wrong = bytearray(good)
    wrong[cut] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedError, match="it is damaged"):
        decode_json(bytes(wrong), Receipt, "it")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"null", b"[" * 100_000, b'{"run_id": 1}', b"\0" * 9]
)
def test_garbage_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_json(data, RunInfo, "it")


# ---------------------------------------------------------------------------------- the small rest


def test_digests() -> None:
    assert digest_bytes(b"") == "2d06800538d394c2"
    assert len(digest_bytes(b"abc")) == 16
    assert digest_plan(["a", "bc"]) != digest_plan(["ab", "c"])
    assert digest_plan([1, (2, "x")]) == digest_plan(iter([1, (2, "x")]))
    assert 0 <= digest_plan([]) < 1 << 62


def test_topology_refuses_groups_that_do_not_fit() -> None:
    topology = Topology(rank=2, world_size=4, dp=(0, 1, 2, 3), ep=(2, 3), edp=(0, 2))
    assert (topology.ep_rank, topology.ep_size) == (0, 2)
    with pytest.raises(LayoutError, match="not in its own ep group"):
        Topology(rank=1, world_size=2, dp=(0, 1), ep=(0,), edp=(1,))
    with pytest.raises(LayoutError, match="does not fit"):
        Topology(rank=0, world_size=2, dp=(0, 2))
    with pytest.raises(LayoutError, match="does not fit"):
        Topology(rank=0, world_size=2, dp=(0, 0))
