"""A store in a dictionary: the model that the others are tested against."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from moc.errors import KeyExists, KeyMissing
from moc.store.base import Chunk, Names, check_key, check_prefix

__all__ = ["MemoryStore"]


class MemoryStore:
    """Bytes in this process. It copies what it is given: a caller may reuse its buffers.

    Args:
        name: what the url shows; two stores share nothing, whatever their names.
    """

    def __init__(self, name: str = "") -> None:
        self.url = f"moc-memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        data = self._find(key)
        return data[offset : len(data) if nbytes is None else offset + nbytes]

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        check_key(key)
        if self.exists(key):
            raise KeyExists(f"{self.url}: {key} exists", key=key)
        data = b"".join(chunks)
        with self._lock:  # the chunks may have taken long
            if key in self._objects:
                raise KeyExists(f"{self.url}: {key} exists", key=key)
            self._objects[key] = data
        return len(data)

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        check_key(key)
        copy = bytes(data)
        with self._lock:
            self._objects[key] = copy

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        folder = check_prefix(prefix)
        with self._lock:
            keys = sorted(self._objects)
        return [key for key in keys if not folder or key.startswith(folder + "/")]

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`."""
        folder = check_prefix(prefix)
        skip = len(folder) + 1 if folder else 0
        return sorted({key[skip:].split("/", 1)[0] for key in self.list(folder)})

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        with self._lock:
            return check_key(key) in self._objects

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return len(self._find(key))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def tidy(self) -> int:
        """See `Store.tidy`."""
        return 0

    def _find(self, key: str) -> bytes:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is None:
            raise KeyMissing(f"{self.url}: no {key}", key=key)
        return data
