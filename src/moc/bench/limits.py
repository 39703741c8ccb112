"""What the machine can do at most: one thread copies, one process writes and syncs."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from moc.store.local import LocalStore

__all__ = ["Mapping", "write_streamed", "write_synced"]

_BLOCK_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python knows no name for it


class Mapping:
    """Pre-faulted shared memory on a tmpfs, like a snapshot's buffer, without a name."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Take the memory now, so that no copy pays for page faults."""
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.memory = mmap.mmap(file.fileno(), nbytes)
        try:
            self.memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            self.memory.write(bytes(nbytes))
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy contiguous tensors into it, one after the other, by `memmove` on this thread."""
        at = self._first
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            ctypes.memmove(at, tensor.data_ptr(), nbytes)
            at += nbytes


def write_synced(path: Path, data: memoryview | mmap.mmap) -> None:
    """Write a new file in as few system calls as there can be, and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.write(descriptor, view[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_streamed(path: Path, data: memoryview | mmap.mmap) -> None:
    """The same, but the disk begins while the rest is being written: what `LocalStore` does."""
    with memoryview(data) as view:
        blocks = [view[i : i + _BLOCK_BYTES] for i in range(0, len(view), _BLOCK_BYTES)]
        LocalStore(path.parent).put_new(path.name, blocks)
