"""The safetensors container, as far as this library writes and reads it.

The format allows no hole between tensors, no byte after the last one, and no short body; it does
allow a header padded with spaces. So a buffer of fixed size is a valid file at every moment: a
header area of fixed size, the pieces, and one ``__pad__`` tensor over the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from moc.core.dtypes import ITEM_BYTES
from moc.core.piece import Piece, PieceRecord
from moc.errors import DamagedError

__all__ = ["HEADER_ALIGN", "file_bytes", "in_file_order", "lay_out", "make_header", "read_header"]

HEADER_ALIGN = 4096
"""Header areas are multiples of a page, so that data starts on one."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the safetensors reader's own limit


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces sorted by item size, large first, then by name: every piece starts aligned."""
    return sorted(pieces, key=lambda p: (-ITEM_BYTES[p.dtype], p.name))


def make_header(
    pieces: Sequence[Piece],
    *,
    area: int | None = None,
    data_bytes: int | None = None,
    metadata: dict[str, str] | None = None,
) -> bytes:
    """Header of a file that holds the pieces one after the other.

    Args:
        pieces: in file order.
        area: size in bytes of the whole header area; None takes the smallest multiple of
            `HEADER_ALIGN`.
        data_bytes: size of the data; what the pieces leave becomes a ``__pad__`` tensor.
        metadata: strings for ``__metadata__``.

    Raises:
        ValueError: the header does not fit into the area, or the pieces not into the data.
    """
    entries: dict[str, object] = {}
    if metadata:
        entries["__metadata__"] = metadata
    offset = 0
    for piece in pieces:
        end = offset + piece.nbytes
        entries[piece.name] = {
            "dtype": piece.dtype,
            "shape": piece.box.sizes,
            "data_offsets": (offset, end),
        }
        offset = end
    if data_bytes is not None and data_bytes != offset:
        if data_bytes < offset:
            raise ValueError(f"{offset} bytes of pieces do not fit into {data_bytes}")
        entries["__pad__"] = {
            "dtype": "U8",
            "shape": (data_bytes - offset,),
            "data_offsets": (offset, data_bytes),
        }
    text = msgspec.json.encode(entries)
    smallest = -(-(len(text) + _LENGTH_BYTES) // HEADER_ALIGN) * HEADER_ALIGN
    size = area if area is not None else smallest
    if size < len(text) + _LENGTH_BYTES:
        raise ValueError(f"a header of {len(text)} bytes does not fit into an area of {size}")
    return (size - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(
        size - _LENGTH_BYTES
    )


def file_bytes(pieces: Sequence[Piece]) -> int:
    """Size of a file that holds the pieces, but for what metadata adds to the header."""
    return len(make_header(pieces)) + sum(p.nbytes for p in pieces)


def lay_out(pieces: Sequence[Piece], start: int, file: int = 0) -> list[PieceRecord]:
    """Records of pieces that follow one another from byte ``start`` of a file."""
    records = []
    for piece in pieces:
        records.append(PieceRecord(piece, file, start))
        start += piece.nbytes
    return records


def read_header(data: bytes, what: str) -> tuple[int, dict[str, tuple[str, list[int], int, int]]]:
    """Parse the start of a file.

    Args:
        data: at least the header area.
        what: name for the error.

    Returns:
        Size of the header area, and per tensor (dtype, shape, first byte in the file, bytes).

    Raises:
        DamagedError: this is no safetensors header.
    """
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or size > _MAX_HEADER_BYTES or size + _LENGTH_BYTES > len(data):
        raise DamagedError(f"{what}: no safetensors header")
    body = data[_LENGTH_BYTES : _LENGTH_BYTES + size]
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{what}: damaged safetensors header: {error}") from error
    start = _LENGTH_BYTES + size
    return start, {
        name: (e.dtype, e.shape, start + e.data_offsets[0], e.data_offsets[1] - e.data_offsets[0])
        for name, e in entries.items()
    }
