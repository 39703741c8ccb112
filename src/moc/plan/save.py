"""Who writes which piece: fully sharded saving (paper sections 4.1 and 4.2, equal sharding).

Every rank describes what it holds; the descriptions are gathered once per structure, and every
rank computes the same plan from them. Pieces with one holder (optimizer slices under ZeRO) are
written where they are; pieces with several go to the least loaded holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from moc.core.digest import digest_plan
from moc.core.dtypes import ITEM_BYTES
from moc.core.piece import Piece
from moc.plan.balance import assign

__all__ = ["RankPlan", "plan_save"]

_SMALLEST_SPLIT_BYTES = 1 << 20  # below this a split costs more in headers than it balances
_SPLITS_PER_SHARE = 4


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank writes, and what all ranks must know about the rest.

    Attributes:
        dense: this rank's dense pieces; written in every save.
        experts: this rank's pieces of each (layer, expert); written when the expert is chosen.
        expert_pieces: number of pieces of each (layer, expert) over all ranks.
        expert_bytes: bytes of each (layer, expert) over all ranks.
        holders: lowest rank that holds each expert, [layer][expert]; -1 where nobody does.
        full_bytes: data bytes of a full save over all ranks, per-rank extras apart.
        rank_bytes: data bytes that each rank writes in a full save.
        digest: equal on two ranks only if they planned alike.
    """

    dense: tuple[Piece, ...]
    experts: dict[tuple[int, int], tuple[Piece, ...]]
    expert_pieces: dict[tuple[int, int], int]
    expert_bytes: dict[tuple[int, int], int]
    holders: tuple[tuple[int, ...], ...]
    full_bytes: int
    rank_bytes: tuple[int, ...]
    digest: int

    def capacity(self, experts_per_layer: Mapping[int, int]) -> int:
        """Bytes that the largest possible selection makes this rank write.

        Args:
            experts_per_layer: how many experts of each layer a save takes.
        """
        by_layer: dict[int, list[int]] = {}
        for (layer, _), pieces in self.experts.items():
            by_layer.setdefault(layer, []).append(sum(p.nbytes for p in pieces))
        return sum(p.nbytes for p in self.dense) + sum(
            sum(sorted(sizes, reverse=True)[: experts_per_layer[layer]])
            for layer, sizes in by_layer.items()
        )


def plan_save(
    catalogues: Sequence[Sequence[Piece]], rank: int, experts_per_layer: Sequence[int]
) -> RankPlan:
    """Plan from what every rank holds.

    Args:
        catalogues: pieces held by each rank, in any order.
        rank: whose part to return.
        experts_per_layer: global number of experts of each MoE layer.
    """
    world = len(catalogues)
    held: dict[str, Piece] = {}
    holders: dict[str, list[int]] = {}
    for holder, pieces in enumerate(catalogues):
        for piece in pieces:
            held.setdefault(piece.name, piece)
            holders.setdefault(piece.name, []).append(holder)

    fair_share = sum(p.nbytes for p in held.values() if not p.is_expert) // world
    largest = max(_SMALLEST_SPLIT_BYTES, fair_share // _SPLITS_PER_SHARE)
    parts: dict[str, Piece] = {}
    ranks: dict[str, list[int]] = {}
    for name, piece in held.items():
        movable = len(holders[name]) > 1 and not piece.is_expert
        for part in _split(piece, largest) if movable else (piece,):
            parts[part.name] = part
            ranks[part.name] = sorted(holders[name])

    writer: dict[str, int] = {}
    # Experts first and apart from the dense part: which of them are written changes from save to
    # save, so balancing one against the other would be right in one save only.
    for is_expert in (True, False):
        some = {n: p.nbytes for n, p in parts.items() if p.is_expert is is_expert}
        writer |= assign(some, ranks, [0] * world)

    mine = [parts[name] for name in sorted(parts) if writer[name] == rank]
    experts: dict[tuple[int, int], list[Piece]] = {}
    for piece in mine:
        if piece.is_expert:
            experts.setdefault((piece.layer, piece.expert), []).append(piece)
    counts: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    lowest = [[-1] * n for n in experts_per_layer]
    rank_bytes = [0] * world
    for name in sorted(parts):
        piece = parts[name]
        rank_bytes[writer[name]] += piece.nbytes
        if piece.is_expert:
            key = (piece.layer, piece.expert)
            counts[key] = counts.get(key, 0) + 1
            sizes[key] = sizes.get(key, 0) + piece.nbytes
            now = lowest[piece.layer][piece.expert]
            low = ranks[name][0]
            lowest[piece.layer][piece.expert] = low if now < 0 else min(now, low)
    return RankPlan(
        dense=tuple(p for p in mine if not p.is_expert),
        experts={key: tuple(owned) for key, owned in sorted(experts.items())},
        expert_pieces=counts,
        expert_bytes=sizes,
        holders=tuple(map(tuple, lowest)),
        full_bytes=sum(p.nbytes for p in parts.values()),
        rank_bytes=tuple(rank_bytes),
        digest=digest_plan((name, writer[name]) for name in sorted(parts)),
    )


def _split(piece: Piece, max_bytes: int) -> list[Piece]:
    tiles = piece.box.tiles(max(1, max_bytes // ITEM_BYTES[piece.dtype]))
    return [piece.with_box(box) for box in tiles]
