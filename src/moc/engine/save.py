"""A save, from the ticket to the seal.

The phases, in order: read the ticket, agree on the structure where it changed, decide, copy what
is eager, start the copies that overlap with training, seal, hand over to the helper. No rank
decides alone, and no collective runs off the main thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

import msgspec

from moc import knobs
from moc.choose.cadence import is_snapshot_due, next_snapshot
from moc.choose.call import Kind
from moc.choose.fate import settle
from moc.choose.pick import Choice, ChooseState
from moc.choose.ticket import Closing, Ticket, Words, decide
from moc.comm.group import agree, gather_values
from moc.core.faults import FaultScript
from moc.core.versions import Version
from moc.engine.exchange import Exchange, Posted
from moc.engine.handover import Handover
from moc.engine.looks import Looks
from moc.engine.nodes import check_endpoint, open_endpoint
from moc.engine.preempt import Watch
from moc.engine.session import Session
from moc.engine.snapshots import Snapshots
from moc.engine.structure import Structure, agree_on_structure
from moc.engine.tickets import Tickets
from moc.errors import ConfigError, MocError, Preempted, SaveError
from moc.persist import messages as say
from moc.persist.commit import versions_in
from moc.snapshot.gate import Gate

__all__ = ["Saver"]

_MARGIN_SECS = 5.0  # so that the deadline of what is awaited, which says more, comes first
_ROUND_SECS = 0.5  # between looks at how the other ranks fare, in `wait`
_SHARE_FOR_THE_OLD = 0.5  # of the grace, for a persist in flight; its successor takes as long
_PRIVATE = (
    "{folder} is too small for the buffers, so they are private memory: what a killed trainer has "
    "not committed yet is lost with it, and only commits survive. To keep snapshots over a kill: "
    "mount -o remount,size=... {folder}, docker --shm-size=..., or memory_dir= on a larger tmpfs"
)


class _Fare(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank fares with the marked save that is waited for.

    Attributes:
        problem: why it will not be committed, empty as long as it may be.
        path: what could not be written, empty for nothing.
        committed: see `Handover`, as the next two.
        abandoned: likewise.
        failed: likewise.
        is_over: whether this rank has nothing left to do for it.
        is_troubled: whether this rank has failures to raise.
    """

    problem: str
    path: str
    committed: int
    abandoned: int
    failed: int
    is_over: bool
    is_troubled: bool


class Saver:
    """Saves of one rank in one attempt."""

    def __init__(
        self,
        session: Session,
        memory_bytes: int | None,
        faults: FaultScript | None,
        watch: Watch | None = None,
    ) -> None:
        """Hook into the optimizers; nothing is allocated or written before the first save."""
        self._session = session
        self._memory_bytes = memory_bytes
        self._handover = Handover(session, faults)
        self._snapshots = Snapshots(session, self._handover)
        self._exchange = Exchange(session)
        self._tickets = Tickets(session, self._exchange)
        self._watch = watch
        self._looks = Looks(session, self._exchange, watch)
        self._gate = Gate([*session.live.optimizers, *session.live.inner], self.fence)
        self._steps_seen = 0
        self._warned_idle = False
        self._structure: Structure | None = None
        self._state = ChooseState.fresh(session.experts_per_layer)
        self._pending: dict[int, Choice] = {}
        self._newest = -1
        self._grown = -1  # newest save before which experts had less state than after
        self._owed = False  # whether the newest save should have been persisted, and is not marked
        self._is_troubled = False  # whether some rank has failures that all are to raise
        self._decided = -1  # newest marked step whose fate all ranks learned together, in `wait`
        self._last_persisted: tuple[tuple[int, ...], ...] = ()
        self._stall_secs: dict[int, float] = {}
        self._saved_bytes: dict[int, int] = {}

    # ------------------------------------------------------------------ called by the manager

    def begin(self) -> None:
        """Start from what was restored: the base's versions are what was last committed."""
        session = self._session
        if session.base is not None:
            steps = tuple(tuple(v.step for v in row) for row in session.base_versions)
            self._state = ChooseState(steps, steps)
        open_endpoint(session)
        self._handover.start(self._snapshots.open())
        check_endpoint(session)
        self._looks.begin(session.restored.step if session.restored else 0)

    def step(self, step: int) -> None:
        """After an optimizer step; see `CheckpointManager.step`."""
        session = self._session
        if self._gate.steps == self._steps_seen and session.live.optimizers:
            if not self._warned_idle:
                self._warned_idle = True
                text = "manager.step without an optimizer step since the last call: ignored"
                session.note("warning", step, text=text)
                session.flush()
            return
        if session.restored is not None and step == session.resumed_step and self._gate.steps:
            raise ConfigError(
                f"manager.step({step}) after an optimizer step, and step {step} is what was "
                f"restored: go on with range(report.step + 1, ...), here {step + 1}"
            )
        self._steps_seen = self._gate.steps
        self._handover.listen()
        if 0 <= self._tickets.due < step:
            self._tickets.drop(step)  # no optimizer step was made then
        looks = step >= self._looks.next
        if looks:
            self._looks.read(step)
            if self._looks.asked is not None:
                self._stop(step, *self._looks.asked)
        if is_snapshot_due(step, session.policy, self._looks.due):
            self._save(step)
        if looks:
            self._looks.post(step)
        self._announce(step + 1)
        self._surface()

    def save(self, step: int, *, full: bool = False, forced: bool = False) -> None:
        """Save now. Collective; returns when the eager part is copied."""
        self._save(step, full=full, forced=forced)
        self._announce(step + 1)

    def _save(self, step: int, *, full: bool = False, forced: bool = False) -> None:
        start = knobs.monotonic()
        session = self._session
        if step == self._handover.marked:
            text = f"step {step} is persisted as it was already: a step is written once"
            session.note("warning", step, text=text)
            session.flush()
            return
        if forced:
            self._let_finish()
        self._settle_copy()
        ticket = self._tickets.read(self._words(step))
        structure, counted = self._close_ticket(step, ticket)
        self._learn(ticket)
        if self._decided >= self._handover.marked:  # the ticket was posted before that
            ticket = msgspec.structs.replace(ticket, abandoned=max(ticket.abandoned, self._decided))
        decision = decide(
            step,
            ticket,
            self._state,
            structure.plan.holders,
            session.policy,
            last_marked=self._handover.marked,
            has_base=session.base is not None,
            full=full,
            forced=forced,
        )
        self._newest = step
        self._owed = decision.due and not decision.marked
        self._looks.saved(step, marked=decision.marked)
        if self._owed:
            self._pass_over(step)
        if decision.marked:
            self._handover.marked = step
            self._pending[step] = decision.choice
            self._last_persisted = decision.choice.persist
            self._handover.counts["marked"] += 1
        # From here on a failure is this rank's own: the others must not be left waiting.
        try:
            self._saved_bytes[step] = self._snapshots.take(
                step,
                structure,
                decision,
                self._state,
                counted.read,
            )
        except (MocError, OSError) as error:
            self._handover.fail(step, f"snapshot of step {step} failed: {error}", error)
        except BaseException as error:  # user code, or Ctrl-C: the caller's to see, not the fate's
            self._handover.fail(step, f"snapshot of step {step} failed: {error!r}")
            raise
        self._state = self._state.snapshotted(step, decision.choice.snapshot)
        self._handover.counts["saves"] += 1
        self._stall(step, knobs.monotonic() - start)
        session.flush()

    def fence(self) -> None:
        """Wait while a copy reads what an optimizer is about to change."""
        if self._snapshots.worker.busy:
            start = knobs.monotonic()
            self._settle_copy()
            self._stall(self._newest, knobs.monotonic() - start)
        self._snapshots.prove(self._newest)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Until the newest marked save is committed. Collective.

        Args:
            timeout_secs: give it up then; by default the policy's and a margin.

        Raises:
            SaveError: it was not; names the step, and the ranks to blame.
        """
        session, fate, step = self._session, self._handover, self._handover.marked
        self._settle_copy()
        if step < 0:
            return
        self._tickets.drop(-1)
        self._exchange.read(self._exchange.post(Kind.WAIT, step))
        if timeout_secs is None:  # later than the helper's own, which says who is missing
            timeout_secs = session.policy.timeout_secs + _MARGIN_SECS
        deadline = knobs.monotonic() + timeout_secs
        while True:  # in rounds: a rank that failed must not leave the others waiting
            problem = self._hear_of(step, deadline)
            mine = _Fare(
                problem=problem,
                path=next((f.path for f in fate.failures(step) if f.path), ""),
                committed=fate.committed,
                abandoned=fate.abandoned,
                failed=fate.failed,
                is_over=fate.is_over(step),
                is_troubled=fate.is_troubled,
            )
            told = gather_values(session.group, mine, _Fare)
            committed, abandoned = told[0].committed, told[0].abandoned
            failed = max(f.failed for f in told)
            if any(f.problem and not f.is_over for f in told) or all(f.is_over for f in told):
                break
            self._abandon_hopeless(committed, abandoned, failed)
        self._apply_fate(committed, abandoned, failed)
        self._decided = step
        session.flush()
        if committed < step:
            guilty = [r for r, f in enumerate(told) if f.failed >= step]  # before the next line
            fate.failed = max(fate.failed, step)
            fate.take_failures(step)
            problems = [f"rank {r}: {f.problem}" for r, f in enumerate(told) if f.problem]
            raise SaveError(
                f"step {step} was not committed: {'; '.join(problems)}",
                step=step,
                rank=guilty[0] if len(guilty) == 1 else -1,
                path=next((f.path for f in told if f.path), ""),
            )
        self._is_troubled = any(f.is_troubled for f in told)
        self._surface()

    def stop_if_asked(self, step: int) -> None:
        """After a restore: end where some rank was told to meanwhile. Collective.

        Raises:
            Preempted: so it is.
        """
        if self._watch is None:
            return
        told = gather_values(self._session.group, self._watch.words, tuple[int | None, int])
        graces = [grace for grace, _ in told if grace is not None]
        if graces:
            self._stop(step, max(signum for _, signum in told), min(graces), train=False)

    def stats(self) -> dict[str, object]:
        """See `CheckpointManager.stats`."""
        full = partial = 0
        if self._structure is not None:
            plan = self._structure.plan
            full = plan.full_bytes
            partial = full - sum(plan.expert_bytes.values())
            for layer, ids in enumerate(self._last_persisted):
                partial += sum(plan.expert_bytes.get((layer, expert), 0) for expert in ids)
        return {
            **self._handover.counts,
            "rank": self._session.rank,
            "stall_secs": dict(self._stall_secs),
            "saved_bytes": dict(self._saved_bytes),
            "committed_bytes": dict(self._handover.committed_bytes),
            "referenced_bytes": dict(self._handover.referenced_bytes),
            "full_bytes": full,
            "partial_bytes": partial,
        }

    def close(self, *, drain: bool) -> None:
        """End; with ``drain`` only after the save in flight is committed."""
        errors: list[Exception] = []

        def attempt(act: Callable[[], None]) -> None:
            try:
                act()
            except (MocError, OSError, RuntimeError) as error:
                errors.append(error)

        if drain:
            attempt(self.wait)
            attempt(lambda: self._tickets.drop(-1))
            if not errors:
                attempt(self._make_up)
        self._gate.close()
        if drain:
            attempt(self._settle_copy)
        self._snapshots.close()
        attempt(lambda: self._handover.close(drain=drain))
        self._session.flush()
        if errors:
            raise errors[0]

    # ------------------------------------------------------------------ the end

    def _stop(self, step: int, signum: int, grace_usecs: int, *, train: bool = True) -> NoReturn:
        """All ranks were told to end after this step: save it whole, and end. Collective.

        Args:
            step: the step just made, or restored.
            signum: the signal.
            grace_usecs: until some rank ends itself.
            train: whether the step is a new one; a restored one is stored already.
        """
        watch, session, persists = self._watch, self._session, self._session.policy.persist_every
        assert watch is not None
        watch.agree(signum, grace_usecs / 1e6)
        text = f"signal {signum}: saving it, and ending; {watch.left_secs:.1f} s are left"
        session.note("preempted", step, text=text)
        session.flush()
        problem: Exception | None = None
        try:
            if train:
                self._clear_the_way(watch.left_secs * _SHARE_FOR_THE_OLD)
                self.save(step, full=True, forced=persists is not None)
            if persists is None:
                self._settle_copy()
                watch.saved = not train or self._snapshots.held()[:1] == (1,)
            else:
                self.wait()
                watch.saved = True
        except (MocError, OSError, RuntimeError) as error:
            problem = error
            # Another rank may have left, with the news that it is committed.
            with contextlib.suppress(MocError, OSError):
                watch.saved = Version(step, session.attempt) in versions_in(session.store)
        session.flush()
        code = session.policy.preempt_exit_code if watch.saved else 128 + signum
        raise Preempted(code, step=step, saved=watch.saved, signum=signum) from problem

    def _clear_the_way(self, timeout_secs: float) -> None:
        """Let the persist in flight finish so long; then the helpers drop it."""
        step = self._handover.marked
        if self._decided >= step:
            return
        try:
            self.wait(timeout_secs)
        except SaveError as error:
            self._handover.give_up(step, str(error))

    # ------------------------------------------------------------------ ticket

    def _announce(self, step: int) -> None:
        """Post the ticket if a snapshot is known to be due at the step to come."""
        is_due = next_snapshot(step - 1, self._session.policy, self._looks.due) == step
        if is_due and self._tickets.due < 0:
            self._tickets.post(self._words(step))

    def _words(self, due: int) -> Words:
        """What this rank has to say about a save."""
        session, fate, structure = self._session, self._handover, self._structure
        is_coordinator = session.rank == 0
        return Words(
            step=due,
            attempt=session.attempt,
            plan=structure.plan.digest if structure else 0,
            unchanged=int(structure is not None and structure.stamp == session.live.stamp()),
            settled=int(not session.live.may_grow(stepped=self._gate.steps > 0)),
            held=self._snapshots.held(),
            failed=fate.failed,
            committed=fate.committed if is_coordinator else None,
            abandoned=fate.abandoned if is_coordinator else None,
            overdue=int(self._looks.overdue) if is_coordinator else None,
            base_gone=fate.base_gone,
            troubled=int(fate.is_troubled),
        )

    def _close_ticket(self, step: int, ticket: Ticket) -> tuple[Structure, Posted[Closing]]:
        """Say that the save is made, and see to it that what is held is what was planned.

        The ticket was posted before the optimizer step, which may have brought new state.
        """
        session, structure = self._session, self._structure
        is_planned = structure is not None and structure.stamp == session.live.stamp()
        is_safe = structure is not None and ticket.unchanged and ticket.settled
        counted = self._tickets.close(step, changed=is_safe and not is_planned)
        if not is_safe:
            self._exchange.read(counted)
            if not ticket.unchanged or not all(gather_values(session.group, is_planned, bool)):
                structure = self._restructure()
                self._note_growth(step, structure)
        assert structure is not None
        return structure, counted

    def _note_growth(self, step: int, structure: Structure) -> None:
        """Rows without state that other rows have cannot be restored: all are saved anew, once.

        A stacked tensor gets its state for all experts at once, so versions from before it had
        any are not mixed with later ones.
        """
        session = self._session
        if session.base_parts is not None and not structure.expert_parts <= session.base_parts:
            session.base, self._grown = None, step
        session.base_parts = structure.expert_parts

    def _hear_of(self, step: int, deadline: float) -> str:
        """Listen until this rank is done with a step, for one round at most; what went wrong."""
        fate, end = self._handover, min(deadline, knobs.monotonic() + _ROUND_SECS)
        while not fate.is_over(step):
            left = end - knobs.monotonic()
            fate.listen(max(left, 0.0))
            if left <= 0:
                break
        if fate.failed >= step:
            return "; ".join(map(str, fate.failures(step))) or "persist failed"
        if fate.abandoned >= step:
            return "; ".join(map(str, fate.failures(step))) or "the coordinator gave it up"
        if not fate.is_over(step) and knobs.monotonic() >= deadline:
            return f"its helper said nothing of step {step} in time"
        return ""

    def _let_finish(self) -> None:
        """Before a save that is asked for: one persist at a time, and this one is to be marked."""
        if self._decided >= self._handover.marked:
            return
        try:
            self.wait()
        except SaveError:
            if self._session.policy.on_error == "raise":
                raise

    def _learn(self, ticket: Ticket) -> None:
        self._snapshots.learn(ticket.held)
        self._apply_fate(ticket.committed, ticket.abandoned, ticket.failed)
        base = self._session.base
        if base is not None and base.step == ticket.base_gone:
            self._session.base = None  # nothing to inherit from: the next save is full
        self._abandon_hopeless(ticket.committed, ticket.abandoned, ticket.failed)
        self._is_troubled = ticket.troubled

    def _abandon_hopeless(self, committed: int, abandoned: int, failed: int) -> None:
        """Where some rank cannot deliver, the coordinator need not wait for its receipt."""
        marked = self._handover.marked
        if self._session.rank == 0 and failed == marked > max(committed, abandoned):
            version = Version(marked, self._session.attempt)
            self._handover.hopeless = marked
            self._handover.tell(say.Abandon(version, "a rank's persist failed"))

    def _apply_fate(self, committed: int, abandoned: int, failed: int) -> None:
        """Fold what is known of marked saves into what is chosen next, alike on all ranks."""
        session, fate = self._session, self._handover
        self._state, self._pending = settle(
            self._state,
            self._pending,
            committed=committed,
            abandoned=abandoned,
            failed=failed,
            marked=fate.marked,
        )
        # Also a commit that was given up already: retention has taken the one before it.
        newest = Version(committed, session.attempt)
        if committed >= 0 and (session.base is None or newest > session.base):
            fate.committed = max(fate.committed, committed)
            if committed >= self._grown:
                session.base = newest

    def _restructure(self) -> Structure:
        session = self._session
        structure = agree_on_structure(session, self._structure, self._memory_bytes)
        if session.rank == 0:
            self._tell_structure(structure)
        if structure.is_private:
            session.note("warning", 0, text=_PRIVATE.format(folder=session.memory_dir))
        session.flush()  # what is taken is said before it is taken
        agree(session.group, lambda: self._snapshots.allocate(structure))
        self._structure = structure
        return structure

    def _pass_over(self, step: int) -> None:
        """A persist is due and stays in memory: the one before is not resolved."""
        counts, marked = self._handover.counts, self._handover.marked
        if not counts["passed_over"] and self._session.rank == 0:
            text = (
                f"the persist that was due is passed over, step {marked} is still being persisted; "
                "the store is slower than persist_every asks (said once, counted in stats())"
            )
            self._session.note("warning", step, text=text)
        counts["passed_over"] += 1

    def _tell_structure(self, structure: Structure) -> None:
        """Once per structure: what memory is used, and what the user may not have meant."""
        session = self._session
        count, nbytes, wanted = (
            structure.buffers,
            structure.buffer_bytes,
            structure.buffers_wanted,
        )
        text = (
            f"{count} buffers of {nbytes / 1e6:.1f} MB per rank in {session.memory_dir}, "
            f"{structure.node_bytes / 1e6:.1f} MB on this node; free: {structure.memory_free}"
        )
        if count < wanted:
            text += f"; {wanted} would keep every expert's newest version in memory"
        session.note("memory", 0, nbytes=count * nbytes, text=text)
        for fqn, part in sorted(structure.diverged):
            text = f"{part} {fqn} differs between ranks and is saved by each"
            session.note("warning", 0, text=text)
        uncounted = session.tokens.missing
        if uncounted:
            text = (
                f"no router was found in {len(uncounted)} MoE layers ({uncounted[0]}, ...): lost "
                "tokens are not counted there; name a module that returns expert ids (router=)"
            )
            session.note("warning", 0, text=text)
        if session.policy.k_snapshot is not None and not session.experts_per_layer:
            text = (
                "no routed expert was recognised, so k_snapshot has no effect; name them with "
                "experts=[moc.ExpertRule(...)]"
            )
            session.note("warning", 0, text=text)

    def _make_up(self) -> None:
        """Persist the newest save if one was due and had to be passed over for another's sake."""
        if self._owed and self._gate.steps == self._steps_seen:
            self.save(self._newest, forced=True)
            self.wait()

    def _settle_copy(self) -> None:
        self._snapshots.settle(self._newest)

    def _surface(self) -> None:
        """Events have told of failures; raise the first one if the user wants that.

        Of several ranks none may raise alone: the others would wait for it at the next save. So
        they do together, and the same, once a ticket or `wait` has told that there is something.
        """
        session, fate = self._session, self._handover
        session.flush()
        if session.policy.on_error == "warn":
            fate.take_failures()
        elif self._is_troubled or (session.group.world_size == 1 and fate.is_troubled):
            self._is_troubled = False
            mine = [(f.step, f.rank, f.path, str(f)) for f in fate.take_failures()]
            told = gather_values(session.group, mine, list[tuple[int, int, str, str]])
            failures = [failure for one in told for failure in one]
            # What has a path says most.
            for step, rank, path, text in sorted(failures, key=lambda f: (f[0], not f[2], f[1])):
                raise SaveError(text, step=step, rank=rank, path=path)

    def _stall(self, step: int, secs: float) -> None:
        self._stall_secs[step] = self._stall_secs.get(step, 0.0) + secs
        self._session.note("stalled", step, secs=secs)
