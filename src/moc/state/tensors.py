"""Torch tensors as bytes and back, without a copy and without NumPy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from moc.errors import StateError

__all__ = [
    "as_bytes",
    "as_values",
    "can_add",
    "can_cast",
    "dtype_names",
    "is_expanded",
    "over",
    "tensor_bytes",
    "torch_dtype",
]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_LOGICAL: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for name in (
        "complex32",
        "complex128",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if (dtype := getattr(torch, name, None)) is not None  # newer than torch 2.6
}
"""Dtypes that safetensors or its binding lacks, by torch's names; held as bytes."""

_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | _LOGICAL


def dtype_names(dtype: torch.dtype, what: str) -> tuple[str, str]:
    """Safetensors name of a dtype, and the logical name where that one only counts bytes.

    Raises:
        StateError: values of this dtype are not all there is to them (quantized), or unknown.
    """
    if dtype in _NAMES:
        return _NAMES[dtype], ""
    name = str(dtype).removeprefix("torch.")
    if name in _LOGICAL:
        return "U8", name
    known = sorted([*(str(d).removeprefix("torch.") for d in _NAMES), *_LOGICAL])
    raise StateError(
        f"{what} has dtype {dtype}, which cannot be saved; supported are {', '.join(known)}"
    )


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a safetensors name, or of a logical one."""
    return _DTYPES[name]


def can_cast(source: str, target: str) -> bool:
    """Whether a cast keeps the kind of number: not from complex to real, nor from float to int."""
    kind, wanted = torch_dtype(source), torch_dtype(target)
    if not torch.can_cast(kind, wanted):
        return False
    try:
        torch.empty(1, dtype=kind).to(wanted)
    except RuntimeError:  # packed types have no conversions
        return False
    return True


def can_add(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be summed."""
    if dtype == torch.bool:
        return False
    try:
        torch.zeros(1, dtype=dtype).add_(torch.zeros(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several values share memory, as `torch.Tensor.expand` makes them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A U8 view with one more dimension at the end, over the bytes of each item.

    Raises:
        StateError: the tensor's bytes are not its values: a lazily conjugated view.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise StateError("a lazily conjugated tensor has no bytes of its own; use resolve_conj()")
    return tensor.detach().unsqueeze(-1).view(torch.uint8)


def as_values(items: torch.Tensor, logical: str) -> torch.Tensor:
    """A copy of the values behind what `as_bytes` gave; in a file they are not aligned."""
    return items.clone(memory_format=torch.contiguous_format).view(torch_dtype(logical)).squeeze(-1)


def over(
    buffer: memoryview | mmap.mmap | bytearray, offset: int, dtype: str, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor over bytes of a buffer; shares its memory and keeps it alive.

    Args:
        buffer: writable, or readable if the tensor is only read.
        offset: first byte; a multiple of the item size.
        dtype: safetensors name.
        shape: of the tensor.
    """
    numel = 1
    for size in shape:
        numel *= size
    kind = torch_dtype(dtype)
    if numel == 0:  # frombuffer refuses to make an empty tensor
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(buffer, dtype=kind, count=numel, offset=offset).view(tuple(shape))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; a view where it is a contiguous CPU tensor.

    The view is valid while the caller keeps ``tensor`` alive and, for others, only at once.
    """
    flat = tensor.detach().to("cpu").contiguous()
    nbytes = flat.numel() * flat.element_size()
    if nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_char * nbytes).from_address(flat.data_ptr())
    array.owner = flat  # type: ignore[attr-defined]  # keeps the storage alive with the view
    return memoryview(array).cast("B")
