"""Our container against its authority, the safetensors library."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.core.box import Box
from moc.core.dtypes import ITEM_BYTES
from moc.core.piece import Piece
from moc.core.safetensors import in_file_order, lay_out, make_header, read_header
from moc.errors import DamagedError
from moc.state.tensors import over, tensor_bytes, torch_dtype

LOADABLE = sorted(set(ITEM_BYTES) - {"C64"})

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
some_pieces = st.lists(
    st.tuples(st.text(max_size=12), shapes, st.sampled_from(LOADABLE)), min_size=1, max_size=8
).map(
    lambda rows: [
        Piece(f"{i}.{name}", "weight", Box.whole(shape), dtype)
        for i, (name, shape, dtype) in enumerate(rows)
    ]
)


@given(some_pieces, st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_library_opens_what_we_write(
    pieces: list[Piece], spare_pages: int, random: object
) -> None:
    ordered = in_file_order(pieces)
    size = sum(p.nbytes for p in ordered)
    header = make_header(ordered, data_bytes=size + 4096 * spare_pages)
    records = lay_out(ordered, len(header))
    body = bytearray(random.randbytes(size + 4096 * spare_pages))  # type: ignore[attr-defined]
    for record in records:
        if record.piece.dtype == "BOOL":
            start = record.offset - len(header)
            for i in range(start, start + record.piece.nbytes):
                body[i] &= 1
    file = bytes(header) + bytes(body)
    loaded = safetensors.torch.load(file)
    assert set(loaded) - {"__pad__"} == {p.name for p in pieces}
    for record in records:
        piece = record.piece
        assert record.offset % ITEM_BYTES[piece.dtype] == 0
        value = loaded[piece.name]
        assert tuple(value.shape) == piece.box.sizes
        assert value.dtype == torch_dtype(piece.dtype)
        mine = over(bytearray(file), record.offset, piece.dtype, piece.box.sizes)
        assert bytes(tensor_bytes(mine)) == bytes(tensor_bytes(value))
    start, entries = read_header(file, "file")
    assert start == len(header)
    for record in records:
        dtype, shape, offset, nbytes = entries[record.piece.name]
        assert (dtype, tuple(shape)) == (record.piece.dtype, record.piece.box.sizes)
        assert (offset, nbytes) == (record.offset, record.piece.nbytes)


def test_a_header_that_does_not_fit_is_refused() -> None:
    piece = Piece("x" * 5000, "weight", Box.whole((4,)), "F32")
    with pytest.raises(ValueError, match="does not fit"):
        make_header([piece], area=4096)
    with pytest.raises(ValueError, match="do not fit"):
        make_header([piece], data_bytes=8)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x10" + b"\0" * 7 + b"{not json}      "])
def test_what_is_no_header_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError, match="name of it"):
        read_header(data, "name of it")


@given(st.sampled_from(LOADABLE), shapes)
def test_bytes_and_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape, dtype=torch_dtype(dtype))
    data = bytearray(tensor_bytes(value))
    assert len(data) == value.numel() * ITEM_BYTES[dtype]
    assert over(data, 0, dtype, shape).shape == value.shape
