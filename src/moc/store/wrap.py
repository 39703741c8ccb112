"""Stores around stores: faults for tests, a record of what was done, tries again."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from moc import knobs
from moc.core.faults import FaultScript
from moc.errors import KeyExists, KeyMissing, StoreError
from moc.store.base import Chunk, Names, Store, check_key, check_prefix

__all__ = ["FaultyStore", "RecordingStore", "RetryingStore"]

T = TypeVar("T")


class _Wrapper:
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

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        raise NotImplementedError


class FaultyStore(_Wrapper):
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
            operation()
        if script.error == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        text = f"scripted fault {script.when} operation {number}, {verb} {key!r}"
        if script.error == "os":
            raise OSError(errno.EIO, text)
        raise StoreError(text, key=key)


class RecordingStore(_Wrapper):
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


class RetryingStore(_Wrapper):
    """Tries again after a failure, waiting twice as long each time.

    `KeyMissing` and `KeyExists` are answers, not failures. A `put_new` that failed may have taken
    place: a key that is there at the next try counts as ours iff it holds the same bytes. It is
    tried again only if its chunks are a sequence, as others can be read only once.

    Args:
        inner: the store that may fail.
        attempts: how often to try in all.
        backoff_secs: wait before the second try.
    """

    def __init__(self, inner: Store, attempts: int = 4, backoff_secs: float = 0.1) -> None:
        if attempts < 1:
            raise ValueError(f"at least one attempt: {attempts}")
        super().__init__(inner)
        self._attempts = attempts
        self._backoff_secs = backoff_secs

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
        """Whether a key has exactly these bytes; reads it chunk by chunk."""
        offset = 0
        for chunk in chunks:
            nbytes = memoryview(chunk).nbytes
            if nbytes and self.inner.get(key, offset, nbytes) != bytes(chunk):
                return False
            offset += nbytes
        return self.inner.size(key) == offset

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        check = check_prefix if verb in ("list", "children") else check_key
        check(key)  # no time makes a bad key a good one
        for attempt in range(self._attempts - 1):
            try:
                return operation()
            except (KeyMissing, KeyExists):
                raise
            except (StoreError, OSError):
                knobs.sleep(self._backoff_secs * 2**attempt)
        return operation()
