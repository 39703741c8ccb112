"""The narrow waist for bytes: a blocking store from key to bytes.

A key is a relative path with ``/`` between its parts. Every key but the hint ``latest`` is
written once, by `Store.put_new`, whose return means that the bytes are durable; so a reader
never sees half an object, nor one object turn into another. Retries, records and faults are
wrappers (`moc.store.wrap`), not flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from moc.errors import StoreError

__all__ = ["Chunk", "Names", "Store", "check_key", "check_prefix", "in_blocks", "is_temporary"]

Chunk = bytes | bytearray | memoryview

Names = list[str]
"""Named here because `Store` has a method called ``list``."""

_TEMPORARY = re.compile(r"\..*\.tmp")


class Store(Protocol):
    """Bytes by key. Every operation blocks; all failures are `moc.errors.StoreError`.

    Those that no time mends, such as a lack of permission, are `moc.errors.StoreRefused`.
    """

    @property
    def url(self) -> str:
        """What `moc.store.open_store` makes this store from again."""
        ...

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a range, by default everything.

        Like a slice, a range that reaches beyond the end gives the bytes that are there; digests
        tell whether something is missing.

        Raises:
            KeyMissing: there is no such key.
        """
        ...

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """Write a key that must not exist; durable, whole and visible when this returns.

        A reader sees all of it or nothing. If this raises anything but `KeyExists`, the key is
        absent or, where the failure came after the object was in place, there and whole.

        Returns:
            The number of bytes written.

        Raises:
            KeyExists: the key is taken; nothing was changed. What holds it is durable.
        """
        ...

    def put(self, key: str, data: Chunk) -> None:
        """Write or replace a key at once. For the hint ``latest`` alone."""
        ...

    def list(self, prefix: str = "") -> Names:
        """All keys below a folder, sorted; without temporary files. Empty for no such folder."""
        ...

    def children(self, prefix: str = "") -> Names:
        """Names of files and folders directly below a folder, sorted. One cheap listing."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object of this key. A folder is none."""
        ...

    def size(self, key: str) -> int:
        """Number of bytes.

        Raises:
            KeyMissing: there is no such key.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def tidy(self) -> int:
        """Remove what writers that died left unfinished. For a time when nobody writes.

        Returns:
            How much was removed; 0 where the service hides and removes such things itself.
        """
        ...


def check_key(key: str) -> str:
    """Give the key back if every store can hold it.

    Raises:
        StoreError: the key is empty, absolute, climbs out with ``..``, has an empty part, is no
            valid text, or looks like a temporary file.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or not key.isprintable():
        raise StoreError(f"not a key: {key!r}", key=key)
    if any(is_temporary(part) for part in parts):
        raise StoreError(f"not a key, the name is one of a temporary file: {key!r}", key=key)
    return key


def check_prefix(prefix: str) -> str:
    """Give the folder without its trailing slash; the empty prefix is the whole store."""
    prefix = prefix.removesuffix("/")
    return check_key(prefix) if prefix else ""


def is_temporary(name: str) -> bool:
    """Whether a file of this name is unfinished, or the leftover of a writer that died."""
    return _TEMPORARY.fullmatch(name) is not None


def in_blocks(chunks: Iterable[Chunk], block_bytes: int) -> Iterator[bytes]:
    """The same bytes in blocks of one length, the last one shorter; holds one block at a time."""
    block = bytearray()
    for chunk in chunks:
        with memoryview(chunk) as view:
            if not view.nbytes:
                continue  # an empty view cannot be cast
            with view.cast("B") as data:
                done = 0
                while done < len(data):
                    end = done + block_bytes - len(block)
                    with data[done:end] as part:
                        block += part
                    done = end
                    if len(block) == block_bytes:
                        yield bytes(block)
                        block.clear()
    if block:
        yield bytes(block)
