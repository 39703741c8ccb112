"""Stores around stores: faults for tests, a record of what was done, tries again."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from moc.core.faults import FaultScript
from moc.errors import KeyExists, KeyMissing, StoreError
from moc.store.base import Chunk, Names, Store, check_key, check_prefix, in_blocks
from moc.store.retry import Retries

__all__ = ["FaultyStore", "RecordingStore", "RetryingStore", "Wrapper"]

T = TypeVar("T")

_COMPARED_BYTES = 16 << 20  # read at once to see whose bytes a key holds


class Wrapper:
    """Passes every verb on through `_call`, which is all that a wrapper changes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        return self._call("get", key, lambda: self.inner.get(key, offset, nbytes))

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        return self._call("put_new", key, lambda: self.inner.put_new(key, chunks))

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        self._call("put", key, lambda: self.inner.put(key, data))

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`."""
        return self._call("children", prefix, lambda: self.inner.children(prefix))

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self._call("exists", key, lambda: self.inner.exists(key))

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self._call("size", key, lambda: self.inner.size(key))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call("delete", key, lambda: self.inner.delete(key))

    def tidy(self) -> int:
        """See `Store.tidy`."""
        return self._call("tidy", "", self.inner.tidy)

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        raise NotImplementedError


class FaultyStore(Wrapper):
    """Fails when its script says so.

    Args:
        inner: the store that works.
        script: what fails; None for nothing.

    Attributes:
        count: operations that the script concerns, so far; a test that lets each operation of
            a run fail in turn learns from a first run how many there are.
    """

    def __init__(self, inner: Store, script: FaultScript | None = None) -> None:
        super().__init__(inner)
        self.count = 0
        self._script = script
        self._lock = threading.Lock()

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        script = self._script
        if script is not None and not script.concerns(verb):
            return operation()
        with self._lock:
            self.count += 1
            number = self.count
        if script is None or not script.strikes(number):
            return operation()
        if script.when == "after":
            with suppress(KeyExists, KeyMissing):  # an answer, and it is lost like any other
                operation()
        if script.error == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        text = f"scripted fault {script.when} operation {number}, {verb} {key!r}"
        if script.error == "os":
            raise OSError(errno.EIO, text)
        raise StoreError(text, key=key)


class RecordingStore(Wrapper):
    """Keeps a record of the operations that succeeded.

    Attributes:
        calls: verb, key and number of bytes moved, in order.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str, int]] = []

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        self.inner.put(key, data)
        self.calls.append(("put", key, memoryview(data).nbytes))

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        result = operation()
        nbytes = 0
        if isinstance(result, bytes):
            nbytes = len(result)
        elif verb == "put_new" and isinstance(result, int):
            nbytes = result
        self.calls.append((verb, key, nbytes))
        return result


class RetryingStore(Wrapper):
    """Tries again after a failure, as `moc.store.retry.Retries` says.

    `KeyMissing`, `KeyExists` and `StoreRefused` are answers, not failures. A `put_new` that failed
    may have taken place: a key that is there at the next try counts as ours iff it holds the same
    bytes. It is tried again only if its chunks are a sequence, as others can be read only once.

    Args:
        inner: the store that may fail.
        tries: how often to try in all.
        backoff_secs: longest pause before the second try; it doubles with each.
        deadline_secs: after so long since the first try, a failure is final.
        on_retry: called with each error that is not final.
    """

    def __init__(
        self,
        inner: Store,
        tries: int = 5,
        backoff_secs: float = 0.1,
        deadline_secs: float = 60.0,
        on_retry: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._retries = Retries(tries, backoff_secs, deadline_secs, on_retry)

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        if not isinstance(chunks, Sequence):
            return self.inner.put_new(key, chunks)
        failed_before = False

        def operation() -> int:
            nonlocal failed_before
            try:
                return self.inner.put_new(key, chunks)
            except KeyExists:
                if failed_before and self._holds(key, chunks):
                    return self.inner.size(key)
                raise
            except (StoreError, OSError):
                failed_before = True
                raise

        return self._call("put_new", key, operation)

    def _holds(self, key: str, chunks: Sequence[Chunk]) -> bool:
        """Whether a key has exactly these bytes; reads it block by block."""
        offset = 0
        for block in in_blocks(chunks, _COMPARED_BYTES):
            if self.inner.get(key, offset, len(block)) != block:
                return False
            offset += len(block)
        return self.inner.size(key) == offset

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        check = check_prefix if verb in ("list", "children", "tidy") else check_key
        check(key)  # no time makes a bad key a good one
        return self._retries.run(operation)
