"""Ranks that are threads of one process: for tests, and to try things out without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moc.comm.group import Pending, name_ranks
from moc.errors import DeadlineError, RanksDisagree

__all__ = ["LocalGroup"]


class LocalGroup:
    """One of N ranks that share a room; `make` gives all of them, one for each thread.

    The n-th call of one rank meets the n-th call of the others. Where these are calls of
    different kinds, all ranks raise: over real processes that would hang.

    Args:
        room: shared by the ranks.
        rank: this one's number.
    """

    class Gone(RuntimeError):
        """Another rank closed the group before it made the same call."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self._calls = 0
        self.rank = rank
        self.world_size = room.n

    @classmethod
    def make(cls, n: int, timeout_secs: float = 10) -> list[LocalGroup]:
        """The ranks of a new group, in order."""
        room = _Room(n, timeout_secs)
        return [cls(room, rank) for rank in range(n)]

    def gather(self, value: bytes) -> list[bytes]:
        """See `Group.gather`."""
        return [bytes(v) for v in self._meet("gather", bytes(value)).wait()]

    def broadcast(self, value: bytes | None, src: int = 0) -> bytes:
        """See `Group.broadcast`."""
        assert value is not None or self.rank != src
        mine = bytes(value) if value is not None and self.rank == src else b""
        return bytes(self._meet(f"broadcast of {src}", mine).wait()[src])

    def post_min(self, values: Sequence[int]) -> Pending:
        """See `Group.post_min`."""
        return _Reduction(self._meet("minimum", list(values)), min)

    def post_sum(self, values: Sequence[int]) -> Pending:
        """See `Group.post_sum`."""
        return _Reduction(self._meet("sum", list(values)), sum)

    def close(self) -> None:
        """See `Group.close`. Calls that still wait for this rank raise at once."""
        with self._room.changed:
            self._room.gone.add(self.rank)
            self._room.changed.notify_all()

    def _meet(self, kind: str, value: bytes | list[int]) -> _Meeting:
        self._calls += 1
        room = self._room
        with room.changed:
            values = room.calls.setdefault(self._calls, {})
            values[self.rank] = (kind, value)
            if len(values) == room.n:
                del room.calls[self._calls]  # whoever still waits holds it
            room.changed.notify_all()
        return _Meeting(room, values, f"{kind}, call {self._calls} of this group, rank {self.rank}")


class _Room:
    """What the ranks share."""

    def __init__(self, n: int, timeout_secs: float) -> None:
        self.n = n
        self.timeout_secs = timeout_secs
        self.changed = threading.Condition()
        self.calls: dict[int, dict[int, tuple[str, bytes | list[int]]]] = {}
        self.gone: set[int] = set()


class _Meeting:
    """One call, seen from one rank."""

    def __init__(
        self, room: _Room, values: dict[int, tuple[str, bytes | list[int]]], what: str
    ) -> None:
        self._room = room
        self._values = values
        self._what = what

    def done(self) -> bool:
        with self._room.changed:
            return self._settled()

    def wait(self, timeout_secs: float | None = None) -> list[bytes | list[int]]:
        """All ranks' values in rank order."""
        room = self._room
        limit = room.timeout_secs if timeout_secs is None else timeout_secs
        with room.changed:
            room.changed.wait_for(self._settled, limit)
            missing = self._missing()
            if missing:
                gone = sorted(missing & room.gone)
                if gone:
                    raise LocalGroup.Gone(f"{self._what}: {name_ranks(gone)} left")
                names = name_ranks(sorted(missing))
                raise DeadlineError(f"{self._what}: waited {limit:g} s; missing: {names}")
            kinds = {kind for kind, _ in self._values.values()}
            if len(kinds) > 1:
                raise RanksDisagree(f"{self._what}: other ranks call {sorted(kinds)}")
            return [self._values[rank][1] for rank in range(room.n)]

    def _missing(self) -> set[int]:
        return set(range(self._room.n)) - set(self._values)

    def _settled(self) -> bool:
        missing = self._missing()
        return not missing or bool(missing & self._room.gone)


class _Reduction:
    def __init__(self, meeting: _Meeting, reduce: Callable[[list[int]], int]) -> None:
        self._meeting = meeting
        self._reduce = reduce

    def done(self) -> bool:
        return self._meeting.done()

    def wait(self, timeout_secs: float) -> list[int]:
        columns = zip(*self._meeting.wait(timeout_secs), strict=True)
        return [self._reduce([int(word) for word in column]) for column in columns]
