"""The ticket's two exchanges: posted ahead and read, then closed or dropped, alike on all ranks."""

from __future__ import annotations

from moc.choose.ticket import Closing, Ticket, Words
from moc.comm.group import Pending, gather_values
from moc.engine.session import Session
from moc.errors import RanksDisagree

__all__ = ["Tickets"]


class Tickets:
    """Tickets of one rank. Every method but `read_closing` is collective, on the main thread."""

    def __init__(self, session: Session) -> None:
        """Post nothing yet."""
        self._session = session
        self._posted: tuple[int, Pending] | None = None

    def post(self, words: Words) -> None:
        """Launch the ticket for a save that is due one step later, or now."""
        self._posted = (words.step, self._session.group.post_min(words.pack()))

    def read(self, words: Words) -> Ticket:
        """The ticket for the step of these words; they are posted now if none was before.

        Raises:
            RanksDisagree: ranks differ in step, attempt or plan.
        """
        session, step = self._session, words.step
        if self._posted is not None and self._posted[0] != step:
            self.drop(step)
        if self._posted is None:
            self.post(words)
        assert self._posted is not None
        (_, pending), self._posted = self._posted, None
        ticket = Ticket.unpack(pending.wait(session.policy.timeout_secs))
        if ticket.differ:
            mine = (step, session.attempt, words.plan)
            told = gather_values(session.group, mine, tuple[int, int, int])
            table = ", ".join(
                f"rank {r}: step {s}, attempt {a}, plan {p:x}" for r, (s, a, p) in enumerate(told)
            )
            raise RanksDisagree(
                f"ranks disagree on the {' and '.join(ticket.differ)} of a save ({table}); "
                "manager.step and manager.save must be called with the same step on every rank",
                step=step,
                rank=session.rank,
            )
        return ticket

    def close(self, *, changed: bool) -> Pending:
        """Say that the save is made, with this rank's token counts; see `Closing`."""
        counts = self._session.tokens.counts().reshape(-1).tolist()
        closing = Closing(counts=counts, changed=int(changed))
        return self._session.group.post_sum(closing.pack())

    def drop(self, step: int) -> None:
        """Say that the save that was announced is not made, but that of another step.

        Args:
            step: what is done instead; -1 for `wait` and `close`.
        """
        if self._posted is None:
            return
        session = self._session
        (due, pending), self._posted = self._posted, None
        pending.wait(session.policy.timeout_secs)
        counts = [0] * session.tokens.counts().numel()
        closing = Closing(counts=counts, dropped=1, ranks=session.rank, steps=step)
        self.read_closing(due, session.group.post_sum(closing.pack()))

    def read_closing(self, due: int, pending: Pending) -> Closing:
        """Wait for what all ranks said; from any thread.

        Raises:
            RanksDisagree: some made the save and others did not.
        """
        session = self._session
        closing = Closing.unpack(pending.wait(session.policy.timeout_secs))
        told = closing.disagreement(due, session.group.world_size)
        if told:
            raise RanksDisagree(
                f"ranks disagree on the step of a save ({told}); manager.step, save and wait must "
                "be called alike on every rank",
                step=due,
                rank=session.rank,
            )
        return closing
