"""Digests of bytes (xxh3, 64 bits) and of plans."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

__all__ = ["digest_bytes", "digest_plan"]


def digest_bytes(data: bytes | memoryview) -> str:
    """xxh3-64 of the bytes, 16 hex digits. Releases the interpreter lock (8-10 GB/s)."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_plan(values: Iterable[object]) -> int:
    """A 62-bit number that two ranks share only if they computed the same plan.

    62 bits, so that both it and its negative fit into a signed ticket word.
    """
    state = xxhash.xxh3_64()
    for value in values:
        state.update(msgspec.msgpack.encode(value))
        state.update(b"\x00")
    return state.intdigest() >> 2
