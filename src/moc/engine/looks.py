"""The look's exchange, and the clocks behind it: posted at one step, read at a later one."""

from __future__ import annotations

from datetime import timedelta

from moc import knobs
from moc.choose.cadence import NEVER, is_overdue
from moc.choose.call import Kind
from moc.choose.look import Look, LookWords, judge
from moc.engine.exchange import Exchange, Posted
from moc.engine.preempt import Watch
from moc.engine.session import Session

__all__ = ["Looks"]

_PATIENCE_SECS = 1.0  # at most so long between looks for a signal, or
_PATIENCE_SHARE = 0.1  # this share of the grace


class Looks:
    """Looks of one rank. Collective where anything is to be looked for, on the main thread.

    Attributes:
        next: the step after which to look; `NEVER` where intervals are in steps and no signal
            is listened for.
        due: the step after which a snapshot is due by time, -1 for none known.
        asked: the signal and the grace in microseconds that all ranks agreed on; None before.
    """

    def __init__(self, session: Session, exchange: Exchange, watch: Watch | None) -> None:
        """Post nothing yet."""
        self._session = session
        self._exchange = exchange
        self._watch = watch
        every = session.policy.snapshot_every
        self._every_secs = every.total_seconds() if isinstance(every, timedelta) else None
        self._patience_usecs = None
        if watch is not None:
            patience = min(_PATIENCE_SECS, _PATIENCE_SHARE * session.policy.preempt_grace_secs)
            self._patience_usecs = int(patience * 1e6)
        self.next = 0 if watch is not None or self._every_secs is not None else NEVER
        self.due = -1
        self.asked: tuple[int, int] | None = None
        self._posted: Posted[list[int]] | None = None
        self._last_save = -1
        self._last_look = -1
        self._looked = self._saved = self._marked = knobs.monotonic()

    def begin(self, step: int) -> None:
        """Training starts after this step."""
        self._last_look = step
        self._looked = self._saved = self._marked = knobs.monotonic()

    def saved(self, step: int, *, marked: bool) -> None:
        """A save of this step is made: intervals count from here."""
        self._saved, self._last_save, self.due = knobs.monotonic(), step, -1
        if marked:
            self._marked = self._saved

    @property
    def overdue(self) -> bool:
        """Whether a persist is due by this rank's clock."""
        every = self._session.policy.persist_every
        if not isinstance(every, timedelta):
            return False
        now = knobs.monotonic()
        return is_overdue(now - self._marked, now - self._saved, every)

    def read(self, step: int) -> None:
        """Read what was posted at the look before, if anything was, and decide.

        Raises:
            RanksDisagree: ranks posted after different steps.
        """
        posted, self._posted = self._posted, None
        self.next = step + 1
        if posted is None:
            return
        words = self._exchange.read(posted)
        look = Look.unpack(words)
        verdict = judge(
            step,
            look,
            patience_usecs=self._patience_usecs,
            last_save=max(self._last_save, self.due),
        )
        self.next = verdict.next
        if verdict.due > step:
            self.due = verdict.due
        if verdict.stop:
            left = (look.grace_usecs or 0) - (step - look.step) * look.step_usecs
            self.asked = look.signum, max(left, 0)

    def post(self, step: int) -> None:
        """Post anew, once the save of this step is made and before the next one is announced."""
        now = knobs.monotonic()
        self._posted = self._exchange.post(Kind.LOOK, step, self._words(step, now).pack())
        self._looked, self._last_look = now, step

    def _words(self, step: int, now: float) -> LookWords:
        left = None
        if self._every_secs is not None and self._session.rank == 0:
            left = max(0, int((self._saved + self._every_secs - now) * 1e6))
        grace, signum = self._watch.words if self._watch is not None else (None, 0)
        return LookWords(
            step=step,
            step_usecs=int((now - self._looked) * 1e6 / max(step - self._last_look, 1)),
            left_usecs=left,
            grace_usecs=grace,
            signum=signum,
        )
