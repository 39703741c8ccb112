"""A piece: what is chosen, written, verified and recovered as one.

Stacked ``[E, ...]`` tensors, one module per expert, and optimizer slices cut anywhere make neither
the tensor nor the module a usable unit; a region of one logical tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moc.core.box import Box
from moc.core.dtypes import ITEM_BYTES

__all__ = [
    "DENSE",
    "EXTRA",
    "MASTER",
    "MAX_PIECE_BYTES",
    "STEP_OF_EXPERT",
    "WEIGHT",
    "Piece",
    "PieceRecord",
    "parts_of_all",
    "value_box",
]

DENSE = -1
"""Layer and expert number of everything that is no routed expert."""

WEIGHT = "weight"
"""Part name of parameters and buffers; optimizer state parts carry the optimizer's own names."""

MASTER = "master"
"""Part name of the master copy that an optimizer steps in a parameter's place."""

EXTRA = "extra"
"""Part name of per-rank extras: scheduler, loader, RNG, as one encoded U8 piece."""

STEP_OF_EXPERT = "step@expert"
"""Part name of an expert's own copy of an optimizer step that a stacked tensor shares."""

MAX_PIECE_BYTES = 64 << 20
"""Pieces are cut at 64 MiB, so that every read can be verified in bounded memory."""


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A region of one logical tensor.

    Attributes:
        fqn: dotted name in the unwrapped model; a per-module expert carries its *global* id.
        part: ``weight``, ``master``, or the optimizer's name for a state (``exp_avg``,
            ``exp_avg_sq``, ...).
        box: region in the global tensor.
        dtype: safetensors dtype name.
        layer: MoE layer number (0-based, in model order), -1 for dense pieces.
        expert: global expert id, -1 for dense pieces.
        rank: the rank whose own value this is, -1 where every holder has the same bytes.
        logical: torch's name of a dtype that safetensors lacks; such values are stored as U8, with
            one more dimension at the end, of the item size. Empty where ``dtype`` says it all.
    """

    fqn: str
    part: str
    box: Box
    dtype: str
    layer: int = DENSE
    expert: int = DENSE
    rank: int = -1
    logical: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r} for {self.fqn}")
        if (self.layer < 0) != (self.expert < 0):
            raise ValueError(f"{self.fqn}: layer {self.layer} and expert {self.expert} disagree")

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.box.numel * ITEM_BYTES[self.dtype]

    @property
    def is_expert(self) -> bool:
        """Whether the piece belongs to a routed expert."""
        return self.layer >= 0

    @property
    def name(self) -> str:
        """Unique name: ``fqn|part|o0,o1:s0,s1``; ``part@rank7`` for a per-rank piece."""
        part = self.part if self.rank < 0 else f"{self.part}@rank{self.rank}"
        offsets = ",".join(map(str, self.box.offsets))
        sizes = ",".join(map(str, self.box.sizes))
        return f"{self.fqn}|{part}|{offsets}:{sizes}"

    @property
    def value_box(self) -> Box:
        """The region in values: without the dimension over the bytes of an item."""
        return value_box(self.box, self.logical)

    def with_box(self, box: Box) -> Piece:
        """The same logical tensor, another region."""
        return msgspec.structs.replace(self, box=box)


def parts_of_all(pieces: Iterable[Piece]) -> frozenset[tuple[str, str]]:
    """(fqn, part) of what every expert of a stacked tensor has; optimizer state comes later."""
    found: dict[tuple[str, str], set[int]] = {}
    for piece in pieces:
        if piece.is_expert:
            found.setdefault((piece.fqn, piece.part), set()).add(piece.expert)
    return frozenset(
        (fqn, part)
        for (fqn, part), experts in found.items()
        if len(experts) > 1 and experts == found.get((fqn, WEIGHT))
    )


def value_box(box: Box, logical: str) -> Box:
    """A region in values, of one that spans the bytes of items where there is a logical dtype."""
    return Box(box.offsets[:-1], box.sizes[:-1]) if logical else box


class PieceRecord(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a piece lie.

    Attributes:
        piece: what it is.
        file: index into the file list of the seal, receipt or manifest that holds this record.
        offset: first byte, counted from the start of the file.
        digest: xxh3-64 of the bytes as 16 hex digits; empty in a seal, where none is known yet.
    """

    piece: Piece
    file: int
    offset: int
    digest: str = ""
