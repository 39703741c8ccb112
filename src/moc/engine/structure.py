"""What is saved and by whom: described, gathered, compared and planned once per structure.

The structure changes when state appears (the first step, an expert's first token), not from save
to save; so everything that can be prepared is prepared here, and a save only walks a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from moc.comm.group import agree, gather_values
from moc.core.box import Box
from moc.core.digest import digest_bytes
from moc.core.piece import DENSE, EXTRA, MASTER, MAX_PIECE_BYTES, WEIGHT, Piece, parts_of_all
from moc.core.safetensors import in_file_order, make_header
from moc.engine.session import Session
from moc.errors import LayoutError, SaveError
from moc.plan.save import RankPlan, plan_save
from moc.snapshot.buffers import run_memory
from moc.snapshot.room import available_ram, usable_bytes
from moc.state.extras import Large, encode
from moc.state.groups import capture_groups
from moc.state.live import BUFFER, REGISTERED, Region
from moc.state.tensors import tensor_bytes

__all__ = [
    "EXTRAS",
    "OPTIMIZER_GROUPS",
    "Slot",
    "Structure",
    "agree_on_structure",
    "capture_extras",
    "large_extra",
]

EXTRAS = "moc.extras"
"""Name of the per-rank piece that holds scheduler, loader, RNG and the like."""

OPTIMIZER_GROUPS = "moc.optimizer_groups"
"""Name of the per-rank piece that holds the optimizers' groups."""

_EXTRAS_SLACK_BYTES = 64 << 10
_MOST_LARGE_EXTRAS = 4096
_SPARE_LARGE_EXTRAS = 8  # beyond twice as many as there are: their names stand in the header
_MIN_BUFFERS = 3
_SPARE_BUFFERS = 3  # beyond the windows: one written, one persisted, one kept for recovery
_MEMORY_SHARE = 0.5  # of what is free on tmpfs, unless the user says how much


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece that this rank writes, and the live region that holds it.

    Attributes:
        piece: what it is.
        nbytes: its size.
        region: where its values are.
        within: slices of the region's tensor; empty for a 0-d one.
    """

    piece: Piece
    nbytes: int
    region: Region
    within: tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """One rank's part of what all ranks have agreed on.

    Attributes:
        plan: who writes what.
        slots: everything this rank may write, in file order.
        stamp: of the live state that was described.
        diverged: (fqn, part) of buffers that every rank saves for itself.
        header_area: bytes reserved for the header of a buffer.
        buffer_bytes: size of a buffer: header, the largest ordinary snapshot, some slack.
        buffers: how many.
        buffers_wanted: how many would keep every expert's newest version in memory.
        left_out: names of buffers that are not saved by rule.
        extras_room: pieces that large tensors among the extras may make.
        frozen: names of parameters that no rank saves because they are not trained.
        memory_free: what the memory tier has, for people.
        is_private: buffers are private memory, as the tmpfs is too small.
        node_bytes: of all buffers of the ranks of this node.
        expert_parts: see `parts_of_all`.
    """

    plan: RankPlan
    slots: tuple[Slot, ...]
    stamp: tuple[int, ...]
    diverged: frozenset[tuple[str, str]]
    header_area: int
    buffer_bytes: int
    buffers: int
    buffers_wanted: int
    left_out: tuple[str, ...]
    frozen: tuple[str, ...]
    extras_room: int
    memory_free: str
    is_private: bool
    node_bytes: int = 0
    expert_parts: frozenset[tuple[str, str]] = frozenset()


def agree_on_structure(
    session: Session, before: Structure | None, memory_bytes: int | None
) -> Structure:
    """Describe what is held, gather it, compare replicas (the first time), and plan. Collective.

    Raises:
        LayoutError: a parameter differs between ranks that the layout says are replicas.
        SaveError: the memory tier does not fit.
        StateError: some state has no form on disk.
    """
    regions, mine = agree(session.group, lambda: _describe(session, compare=before is None))
    told = gather_values(session.group, mine, list[tuple[Piece, str]])
    diverged = before.diverged if before else frozenset(_compare_replicas(told))
    catalogues = [
        [
            msgspec.structs.replace(piece, rank=rank)
            if (piece.fqn, piece.part) in diverged
            else piece
            for piece, _ in pieces
        ]
        for rank, pieces in enumerate(told)
    ]
    plan = plan_save(catalogues, session.rank, session.experts_per_layer)
    stamp = session.live.stamp()
    frozen = {
        n for names in gather_values(session.group, session.live.frozen, list[str]) for n in names
    }
    structure = agree(
        session.group, lambda: _size(session, plan, regions, stamp, diverged, memory_bytes)
    )
    sizes = gather_values(session.group, structure.buffers * structure.buffer_bytes, int)
    here = sum(n for n, node in zip(sizes, session.nodes, strict=True) if node == session.node)
    return replace(
        structure,
        frozen=tuple(sorted(frozen)),
        node_bytes=here,
        expert_parts=parts_of_all(piece for pieces in catalogues for piece in pieces),
    )


def capture_extras(session: Session, room: int) -> list[tuple[Piece, memoryview]]:
    """This rank's state beside tensors of model and optimizer, now, as pieces.

    Args:
        session: of this rank.
        room: how many pieces large tensors in it may make, at most.

    Returns:
        Pieces with their bytes, which may be views of live tensors: copy them at once.
    """
    large = Large(room)
    found: list[tuple[str, bytes | memoryview]] = [
        (EXTRAS, session.extras.capture(large)),
        (OPTIMIZER_GROUPS, encode(capture_groups(session.live), "optimizer.param_groups")),
    ]
    pieces = [
        (_extras_piece(name, Box.whole((len(data),)), session.rank), memoryview(data))
        for name, data in found
    ]
    for number, data in enumerate(large.taken):
        for tile in Box.whole((len(data),)).tiles(MAX_PIECE_BYTES):
            piece = _extras_piece(large_extra(number), tile, session.rank)
            pieces.append((piece, memoryview(data)[tile.offsets[0] : tile.ends[0]]))
    return pieces


def large_extra(number: int) -> str:
    """Name of a large tensor among the extras."""
    return f"{EXTRAS}.{number}"


def _extras_piece(name: str, box: Box, rank: int) -> Piece:
    return Piece(name, EXTRA, box, "U8", rank=rank)


def _describe(session: Session, *, compare: bool) -> tuple[list[Region], list[tuple[Piece, str]]]:
    regions = list(session.live.regions())
    described = [
        (piece, digest_bytes(tensor_bytes(region.view(piece.box))) if compare else "")
        for region in regions
        for piece in region.pieces()
    ]
    return regions, described


def _size(
    session: Session,
    plan: RankPlan,
    regions: Sequence[Region],
    stamp: tuple[int, ...],
    diverged: frozenset[tuple[str, str]],
    memory_bytes: int | None,
) -> Structure:
    per_layer = {
        layer: session.policy.experts_per_save(count)[0]
        for layer, count in enumerate(session.experts_per_layer)
    }
    mine = [*plan.dense, *(p for pieces in plan.experts.values() for p in pieces)]
    extras = capture_extras(session, _MOST_LARGE_EXTRAS)
    room = 2 * len(extras) + _SPARE_LARGE_EXTRAS
    pieces = in_file_order(mine)
    # Room for the longest header there can be: every piece of this rank, and extras of any size.
    longest = Box((1 << 40,), (1 << 40,))
    names = [EXTRAS, OPTIMIZER_GROUPS, *map(large_extra, range(room))]
    tail = [_extras_piece(name, longest, session.rank) for name in names]
    header_area = len(make_header([*pieces, *tail]))
    slack = 2 * sum(len(data) for _, data in extras) + _EXTRAS_SLACK_BYTES
    size = header_area + plan.capacity(per_layer) + slack
    buffer_bytes = -(-size // 4096) * 4096
    wanted = (
        max((-(-n // per_layer[m]) for m, n in enumerate(session.experts_per_layer)), default=1)
        + _SPARE_BUFFERS
    )
    buffers, told, is_private = _count_buffers(session, buffer_bytes, wanted, memory_bytes)
    table: dict[tuple[str, str], list[Region]] = {}
    for region in regions:
        table.setdefault((region.fqn, region.part), []).append(region)
    return Structure(
        plan=plan,
        slots=tuple(_slot(piece, table) for piece in pieces),
        stamp=stamp,
        diverged=diverged,
        header_area=header_area,
        buffer_bytes=buffer_bytes,
        buffers=buffers,
        memory_free=told,
        is_private=is_private,
        buffers_wanted=wanted,
        left_out=tuple(session.live.left_out),
        frozen=(),
        extras_room=room,
    )


def _slot(piece: Piece, table: dict[tuple[str, str], list[Region]]) -> Slot:
    for region in table[piece.fqn, piece.part]:
        if piece.box.numel == 0 or piece.box.intersect(region.box) == piece.box:
            within = piece.box.within(region.box) if piece.box.sizes else ()
            return Slot(piece, piece.nbytes, region, within)
    raise AssertionError(f"no live tensor for planned piece {piece.name}")


def _count_buffers(
    session: Session, buffer_bytes: int, wanted: int, memory_bytes: int | None
) -> tuple[int, str, bool]:
    """How many buffers, what there is for them, and whether they must be private memory.

    Raises:
        SaveError: neither tmpfs nor RAM has room for the fewest that can work.
    """
    ranks_here = session.nodes.count(session.node)
    # Buffers that this run has already are its own: a restart must not halve the rest again.
    folder = run_memory(session.memory_dir, session.run_id)
    files = [p for p in folder.glob("*.safetensors") if not p.is_symlink()]
    held = sum(path.stat().st_size for path in files)
    tmpfs, ram = usable_bytes(session.memory_dir) + held, available_ram()
    if ram is not None:
        ram += held
    on_tmpfs = tmpfs if ram is None else min(tmpfs, ram)
    share = 1.0 if memory_bytes is not None else _MEMORY_SHARE

    def affordable(room: int) -> int:
        free = int(room * share) // ranks_here
        return (free if memory_bytes is None else min(free, memory_bytes)) // buffer_bytes

    least = f"rank {session.rank}: {_MIN_BUFFERS} buffers of {buffer_bytes} bytes do not fit into "
    if memory_bytes is not None and memory_bytes // buffer_bytes < _MIN_BUFFERS:
        raise SaveError(
            f"{least}{memory_bytes} bytes (memory_bytes) of {session.memory_dir}; raise it, name "
            "another directory (memory_dir=), or lower k_snapshot",
            rank=session.rank,
            path=str(session.memory_dir),
        )
    is_private = affordable(on_tmpfs) < _MIN_BUFFERS
    room = ram if is_private and ram is not None else on_tmpfs
    told = f"{tmpfs / 1e6:.1f} MB on tmpfs"
    if ram is not None:
        told += f", {ram / 1e6:.1f} MB of RAM"
    if affordable(room) < _MIN_BUFFERS:
        raise SaveError(
            f"{least}the share of each of {ranks_here} ranks in what is free ({told}); free or add "
            "memory, enlarge the tmpfs, name another directory (memory_dir=), or lower k_snapshot",
            rank=session.rank,
            path=str(session.memory_dir),
        )
    return min(session.policy.buffers or wanted, affordable(room)), told, is_private


def _compare_replicas(told: Sequence[Sequence[tuple[Piece, str]]]) -> Iterator[tuple[str, str]]:
    """Find buffers that differ between their holders.

    Raises:
        LayoutError: a parameter or its optimizer state differs: a wrong group, or replicas that
            have drifted apart.
    """
    seen: dict[str, tuple[int, str]] = {}
    for rank, pieces in enumerate(told):
        for piece, digest in pieces:
            other, expected = seen.setdefault(piece.name, (rank, digest))
            if digest == expected:
                continue
            if piece.part == BUFFER and piece.layer == DENSE:
                yield piece.fqn, piece.part
                continue
            if piece.part == REGISTERED:
                raise LayoutError(
                    f"registered tensor {piece.fqn} differs between ranks {other} and {rank}; give "
                    "register(scope='per_rank') or 'sum' if it should"
                )
            group = "edp (or ep)" if piece.is_expert else "dp"
            what = {WEIGHT: "parameter", MASTER: "master of"}.get(
                piece.part, f"optimizer state {piece.part} of"
            )
            raise LayoutError(
                f"{what} {piece.fqn} differs between ranks {other} and {rank}, which the layout "
                f"says are replicas; is the {group} group right, and are replicas in step?"
            )
