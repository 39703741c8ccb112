"""What a rank posted, in order: nothing is believed before all that was posted earlier agrees.

Of the ranks' calls, the n-th of one meets the n-th of the others, whatever they are. Those whose
size may differ, the closing of a ticket and blocking ones, follow only where what stands before
them was read and is the same on every rank. So a rank that leaves out a call, or makes another
one, is found by value and in time: by itself, and by every other rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from moc.choose.call import Call, Kind, open_call, pack_call
from moc.comm.group import Pending
from moc.engine.session import Session
from moc.errors import MocError, RanksDisagree

__all__ = ["Exchange", "Posted"]

T = TypeVar("T")


class Posted(Generic[T]):
    """A reduction under way, and how it is understood."""

    def __init__(
        self, pending: Pending, timeout_secs: float, understand: Callable[[list[int]], T]
    ) -> None:
        self._pending = pending
        self._timeout_secs = timeout_secs
        self._understand = understand

    def read(self) -> T:
        """Wait for it; from any thread, and more than once.

        Raises:
            RanksDisagree: ranks do not do the same.
            DeadlineError: some rank did not come to it in time; names it.
        """
        return self._understand(self._pending.wait(self._timeout_secs))


class Exchange:
    """Exchanges of one rank. On the main thread; of no use any more after an error."""

    def __init__(self, session: Session) -> None:
        """Post nothing yet."""
        self._session = session
        self._unread: deque[Posted[Any]] = deque()
        self._error: MocError | RuntimeError | None = None

    def post(self, kind: Kind, step: int, words: Sequence[int] = ()) -> Posted[list[int]]:
        """Launch the minimum over all ranks; of one size whatever it is for.

        Args:
            kind: what it is for.
            step: of the save, the look or the wait; the same on all ranks.
            words: this rank's.
        """
        self._check()
        session = self._session
        call = Call(kind=kind, step=step, rank=session.rank)
        return self._add(session.group.post_min(pack_call(call, words)), self._open)

    def post_sum(self, words: Sequence[int], understand: Callable[[list[int]], T]) -> Posted[T]:
        """Launch the sum over all ranks, right after a ticket was read.

        Args:
            words: this rank's.
            understand: makes sense of the sum, and raises where ranks disagree.
        """
        self._check()
        return self._add(self._session.group.post_sum(words), understand)

    def read(self, posted: Posted[T]) -> T:
        """Wait for what was posted, and for all before it: these must agree first.

        Raises:
            RanksDisagree: ranks do not do the same, here or at something posted before.
            DeadlineError: some rank did not come to it in time; names it.
        """
        self._check()
        try:
            while posted in self._unread:
                self._unread.popleft().read()
            return posted.read()
        except (MocError, RuntimeError) as error:
            self._error = error
            raise

    def _add(self, pending: Pending, understand: Callable[[list[int]], T]) -> Posted[T]:
        posted = Posted(pending, self._session.policy.timeout_secs, understand)
        self._unread.append(posted)
        return posted

    def _check(self) -> None:
        """Ranks that do not stand at the same place cannot find together again."""
        if self._error is not None:
            raise self._error

    def _open(self, words: list[int]) -> list[int]:
        differ, rest = open_call(words)
        if differ:
            raise RanksDisagree(
                f"ranks disagree on what is to be done ({', '.join(map(str, differ))}); "
                "manager.step, save, wait and close must be called alike on every rank, with the "
                "same step, and an optimizer step must be made or skipped by all ranks",
                step=min(call.step for call in differ),
                rank=self._session.rank,
            )
        return rest
