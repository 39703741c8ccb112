"""A save, from the ticket to the seal.

The phases, in order: read the ticket, agree on the structure where it changed, decide, copy what
is eager, start the copies that overlap with training, seal, hand over to the helper. No rank
decides alone, and no collective runs off the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from moc import knobs
from moc.choose.cadence import is_snapshot_due, next_snapshot
from moc.choose.pick import Choice, ChooseState, choose
from moc.choose.retention import BufferFacts, victim
from moc.choose.ticket import Closing, Decision, Ticket, Words, decide
from moc.comm.group import Pending, agree, gather_values
from moc.core.faults import FaultScript
from moc.core.manifest import CommitHead, Seal, step_dir
from moc.core.piece import PieceRecord
from moc.core.safetensors import lay_out, make_header
from moc.core.versions import Version
from moc.engine.handover import Handover
from moc.engine.session import Session, Totals
from moc.engine.structure import (
    Slot,
    Structure,
    agree_on_structure,
    capture_extras,
    extras_piece,
)
from moc.errors import ConfigError, DeadlineError, MocError, RanksDisagree, SaveError
from moc.persist import messages as say
from moc.snapshot.buffers import Buffer, BufferPool, run_memory
from moc.snapshot.copier import CopyJob, run_copies
from moc.snapshot.gate import Gate
from moc.snapshot.worker import Worker
from moc.state.tensors import over

__all__ = ["Saver"]

_LOCK_POLL_SECS = 0.001
_MARGIN_SECS = 5.0  # so that the deadline of what is awaited, which says more, comes first
_ROUND_SECS = 0.5  # between looks at how the other ranks fare, in `wait`


class Saver:
    """Saves of one rank in one attempt."""

    def __init__(
        self, session: Session, memory_bytes: int | None, faults: FaultScript | None
    ) -> None:
        """Hook into the optimizers; nothing is allocated or written before the first save."""
        self._session = session
        self._memory_bytes = memory_bytes
        self._handover = Handover(session, faults)
        self._worker = Worker()
        self._pool: BufferPool | None = None
        self._gate = Gate([*session.live.optimizers, *session.live.inner], self.fence)
        self._steps_seen = 0
        self._warned_idle = False
        self._structure: Structure | None = None
        self._state = ChooseState.fresh(session.experts_per_layer)
        self._posted: tuple[int, Pending] | None = None
        self._pending: dict[int, Choice] = {}
        self._newest = -1
        self._decided = -1  # newest marked step whose fate all ranks learned together, in `wait`
        self._sealed = -1
        self._sealed_everywhere = -1
        self._last_persisted: tuple[tuple[int, ...], ...] = ()
        self._stall_secs: dict[int, float] = {}
        self._saved_bytes: dict[int, int] = {}

    # ------------------------------------------------------------------ called by the manager

    def begin(self) -> None:
        """Start from what was restored: the base's versions are what was last committed."""
        session = self._session
        if session.base is not None:
            self._handover.committed = session.base.step
            steps = tuple(tuple(v.step for v in row) for row in session.base_versions)
            self._state = ChooseState(steps, steps)
        folder = run_memory(session.memory_dir, session.run_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pool = BufferPool(folder, session.rank)
        self._handover.start(str(folder))

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
        self._steps_seen = self._gate.steps
        self._handover.listen()
        if is_snapshot_due(step, session.policy):
            self.save(step)
        elif next_snapshot(step, session.policy) == step + 1:
            self._post(step + 1)
        self._surface()

    def save(self, step: int, *, full: bool = False, forced: bool = False) -> None:
        """Save now. Collective; returns when the eager part is copied."""
        start = knobs.monotonic()
        session = self._session
        if step < self._newest:
            raise ConfigError(f"step {step} is saved after step {self._newest}; steps only grow")
        if step == self._handover.marked:
            return  # it is being persisted already, and keys are written once
        if forced:
            self._let_finish()
        self._settle_copy()
        ticket = self._read_ticket(step)
        counted = self._close_ticket(step, ticket)
        structure = self._structure
        assert structure is not None
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
        if decision.marked:
            self._handover.marked = step
            self._pending[step] = decision.choice
            self._last_persisted = decision.choice.persist
            self._handover.counts["marked"] += 1
        # From here on a failure is this rank's own: the others must not be left waiting.
        try:
            self._saved_bytes[step] = self._snapshot(step, structure, decision, counted)
        except (MocError, OSError) as error:
            self._handover.fail(step, f"snapshot of step {step} failed: {error}", error)
        self._state = self._state.snapshotted(step, decision.choice.snapshot)
        self._handover.counts["saves"] += 1
        self._stall(step, knobs.monotonic() - start)
        if next_snapshot(step, session.policy) == step + 1:
            self._post(step + 1)
        session.flush()

    def fence(self) -> None:
        """Wait while a copy reads what an optimizer is about to change."""
        if not self._worker.busy:
            return
        start = knobs.monotonic()
        self._settle_copy()
        self._stall(self._newest, knobs.monotonic() - start)

    def wait(self) -> None:
        """Until the newest marked save is committed. Collective.

        Raises:
            SaveError: it was not; names the step, and the ranks to blame.
        """
        session, fate, step = self._session, self._handover, self._handover.marked
        self._settle_copy()
        if step < 0:
            return
        self._drop_ticket(-1)
        # Later than the helper's own, which says who is missing.
        deadline = knobs.monotonic() + session.policy.timeout_secs + _MARGIN_SECS
        while True:  # in rounds: a rank that failed must not leave the others waiting
            problem = self._hear_of(step, deadline)
            mine = (problem, fate.committed, fate.abandoned, fate.failed, fate.is_over(step))
            told = gather_values(session.group, mine, tuple[str, int, int, int, bool])
            committed, abandoned = told[0][1], told[0][2]
            failed = max(f for _, _, _, f, _ in told)
            if any(text for text, *_, over in told if not over) or all(o for *_, o in told):
                break
            self._abandon_hopeless(committed, abandoned, failed)
        self._apply_fate(committed, abandoned, failed)
        self._decided = step
        session.flush()
        if committed < step:
            fate.failed = max(fate.failed, step)
            problems = [f"rank {r}: {text}" for r, (text, *_) in enumerate(told) if text]
            problems += [str(failure) for failure in fate.take_failures(step)]
            raise SaveError(f"step {step} was not committed: {'; '.join(problems)}", step=step)
        self._surface()

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

        if drain and self._structure is not None:
            attempt(self.wait)
        self._gate.close()
        if drain:
            attempt(self._settle_copy)
        self._worker.close()
        attempt(lambda: self._handover.close(drain=drain))
        if self._pool is not None:
            self._pool.close()
        self._session.flush()
        if errors:
            raise errors[0]

    # ------------------------------------------------------------------ ticket

    def _post(self, due: int) -> None:
        session, fate, structure = self._session, self._handover, self._structure
        is_coordinator = session.rank == 0
        words = Words(
            step=due,
            attempt=session.attempt,
            plan=structure.plan.digest if structure else 0,
            unchanged=int(structure is not None and structure.stamp == session.live.stamp()),
            settled=int(not session.live.may_grow(stepped=self._gate.steps > 0)),
            sealed=self._sealed,
            failed=fate.failed,
            committed=fate.committed if is_coordinator else None,
            abandoned=fate.abandoned if is_coordinator else None,
        )
        self._posted = (due, session.group.post_min(words.pack()))

    def _read_ticket(self, step: int) -> Ticket:
        """The ticket for this step; one that was posted for another step is dropped."""
        session, timeout = self._session, self._session.policy.timeout_secs
        if self._posted is not None and self._posted[0] != step:
            self._drop_ticket(step)
        if self._posted is None:
            self._post(step)
        assert self._posted is not None
        _, pending = self._posted
        self._posted = None
        ticket = Ticket.unpack(pending.wait(timeout))
        if ticket.differ:
            digest = self._structure.plan.digest if self._structure else 0
            mine = (step, session.attempt, digest)
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

    def _hear_of(self, step: int, deadline: float) -> str:
        """Listen until this rank is done with a step, for one round at most; what went wrong."""
        fate, end = self._handover, min(deadline, knobs.monotonic() + _ROUND_SECS)
        while not fate.is_over(step):
            left = end - knobs.monotonic()
            fate.listen(max(left, 0.0))
            if left <= 0:
                break
        if fate.failed >= step:
            return "persist failed"
        if fate.abandoned >= step:
            return "the coordinator gave it up"
        if not fate.is_over(step) and knobs.monotonic() >= deadline:
            return f"its helper said nothing of step {step} in time"
        return ""

    def _close_ticket(self, step: int, ticket: Ticket) -> Pending:
        """Say that the save is made, and see to it that what is held is what was planned.

        The ticket was posted before the optimizer step, which may have brought new state.
        """
        session, structure = self._session, self._structure
        is_planned = structure is not None and structure.stamp == session.live.stamp()
        is_safe = structure is not None and ticket.unchanged and ticket.settled
        counts = session.tokens.counts().reshape(-1).tolist()
        closing = Closing(counts=counts, changed=int(is_safe and not is_planned))
        counted = session.group.post_sum(closing.pack())
        if not is_safe:
            self._read_closing(step, counted)
            if not ticket.unchanged or not all(gather_values(session.group, is_planned, bool)):
                self._restructure()
        return counted

    def _drop_ticket(self, step: int) -> None:
        """Say that the save that was announced is not made, but that of another step."""
        if self._posted is None:
            return
        session = self._session
        (due, pending), self._posted = self._posted, None
        pending.wait(session.policy.timeout_secs)
        counts = [0] * session.tokens.counts().numel()
        closing = Closing(counts=counts, dropped=1, ranks=session.rank, steps=step)
        self._read_closing(due, session.group.post_sum(closing.pack()))

    def _read_closing(self, due: int, pending: Pending) -> Closing:
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
        self._sealed_everywhere = ticket.sealed
        self._apply_fate(ticket.committed, ticket.abandoned, ticket.failed)
        self._abandon_hopeless(ticket.committed, ticket.abandoned, ticket.failed)

    def _abandon_hopeless(self, committed: int, abandoned: int, failed: int) -> None:
        """Where some rank cannot deliver, the coordinator need not wait for its receipt."""
        marked = self._handover.marked
        if self._session.rank == 0 and failed == marked > max(committed, abandoned):
            version = Version(marked, self._session.attempt)
            self._handover.tell(say.Abandon(version, "a rank's persist failed"))

    def _apply_fate(self, committed: int, abandoned: int, failed: int) -> None:
        """Fold what is known of marked saves into what is chosen next, alike on all ranks."""
        session, fate = self._session, self._handover
        for step in sorted(self._pending):
            if step == committed:
                choice = self._pending.pop(step)
                self._state = self._state.committed(step, choice.persist)
            elif step < committed or (step <= max(abandoned, failed) and step != fate.marked):
                self._pending.pop(step)
        # Also a commit that was given up already: retention has taken the one before it.
        if committed > (session.base.step if session.base else -1):
            session.base = Version(committed, session.attempt)
            fate.committed = max(fate.committed, committed)

    def _restructure(self) -> None:
        session, pool = self._session, self._pool
        assert pool is not None
        self._structure = agree_on_structure(session, self._structure, self._memory_bytes)
        structure = self._structure
        pool.open(structure.buffers)
        agree(session.group, lambda: pool.allocate(structure.buffer_bytes))
        if session.rank == 0:
            for fqn, part in sorted(structure.diverged):
                text = f"{part} {fqn} differs between ranks and is saved by each"
                session.note("warning", 0, text=text)
            nbytes, wanted = structure.buffer_bytes, structure.buffers_wanted
            text = f"{structure.buffers} buffers of {nbytes / 1e6:.1f} MB per rank in {pool.folder}"
            if structure.buffers < wanted:
                text += f"; {wanted} would keep every expert's newest version in memory"
            session.note("memory", 0, nbytes=structure.buffers * nbytes, text=text)

    # ------------------------------------------------------------------ snapshot

    def _snapshot(
        self, step: int, structure: Structure, decision: Decision, counted: Pending
    ) -> int:
        """Copy what is eager, and start the rest; returns the bytes of this rank."""
        session, plan = self._session, structure.plan
        version = Version(step, session.attempt)
        session.note("snapshot_started", step)
        choice = decision.choice
        if decision.full and self._exceeds_buffer(choice):
            choice = self._persist_in_rounds(version, structure, decision)

        extras = capture_extras(session)
        slots = self._slots(structure, choice.snapshot, dense=True)
        tail = [extras_piece(name, len(data), session.rank) for name, data in extras]
        records = lay_out([*(s.piece for s in slots), *tail], structure.header_area)
        nbytes = sum(s.nbytes for s in slots) + sum(p.nbytes for p in tail)
        buffer, view = self._take_buffer(
            max(structure.buffer_bytes, structure.header_area + nbytes)
        )
        placed = list(zip(records, slots, strict=False))
        run_copies(_pairs(view, [(r, s) for r, s in placed if not s.region.overlapped]))
        for record, (_, data) in zip(records[len(slots) :], extras, strict=True):
            view[record.offset : record.offset + len(data)] = data
        late = [(r, s) for r, s in placed if s.region.overlapped]
        job = CopyJob({s.region.fqn + s.region.part: s.region.tensor() for _, s in late})
        head = CommitHead(
            model=session.model_id,
            base=None if decision.full else session.base,
            layers=list(session.live.experts.layers),
            saved=[list(ids) for ids in choice.snapshot],
            routed=[],
            lost=session.lost,
            k_snapshot=session.most_experts(0),
            k_persist=session.most_experts(1),
            left_out=list(structure.left_out),
        )
        seal = Seal(
            run_id=session.run_id,
            version=version,
            rank=session.rank,
            world_size=session.group.world_size,
            plan=plan.digest,
            file=buffer.name,
            pieces=records,
            expert_pieces=[
                (layer, expert, plan.expert_pieces.get((layer, expert), 0))
                for layer, ids in enumerate(choice.snapshot)
                for expert in ids
            ],
            head=head,
        )
        if decision.marked:
            told = "full" if decision.full else f"{sum(map(len, choice.persist))} experts"
            session.note("marked", step, nbytes=nbytes, text=told)
        persist = decision.choice if decision.marked else None
        began = knobs.monotonic()

        def task() -> None:
            _write_header(view, records, structure.header_area)
            torn = job.run(_pairs(view, late))
            if torn:
                buffer.release()
                self._tear(step, torn)
                return
            closing = self._read_closing(step, counted)
            if closing.changed:
                buffer.release()
                text = f"snapshot of step {step} lacks optimizer state that has just appeared"
                self._handover.fail(step, text)
                return
            routed = _by_layer(closing.counts, session.experts_per_layer)
            whole = msgspec.structs.replace(head, routed=routed)
            buffer.put_seal(msgspec.structs.replace(seal, head=whole))
            buffer.release()
            self._sealed = step
            session.note("snapshot_done", step, secs=knobs.monotonic() - began, nbytes=nbytes)
            self._hand_over(version, buffer, records, persist)

        self._worker.start(task)
        if not session.policy.overlap:
            self._settle_copy()
        return nbytes

    def _slots(
        self, structure: Structure, choice: Sequence[Sequence[int]], *, dense: bool
    ) -> list[Slot]:
        """What this rank writes of a choice, in file order."""
        wanted = [set(ids) for ids in choice]
        return [
            slot
            for slot in structure.slots
            if (slot.piece.expert in wanted[slot.piece.layer] if slot.piece.is_expert else dense)
        ]

    def _take_buffer(self, nbytes: int) -> tuple[Buffer, memoryview]:
        session, pool, fate = self._session, self._pool, self._handover
        assert pool is not None
        known = max(fate.committed, fate.abandoned, fate.failed)
        persisting = Version(fate.marked, session.attempt) if fate.marked > known else None
        everywhere = session.restored
        if self._sealed_everywhere >= 0:
            everywhere = Version(self._sealed_everywhere, session.attempt)
        versions = [b.version for b in pool.buffers]
        live = [v is not None and session.timeline.is_live(v) for v in versions]
        deadline = knobs.monotonic() + session.policy.timeout_secs
        locked: set[int] = set()
        while True:
            facts = [
                BufferFacts(index, b.version, b.experts, index in locked)
                for index, b in enumerate(pool.buffers)
            ]
            chosen = victim(
                facts,
                live=live,
                commit=session.base,
                persisting=persisting,
                sealed_everywhere=everywhere,
            )
            if chosen is None and locked and knobs.monotonic() < deadline:
                knobs.sleep(_LOCK_POLL_SECS)  # a helper is digesting it
                locked.clear()
                continue
            if chosen is None:
                raise SaveError(
                    f"no free buffer: {len(pool.buffers)} buffers, {len(locked)} of them locked by "
                    "other processes; raise Policy(buffers=)",
                    rank=session.rank,
                )
            try:
                return pool.buffers[chosen], pool.buffers[chosen].acquire(nbytes)
            except BlockingIOError:
                locked.add(chosen)

    # ------------------------------------------------------------------ saves larger than a buffer

    def _exceeds_buffer(self, choice: Choice) -> bool:
        session = self._session
        return any(
            len(ids) > session.policy.experts_per_save(count)[0]
            for ids, count in zip(choice.snapshot, session.experts_per_layer, strict=True)
        )

    def _persist_in_rounds(
        self, version: Version, structure: Structure, decision: Decision
    ) -> Choice:
        """Persist what goes beyond an ordinary snapshot, buffer by buffer, while training waits.

        Returns:
            The ordinary snapshot that is left for the end.
        """
        session = self._session
        state, holders = self._state, structure.plan.holders
        last = choose(state.last_snapshot, state.last_commit, holders, session.policy)
        if not decision.marked:
            text = "a full save that is not persisted holds k_snapshot experts only"
            session.note("warning", version.step, text=text)
            return last
        early = [
            sorted(set(everything) - set(ids))
            for everything, ids in zip(decision.choice.snapshot, last.snapshot, strict=True)
        ]
        room = structure.buffer_bytes - structure.header_area
        rounds: list[list[Slot]] = [[]]
        for slot in self._slots(structure, early, dense=False):
            if rounds[-1] and sum(s.nbytes for s in rounds[-1]) + slot.nbytes > room:
                rounds.append([])
            rounds[-1].append(slot)
        for number, slots in enumerate(filter(None, rounds), start=1):
            self._persist_round(version, structure, number, slots)
        return last

    def _persist_round(
        self, version: Version, structure: Structure, number: int, slots: Sequence[Slot]
    ) -> None:
        session, fate = self._session, self._handover
        records = lay_out([s.piece for s in slots], structure.header_area)
        buffer, view = self._take_buffer(structure.buffer_bytes)
        _write_header(view, records, structure.header_area)
        run_copies(_pairs(view, list(zip(records, slots, strict=True))))
        buffer.release()
        key = f"{step_dir(version)}/experts-{session.rank:05d}-part{number:02d}.safetensors"
        fate.tell(say.PersistPart(version, str(buffer.path), key, records))
        deadline = knobs.monotonic() + session.policy.timeout_secs
        while not fate.has_part(version):
            left = deadline - knobs.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the helper of rank {session.rank} did not persist {key} in time"
                )
            fate.listen(min(left, 1.0))
            if fate.failed >= version.step:
                raise SaveError(f"{key} could not be written", step=version.step, path=key)

    # ------------------------------------------------------------------ after the copy

    def _hand_over(
        self,
        version: Version,
        buffer: Buffer,
        records: Sequence[PieceRecord],
        persist: Choice | None,
    ) -> None:
        """Runs on the worker: what the helper does with a sealed buffer."""
        path, rank, folder = str(buffer.path), self._session.rank, step_dir(version)
        if persist is None:
            self._handover.tell(say.Digest(version, path))
            return
        dense = [i for i, r in enumerate(records) if not r.piece.is_expert]
        experts = [
            i
            for i, r in enumerate(records)
            if r.piece.is_expert and r.piece.expert in persist.persist[r.piece.layer]
        ]
        files = [
            (f"{folder}/{kind}-{rank:05d}.safetensors", indices)
            for kind, indices in (("dense", dense), ("experts", experts))
            if indices
        ]
        saved = [list(ids) for ids in persist.persist]
        self._handover.tell(say.Persist(version, path, files, saved))

    def _tear(self, step: int, name: str) -> None:
        text = (
            f"snapshot of step {step} is torn: {name} changed while it was copied; something "
            "besides the optimizers writes it (use Policy(overlap=False))"
        )
        self._handover.counts["torn"] += 1
        self._session.note("torn", step, text=text)
        self._handover.fail(step, text)

    def _settle_copy(self) -> None:
        """Wait for the copy in flight; its failure is noted, not raised: training may go on.

        Raises:
            DeadlineError: the copy does not end, or a rank is missing; nothing can be saved now.
            RanksDisagree: other ranks save another step.
        """
        step, timeout = self._newest, self._session.policy.timeout_secs + _MARGIN_SECS
        try:
            self._worker.wait(timeout, f"the copy of step {step}")
        except (DeadlineError, RanksDisagree):
            raise
        except (MocError, OSError, RuntimeError, ValueError) as error:
            if self._worker.busy:
                raise
            self._handover.fail(step, f"snapshot of step {step} failed: {error}", error)

    def _surface(self) -> None:
        """Events have told of failures; raise the first one if the user wants that."""
        self._session.flush()
        failures = self._handover.take_failures()
        if failures and self._session.policy.on_error == "raise":
            raise failures[0]

    def _stall(self, step: int, secs: float) -> None:
        self._stall_secs[step] = self._stall_secs.get(step, 0.0) + secs
        self._session.note("stalled", step, secs=secs)


def _pairs(
    view: memoryview, placed: Sequence[tuple[PieceRecord, Slot]]
) -> list[tuple[Tensor, Tensor]]:
    """(destination in the buffer, live source) of every piece."""
    tensors: dict[int, Tensor] = {}
    pairs = []
    for record, slot in placed:
        key = id(slot.region)
        if key not in tensors:
            tensors[key] = slot.region.tensor().detach()
        source = tensors[key][slot.within] if slot.within else tensors[key]
        piece = slot.piece
        pairs.append((over(view, record.offset, piece.dtype, piece.box.sizes), source))
    return pairs


def _write_header(view: memoryview, records: Sequence[PieceRecord], area: int) -> None:
    pieces = [r.piece for r in records]
    header = make_header(pieces, area=area, data_bytes=len(view) - area)
    view[: len(header)] = header


def _by_layer(values: Sequence[int], experts_per_layer: Sequence[int]) -> Totals:
    """Totals per layer and expert, from rows as wide as the largest layer."""
    width = max(experts_per_layer, default=0)
    return [list(values[m * width : m * width + n]) for m, n in enumerate(experts_per_layer)]
