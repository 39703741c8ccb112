"""What this rank handed to its helper, and what became of it.

Everything that fails in the background ends here and surfaces at the next call: a helper's error,
its death, a copy that was torn.
"""

from __future__ import annotations

import contextlib

from moc.core.faults import FaultScript
from moc.core.versions import Version
from moc.engine.session import Session
from moc.errors import HelperError, MocError, SaveError
from moc.persist import messages as say
from moc.persist.client import Helper

__all__ = ["Handover"]


class Handover:
    """The helper of one rank, and the fate of its saves.

    Attributes:
        marked: newest step that was marked to be persisted, -1 for none.
        failed: newest marked step that failed on this rank.
        persisted: newest step whose files and receipt of this rank are durable.
        committed: newest committed step; rank 0 hears of it first.
        abandoned: newest step that the coordinator gave up; rank 0 only.
        hopeless: newest step that it was asked to give up, as a rank has failed and tells why.
        base_gone: committed step that this rank's helper last found gone, -1 for none.
        counts: how often what happened.
        committed_bytes: bytes of each committed step's own files; rank 0 only.
        referenced_bytes: bytes that each committed step did not write, as they had not changed;
            rank 0 only.
    """

    def __init__(self, session: Session, faults: FaultScript | None) -> None:
        """Start nothing yet."""
        self._session = session
        self._faults = faults
        self._folder = ""
        self._helper: Helper | None = None
        self._failures: list[SaveError] = []
        self._parts: set[Version] = set()
        self.marked = -1
        self.failed = -1
        self.persisted = -1
        self.committed = -1
        self.abandoned = -1
        self.hopeless = -1
        self.base_gone = -1
        self.committed_bytes: dict[int, int] = {}
        self.referenced_bytes: dict[int, int] = {}
        self.counts = dict.fromkeys(
            (
                "saves",
                "marked",
                "passed_over",
                "committed",
                "abandoned",
                "failed",
                "torn",
                "warnings",
            ),
            0,
        )
        self.counts["helper_restarts"] = 0

    def start(self, folder: str) -> None:
        """Start the helper; ``folder`` is the run's in the memory tier."""
        session, policy = self._session, self._session.policy
        self._folder = folder
        hello = say.Hello(
            url=session.store.url,
            rank=session.rank,
            world_size=session.group.world_size,
            attempt=session.attempt,
            keep_latest_k=policy.keep_latest_k,
            keep_every=policy.keep_every,
            timeout_secs=policy.timeout_secs,
            grace_secs=policy.grace_secs,
            faults=self._faults,
            unsound=session.unsound,
            node_local=session.node_local,
            control=session.endpoint if session.node != session.nodes[0] else None,
            token=session.endpoint.token if session.listener and session.endpoint else b"",
            copiers=session.other_listers if session.endpoint else [],
        )
        self._helper = Helper(hello, folder, session.listener)

    def give_up(self, step: int, why: str) -> None:
        """End the helper in whatever it does for this step, and start another one."""
        if self._helper is not None:
            self._helper.kill()
        self.counts["abandoned"] += 1
        self._session.note("abandoned", step, text=why)
        self.start(self._folder)

    def tell(self, message: object) -> None:
        """Send the helper a message, from any thread."""
        assert self._helper is not None
        with contextlib.suppress(HelperError):  # `listen` notices, on the main thread
            self._helper.send(message)

    def listen(self, timeout_secs: float = 0.0) -> None:
        """Hear what the helper has to say; one system call when that is nothing."""
        if self._helper is None:
            return
        try:
            for message in self._helper.receive(timeout_secs):
                self._hear(message)
        except HelperError as error:
            self._bury(error)

    def has_part(self, version: Version) -> bool:
        """Whether the last part of this version is durable; asks once."""
        done = version in self._parts
        self._parts.discard(version)
        return done

    def fail(
        self,
        step: int,
        text: str,
        error: Exception | None = None,
        *,
        path: str = "",
        secs: float = 0.0,
    ) -> None:
        """Note that a save failed on this rank."""
        failure = SaveError(text, step=step, rank=self._session.rank, path=path)
        failure.__cause__ = error
        if step == self.marked:
            self.failed = max(self.failed, step)
        self._failures.append(failure)
        self.counts["failed"] += 1
        self._session.note("failed", step, secs=secs, text=text)

    @property
    def is_troubled(self) -> bool:
        """Whether there are failures that nobody took."""
        return bool(self._failures)

    def failures(self, step: int) -> list[SaveError]:
        """Failures of a step that nobody took; they stay."""
        return [f for f in self._failures if f.step == step]

    def take_failures(self, step: int | None = None) -> list[SaveError]:
        """Failures since the last time, of one step or of all."""
        taken = [f for f in self._failures if step in (None, f.step)]
        self._failures = [f for f in self._failures if f not in taken]
        return taken

    def is_over(self, step: int) -> bool:
        """Whether this rank has nothing left to do for a marked step."""
        if self.failed >= step:
            return True
        if self._session.rank == 0:
            return max(self.committed, self.abandoned) >= step
        return max(self.persisted, self.committed) >= step

    def close(self, *, drain: bool) -> None:
        """End the helper: after it has finished, or without waiting for it.

        Raises:
            DeadlineError: it did not finish in time.
        """
        helper, self._helper = self._helper, None
        listener, self._session.listener = self._session.listener, None
        if listener is not None:
            listener.close()  # the helper has it, and no other will be started
        if helper is None:
            return
        if not drain:
            helper.detach()
            return
        for message in helper.close(self._session.policy.timeout_secs):
            self._hear(message)

    def _hear(self, message: object) -> None:
        session = self._session
        match message:
            case say.PartDone():
                self._parts.add(message.version)
            case say.Persisted():
                step = message.version.step
                self.persisted = max(self.persisted, step)
                session.note(
                    "persisted",
                    step,
                    time=message.time,
                    secs=message.secs,
                    nbytes=message.nbytes,
                    text=_spared(message.referenced),
                )
            case say.Failed():
                step, where = message.version.step, message.path or "no path"
                if message.base_gone is not None:
                    self.base_gone = message.base_gone.step
                self.fail(
                    step,
                    f"persist of step {step} failed on rank {session.rank} ({where}): "
                    f"{message.error}",
                    path=message.path,
                    secs=message.secs,
                )
            case say.Committed():
                step = message.version.step
                self.committed = max(self.committed, step)
                self.counts["committed"] += 1
                self.committed_bytes[step] = message.nbytes
                self.referenced_bytes[step] = message.referenced
                session.note(
                    "committed",
                    step,
                    time=message.time,
                    secs=message.secs,
                    nbytes=message.nbytes,
                    slowest_rank=message.slowest_rank,
                    slowest_secs=message.slowest_secs,
                    oldest_expert_age=message.oldest_expert_age,
                    text=_spared(message.referenced),
                )
            case say.Abandoned():
                step = message.version.step
                self.abandoned = max(self.abandoned, step)
                self.counts["abandoned"] += 1
                text = f"step {step} was abandoned: {message.reason}"
                if step > self.hopeless:
                    self._failures.append(SaveError(text, step=step, rank=session.rank))
                session.note(
                    "abandoned", step, time=message.time, secs=message.secs, text=message.reason
                )
            case say.Pruned():
                steps = ", ".join(str(v.step) for v in message.versions) or "none"
                text = f"retired steps: {steps}; {message.files} files deleted"
                session.note("pruned", self.committed, secs=message.secs, text=text)
            case say.Warned():
                self.counts["warnings"] += 1
                session.note("warning", max(self.marked, 0), text=message.text)

    def _bury(self, error: MocError) -> None:
        """The helper is gone: what it was doing has failed, and another one takes over."""
        self.counts["helper_restarts"] += 1
        if self.marked >= 0 and not self.is_over(self.marked):
            self.fail(self.marked, f"persist of step {self.marked} failed: {error}", error)
        else:
            text = f"{error}; started again"
            self._session.note("warning", max(self.marked, 0), text=text)
        if self._helper is not None:
            self._helper.kill()  # it has closed its end, and must not write beside the next one
        self.start(self._folder)


def _spared(nbytes: int) -> str:
    return f"{nbytes} bytes unchanged, referenced" if nbytes else ""
