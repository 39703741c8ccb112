"""A store whose listings lag, as those of a service without consistent listings, or of NFS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from moc.store.base import Chunk, Names, Store
from moc.store.wrap import Wrapper

__all__ = ["LateStore"]

T = TypeVar("T")


class LateStore(Wrapper):
    """New keys are found by their exact name at once, and are listed only later.

    Args:
        inner: the store that has them.
        lag: operations after which a key that was put is listed; None for never.
        hides: also says of keys that others put whether listings lack them.
    """

    def __init__(
        self,
        inner: Store,
        lag: int | None = None,
        hides: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(inner)
        self._lag = lag
        self._hides = hides or (lambda _key: False)
        self._count = 0
        self._put: dict[str, int] = {}

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        nbytes = super().put_new(key, chunks)
        self._put[key] = self._count
        return nbytes

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        return [key for key in super().list(prefix) if not self._is_late(key)]

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`; a folder is listed once a key in it is."""
        folder = prefix.removesuffix("/")
        skip = len(folder) + 1 if folder else 0
        return sorted({key[skip:].partition("/")[0] for key in self.list(folder)})

    def _is_late(self, key: str) -> bool:
        since = self._put.get(key)
        is_new = since is not None and (self._lag is None or self._count - since < self._lag)
        return is_new or self._hides(key)

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        self._count += 1
        return operation()
