"""Node-local disks as one store: data files on this node, all other keys on the coordinator's."""

from __future__ import annotations

from collections.abc import Iterable

from moc.core.manifest import is_data_key
from moc.store.base import Chunk, Names, Store, check_prefix

__all__ = ["NodeLocalStore"]


class NodeLocalStore:
    """Routes by key. What the two hold beside their own kind of keys is not looked at.

    Args:
        local: the folder on this node; it holds the data files of this node's ranks, and copies
            of the other keys that only a restore reads.
        control: where all nodes find run, attempts, receipts and manifests.
    """

    def __init__(self, local: Store, control: Store) -> None:
        self.local = local
        self.control = control

    @property
    def url(self) -> str:
        """The folder on this node."""
        return self.local.url

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        return self._of(key).get(key, offset, nbytes)

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        return self._of(key).put_new(key, chunks)

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        self._of(key).put(key, data)

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`: keys of the coordinator, and this node's data files."""
        control = [key for key in self.control.list(prefix) if not is_data_key(key)]
        return sorted([*control, *filter(is_data_key, self.local.list(prefix))])

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`."""
        folder = check_prefix(prefix)
        start = len(folder) + 1 if folder else 0
        return sorted({key[start:].partition("/")[0] for key in self.list(folder)})

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self._of(key).exists(key)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self._of(key).size(key)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._of(key).delete(key)

    def tidy(self) -> int:
        """See `Store.tidy`; the coordinator tidies its own."""
        return self.local.tidy()

    def _of(self, key: str) -> Store:
        return self.local if is_data_key(key) else self.control
