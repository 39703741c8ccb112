"""Which pieces of a save need not be written, because a committed file holds the same bytes.

Frozen layers, adapters' base models and experts without tokens do not change from one save to the
next. The new manifest then names the file that holds them. Files are deleted whole, so one that is
named for a few of its bytes would keep the rest for nothing: a file is named as long as at least
half of it is in use. Unchanged pieces that leave such a file move, together, into one that holds
nothing else, and stay there.

Equal means: the same piece (name, region, dtype, so the same length) and the same xxh3-64 of its
bytes. 64 bits are taken for equality: that a piece has changed and its digest has not is one chance
in 2**64 for each comparison; xxh3 is no defence against values made to collide.

A record names the file that holds the bytes, never a step that refers to another: whatever the
number of saves, a reference is one file deep. The price: bytes that are stored once are lost once,
for every step that names them, until a full save writes them anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from moc.core.manifest import Manifest
from moc.core.piece import Piece, PieceRecord
from moc.core.safetensors import HEADER_ALIGN, file_bytes

__all__ = ["Split", "split", "unchanged"]


class Split(msgspec.Struct, frozen=True):
    """What becomes of the pieces of a save.

    Attributes:
        referenced: places of the pieces that are not written, by file and offset; ``file``
            indexes the base's files.
        moving: unchanged pieces that are written, into a file without changing ones.
    """

    referenced: tuple[PieceRecord, ...] = ()
    moving: frozenset[Piece] = frozenset()


def unchanged(records: Iterable[PieceRecord], base: Manifest) -> list[PieceRecord]:
    """The base's records of those pieces whose bytes are as they were.

    Args:
        records: pieces of a save, with digests.
        base: the committed manifest that the save builds on.
    """
    digests = {r.piece: r.digest for r in records}
    return [r for r in (*base.dense, *base.experts) if digests.get(r.piece) == r.digest]


def split(
    same: Sequence[PieceRecord],
    saved: Sequence[Collection[int]],
    base: Manifest,
    unsound: Collection[str] = (),
) -> Split:
    """Decide which of the unchanged pieces are referenced.

    Args:
        same: what `unchanged` found among the pieces that this rank would write.
        saved: experts that the save holds, per MoE layer; those of others are inherited, and keep
            their files anyway.
        base: the committed manifest that the save builds on.
        unsound: keys of files that are known to be bad or gone.
    """
    sound = [r for r in same if base.files[r.file].key not in unsound]
    used: dict[int, list[Piece]] = {r.file: [] for r in sound}
    for record in (*sound, *_inherited(base, saved)):
        if record.file in used:
            used[record.file].append(record.piece)
    named = {
        file for file, pieces in used.items() if 2 * file_bytes(pieces) >= base.files[file].nbytes
    }
    moving = [r.piece for r in sound if r.file not in named]
    if sum(p.nbytes for p in moving) < HEADER_ALIGN:
        moving = []  # a file of their own would be mostly header
    referenced = sorted((r for r in sound if r.file in named), key=lambda r: (r.file, r.offset))
    return Split(tuple(referenced), frozenset(moving))


def _inherited(base: Manifest, saved: Sequence[Collection[int]]) -> Iterable[PieceRecord]:
    sets = [set(ids) for ids in saved]
    return (r for r in base.experts if r.piece.expert not in sets[r.piece.layer])
