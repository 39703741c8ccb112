"""The narrow waist for ranks: a group of them exchanges small values.

Two kinds of call. Blocking ones gather and broadcast byte strings; they run at construction, at
the first save and at restore. Posted ones are a short vector of integers whose minimum or sum is
launched now and read later; the ticket of every save is one. All calls are collective: every rank
of the group makes the same ones in the same order, on its main thread. Errors travel as values
(`agree`), so that one rank's failure is every rank's in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

import moc.errors
from moc.errors import MocError

__all__ = ["Group", "Pending", "SingleGroup", "agree", "gather_values", "name_ranks"]

T = TypeVar("T")


class Pending(Protocol):
    """A reduction under way."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        ...

    def wait(self, timeout_secs: float) -> list[int]:
        """The reduced words. May be called again, also after it ran out of time.

        Raises:
            DeadlineError: some rank has not posted yet; names it where that can be known.
            RuntimeError: some rank is gone.
        """
        ...


class Group(Protocol):
    """Some ranks of the job, numbered from 0 in this group.

    Raises:
        DeadlineError: (all calls) some rank did not make the same call in time; the group is
            of no use any more.
        RuntimeError: (all calls) some rank is gone.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        ...

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's value, in rank order, on every rank."""
        ...

    def broadcast(self, value: bytes | None, src: int = 0) -> bytes:
        """The value of rank ``src`` on every rank; what the others pass is ignored."""
        ...

    def post_min(self, values: Sequence[int]) -> Pending:
        """Launch the minimum, word by word, over all ranks. Words are signed 64-bit."""
        ...

    def post_sum(self, values: Sequence[int]) -> Pending:
        """Launch the sum, word by word, over all ranks. Words are signed 64-bit."""
        ...

    def close(self) -> None:
        """Leave the group; waits for nobody. Closing again is fine."""
        ...


def gather_values(group: Group, value: T, kind: type[T]) -> list[T]:
    """Every rank's value, in rank order: builtins and structs that msgspec can encode.

    Args:
        group: the ranks that take part.
        value: this rank's value.
        kind: its type, by which the others' values are checked.
    """
    encoded = group.gather(msgspec.msgpack.encode(value))
    return [msgspec.msgpack.decode(data, type=kind) for data in encoded]


def agree(group: Group, fn: Callable[[], T]) -> T:
    """Run ``fn`` on every rank; raise on all of them if it failed on any.

    The error raised is of the type that the lowest failing rank met, where that is one of ours,
    else a `MocError`. It names all ranks that failed; on those it has their own error as cause.
    """
    cause: Exception | None = None
    result: T | None = None
    try:
        result = fn()
    except Exception as error:
        if group.world_size == 1 and isinstance(error, MocError):
            raise  # there is nobody else to tell
        cause = error
    mine = _Outcome(type(cause).__name__, str(cause)) if cause else _Outcome()
    outcomes = gather_values(group, mine, _Outcome)
    failed: dict[_Outcome, list[int]] = {}  # what 1,000 ranks met alike is said once
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            failed.setdefault(outcome, []).append(rank)
    if failed:
        lines = [f"{name_ranks(ranks)}: {o.error}: {o.text}" for o, ranks in failed.items()]
        raise _error_type(next(iter(failed)).error)("; ".join(lines)) from cause
    return result  # type: ignore[return-value]  # fn's own, as no rank failed


class SingleGroup:
    """A group of one: every exchange gives this rank's own values at once."""

    rank = 0
    world_size = 1

    def gather(self, value: bytes) -> list[bytes]:
        """See `Group.gather`."""
        return [value]

    def broadcast(self, value: bytes | None, src: int = 0) -> bytes:
        """See `Group.broadcast`."""
        assert value is not None
        return value

    def post_min(self, values: Sequence[int]) -> Pending:
        """See `Group.post_min`."""
        return _Posted(list(values))

    def post_sum(self, values: Sequence[int]) -> Pending:
        """See `Group.post_sum`."""
        return _Posted(list(values))

    def close(self) -> None:
        """See `Group.close`."""


class _Posted:
    """A reduction over one rank."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def done(self) -> bool:
        return True

    def wait(self, timeout_secs: float) -> list[int]:
        return list(self._values)


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How a rank fared: the type of its error, empty for none, and the text."""

    error: str = ""
    text: str = ""


def _error_type(name: str) -> type[MocError]:
    found = getattr(moc.errors, name, None)
    return found if isinstance(found, type) and issubclass(found, MocError) else MocError


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a message: ``rank 3``, or ``ranks 3, 4`` and, of many, how many more."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
