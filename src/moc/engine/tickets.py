"""The ticket's two exchanges: posted ahead and read, then closed or dropped, alike on all ranks.

Between a ticket and its closing nothing else is posted: so a closing, whose size follows from the
model, can only meet a closing.
"""

from __future__ import annotations

from moc.choose.call import Kind
from moc.choose.ticket import Closing, Ticket, Words
from moc.comm.group import gather_values
from moc.engine.exchange import Exchange, Posted
from moc.engine.session import Session
from moc.errors import RanksDisagree

__all__ = ["Tickets"]


class Tickets:
    """Tickets of one rank. Every method is collective, on the main thread.

    Attributes:
        due: step of the save that a ticket was posted for and that is not made yet, -1 for none.
    """

    def __init__(self, session: Session, exchange: Exchange) -> None:
        """Post nothing yet."""
        self._session = session
        self._exchange = exchange
        self._posted: Posted[list[int]] | None = None
        self._plan = 0
        self.due = -1

    def post(self, words: Words) -> None:
        """Launch the ticket for a save that is due one step later, or now."""
        assert self._posted is None, f"the ticket for step {self.due} is neither read nor dropped"
        self._posted = self._exchange.post(Kind.SAVE, words.step, words.pack())
        self.due, self._plan = words.step, words.plan

    def read(self, words: Words) -> Ticket:
        """The ticket for the step of these words; they are posted now if none was before.

        Raises:
            RanksDisagree: ranks differ in step, attempt or plan.
        """
        if self.due != words.step:
            self.drop(words.step)
        if self._posted is None:
            self.post(words)
        return self._read()

    def close(self, step: int, *, changed: bool) -> Posted[Closing]:
        """Say that the save is made, with this rank's token counts; see `Closing`."""
        counts = self._session.tokens.counts().reshape(-1).tolist()
        return self._say(step, Closing(counts=counts, changed=int(changed)))

    def drop(self, step: int) -> None:
        """Say that the save that was announced, if any, is not made, but that of another step.

        Args:
            step: what is done instead; -1 for `wait` and `close`.

        Raises:
            RanksDisagree: other ranks have made it.
        """
        if self._posted is None:
            return
        session, due = self._session, self.due
        self._read()
        counts = [0] * session.tokens.counts().numel()
        closing = Closing(counts=counts, dropped=1, ranks=session.rank, steps=step)
        self._exchange.read(self._say(due, closing))

    def _read(self) -> Ticket:
        assert self._posted is not None
        session, step = self._session, self.due
        posted, self._posted, self.due = self._posted, None, -1
        words = self._exchange.read(posted)
        ticket = Ticket.unpack(words)
        if ticket.differ:
            told = gather_values(session.group, (session.attempt, self._plan), tuple[int, int])
            table = ", ".join(f"rank {r}: attempt {a}, plan {p:x}" for r, (a, p) in enumerate(told))
            raise RanksDisagree(
                f"ranks disagree on the {' and '.join(ticket.differ)} of the save of step {step} "
                f"({table})",
                step=step,
                rank=session.rank,
            )
        return ticket

    def _say(self, due: int, closing: Closing) -> Posted[Closing]:
        """Post what is read, from any thread, as the closing of all ranks."""
        session = self._session

        def understand(words: list[int]) -> Closing:
            closing = Closing.unpack(words)
            told = closing.disagreement(due, session.group.world_size)
            if told:
                raise RanksDisagree(
                    f"ranks disagree on the step of a save ({told}); manager.step, save and wait "
                    "must be called alike on every rank, and an optimizer step must be made or "
                    "skipped by all ranks",
                    step=due,
                    rank=session.rank,
                )
            return closing

        return self._exchange.post_sum(closing.pack(), understand)
