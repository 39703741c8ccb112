"""Sealed buffer to files and receipt: one rank's part of a persist."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from moc.core.digest import digest_bytes
from moc.core.manifest import FileInfo, Seal, decode_json, seal_path
from moc.core.piece import PieceRecord
from moc.core.safetensors import in_file_order, lay_out, make_header
from moc.core.versions import Version
from moc.errors import DamagedError
from moc.store.base import Store

__all__ = ["digest_records", "read_seal", "shared_buffer", "write_file"]


def read_seal(buffer: str, version: Version) -> Seal:
    """The seal beside a buffer.

    Raises:
        DamagedError: it is missing, damaged, or of another version: the buffer was overwritten.
    """
    path = seal_path(buffer)
    try:
        with open(path, "rb") as file:
            seal = decode_json(file.read(), Seal, path)
    except FileNotFoundError:
        raise DamagedError(f"{buffer} holds no sealed snapshot") from None
    if seal.version != version:
        raise DamagedError(f"{buffer} holds step {seal.version}, not {version}")
    return seal


@contextmanager
def shared_buffer(path: str) -> Iterator[memoryview]:
    """The bytes of a buffer, under a shared record lock that the kernel frees at any death.

    Record locks are a process's: nobody in this process may hold another descriptor of the file.

    Raises:
        OSError: the file is gone, or its trainer is writing it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # A private mapping is writable to whoever makes tensors over it, and changes nothing.
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        view = memoryview(mapped)
        try:
            yield view
        finally:
            # An error on its way holds slices in its traceback; the mapping then goes with it.
            with suppress(BufferError):
                view.release()
                mapped.close()
    finally:
        os.close(descriptor)


def digest_records(view: memoryview, records: Sequence[PieceRecord]) -> list[PieceRecord]:
    """The same records with the digests of their bytes."""
    return [
        PieceRecord(
            r.piece, r.file, r.offset, digest_bytes(view[r.offset : r.offset + r.piece.nbytes])
        )
        for r in records
    ]


def write_file(
    store: Store, key: str, version: Version, view: memoryview, records: Sequence[PieceRecord]
) -> tuple[FileInfo, list[PieceRecord]]:
    """Gather pieces of a buffer into a new file with a header of its own.

    Args:
        store: where to.
        key: of the new file.
        version: noted in the header, for people who find the file alone.
        view: bytes of the buffer.
        records: what to take, with digests.

    Returns:
        The file, and records of where the pieces lie in it (file index 0).

    Raises:
        StoreError: the store failed.
        KeyExists: the key holds other bytes.
    """
    by_name = {r.piece.name: r for r in records}
    pieces = in_file_order(r.piece for r in records)
    header = make_header(
        pieces, metadata={"format": "pt", "moc": f"step {version.step} attempt {version.attempt}"}
    )
    written = [
        PieceRecord(r.piece, 0, r.offset, by_name[r.piece.name].digest)
        for r in lay_out(pieces, len(header))
    ]

    # Views, not copies; a sequence, so that the store can try again.
    starts = [by_name[piece.name].offset for piece in pieces]
    views = [view[s : s + p.nbytes] for s, p in zip(starts, pieces, strict=True)]
    nbytes = store.put_new(key, [header, *views])
    return FileInfo(key, nbytes, digest_bytes(header)), written
