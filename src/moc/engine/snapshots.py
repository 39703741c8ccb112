"""One rank's snapshots: take a buffer, copy, seal, hand over to the helper.

Small state is copied before the call returns; parameters and optimizer state are copied on the
worker thread, and sealed there once nothing was torn and all ranks have said their token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from moc import knobs
from moc.choose.pick import Choice, ChooseState, choose
from moc.choose.retention import BufferFacts, victim
from moc.choose.ticket import HELD, Closing, Decision
from moc.core.digest import digest_bytes
from moc.core.manifest import CommitHead, Seal, step_dir
from moc.core.piece import MASTER, WEIGHT, PieceRecord
from moc.core.safetensors import lay_out, make_header
from moc.core.versions import Version
from moc.engine.handover import Handover
from moc.engine.session import Session, Totals
from moc.engine.structure import Slot, Structure, capture_extras
from moc.errors import DeadlineError, MocError, RanksDisagree, SaveError
from moc.persist import messages as say
from moc.snapshot.buffers import Buffer, BufferPool, run_memory
from moc.snapshot.copier import CopyJob, run_copies
from moc.snapshot.worker import Worker
from moc.state.live import REGISTERED, SUMMED, Region
from moc.state.tensors import over, tensor_bytes

__all__ = ["Snapshots"]

_LOCK_POLL_SECS = 0.001
_TRIED = (
    WEIGHT,
    MASTER,
    REGISTERED,
    SUMMED,
)  # forward code reaches them; no one but Adam its moments
_MARGIN_SECS = 5.0  # so that the deadline of what is awaited, which says more, comes first


class Snapshots:
    """Snapshots of one rank.

    Attributes:
        worker: runs the copies.
        pool: this rank's buffers, None before `open`.
        sealed_everywhere: newest version that all ranks hold sealed, as far as tickets told.
    """

    def __init__(self, session: Session, handover: Handover) -> None:
        """Allocate nothing before the first snapshot."""
        self._session = session
        self._handover = handover
        self.worker = Worker()
        self.pool: BufferPool | None = None
        self.sealed_everywhere: Version | None = None
        self._recent: list[Version] = []  # the newest saves, newest first, alike on all ranks
        self._proven: set[tuple[str, str]] = set()  # (fqn, part) that were seen to stay the same
        self._written: set[tuple[str, str]] = set()  # that something besides an optimizer writes
        self._on_trial: list[tuple[memoryview, Slot]] = []

    def open(self) -> str:
        """Make the run's folder in the memory tier; returns its path."""
        session = self._session
        folder = run_memory(session.memory_dir, session.run_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.pool = BufferPool(folder, session.rank)
        self.pool.tidy()
        self.sealed_everywhere = session.restored
        return str(folder)

    def held(self) -> tuple[int, ...]:
        """For each of the newest saves, newest first, 1 if this rank holds it sealed."""
        sealed = {buffer.version for buffer in self.pool.buffers} if self.pool else set()
        return tuple(int(version in sealed) for version in self._recent)

    def learn(self, held: Sequence[bool]) -> None:
        """What a ticket told of the newest saves; one that was known to be everywhere stays."""
        everywhere = [v for v, is_held in zip(self._recent, held, strict=False) if is_held]
        if everywhere:
            self.sealed_everywhere = everywhere[0]

    def allocate(self, structure: Structure) -> None:
        """Have the buffers that the structure asks for.

        Raises:
            SaveError: there is no room in memory.
        """
        assert self.pool is not None
        self._on_trial = []  # no forward ran since, which would have proven something
        self.pool.open(structure.buffers, private=structure.is_private)
        self.pool.allocate(structure.buffer_bytes)

    def close(self) -> None:
        """Start no other copy; the buffers' files stay."""
        self.worker.close()
        self._on_trial = []
        if self.pool is not None:
            self.pool.close()

    def prove(self, step: int) -> None:
        """Compare what an overlapped copy would have read until now with what stood at the start.

        A write through ``.data`` leaves no other trace. So parameters are copied at once the first
        time; one that has changed when the optimizer is about to step is copied at once for good.

        Args:
            step: of the newest save.
        """
        trial, self._on_trial = self._on_trial, []
        for copied, slot in trial:
            region, box = slot.region, slot.piece.box
            if digest_bytes(tensor_bytes(region.view(box))) == digest_bytes(copied):
                self._proven.add((region.fqn, region.part))
            else:
                self._is_written(step, region)

    def _is_written(self, step: int, region: Region) -> None:
        name = (region.fqn, region.part)
        if name not in self._written:
            self._written.add(name)
            text = (
                f"{region.fqn} is written by something besides the optimizers; it is copied before "
                "manager.step returns from now on"
            )
            self._session.note("warning", step, text=text)

    def _is_late(self, region: Region) -> bool:
        return region.overlapped and (region.fqn, region.part) not in self._written

    def _needs_trial(self, region: Region) -> bool:
        name = (region.fqn, region.part)
        return self._session.policy.overlap and region.part in _TRIED and name not in self._proven

    def take(
        self,
        step: int,
        structure: Structure,
        decision: Decision,
        state: ChooseState,
        closing: Callable[[], Closing],
    ) -> int:
        """Copy what is eager, and start the rest.

        Args:
            step: the step to snapshot.
            structure: what is there, and who writes what.
            decision: what all ranks decided.
            state: when each expert was last saved, for what an ordinary snapshot would hold.
            closing: waits for what all ranks said; called on the worker.

        Returns:
            Bytes of this rank.
        """
        session, plan = self._session, structure.plan
        version = Version(step, session.attempt)
        self._on_trial = []  # two saves without an optimizer step between prove nothing
        if version not in self._recent:
            self._recent = [version, *self._recent][:HELD]
        choice = decision.choice
        if decision.full and self._exceeds_buffer(choice):
            choice = self._persist_in_rounds(version, structure, decision, state)

        extras = capture_extras(session, structure.extras_room)
        slots = self._slots(structure, choice.snapshot, dense=True)
        tail = [piece for piece, _ in extras]
        records = lay_out([*(s.piece for s in slots), *tail], structure.header_area)
        nbytes = sum(s.nbytes for s in slots) + sum(p.nbytes for p in tail)
        buffer, view = self._take_buffer(
            max(structure.buffer_bytes, structure.header_area + nbytes)
        )
        session.note("snapshot_started", step, nbytes=nbytes, buffer=buffer.number, role="SNAPSHOT")
        placed = list(zip(records, slots, strict=False))
        late = [(r, s) for r, s in placed if self._is_late(s.region)]
        trial = [(r, s) for r, s in late if self._needs_trial(s.region)]
        late = [(r, s) for r, s in late if not self._needs_trial(s.region)]
        at_once = [(r, s) for r, s in placed if not self._is_late(s.region)]
        run_copies(_pairs(view, [*at_once, *trial], {}))
        self._on_trial = [(view[r.offset : r.offset + s.nbytes], s) for r, s in trial]
        for record, (_, data) in zip(records[len(slots) :], extras, strict=True):
            view[record.offset : record.offset + len(data)] = data
        # Looked up now: a later `param.data = other` must not change what is copied.
        sources = {id(s.region): s.region.tensor().detach() for _, s in late}
        job = CopyJob(sources)
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
            frozen=list(structure.frozen),
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
            text = "full" if decision.full else f"{sum(map(len, choice.persist))} experts"
            session.note("marked", step, nbytes=nbytes, buffer=buffer.number, text=text)
        persist = decision.choice if decision.marked else None
        began = knobs.monotonic()

        def task() -> None:
            _write_header(view, records, structure.header_area)
            torn = job.run(_pairs(view, late, sources))
            if torn is not None:
                buffer.release()
                self._tear(step, next(s.region for _, s in late if id(s.region) == torn))
                return
            told = closing()
            if told.changed:
                buffer.release()
                text = f"snapshot of step {step} lacks optimizer state that has just appeared"
                self._handover.fail(step, text)
                return
            routed = _by_layer(told.counts, session.experts_per_layer)
            whole = msgspec.structs.replace(head, routed=routed)
            buffer.put_seal(msgspec.structs.replace(seal, head=whole))
            self._unseal_others(buffer)
            buffer.release()
            session.note(
                "snapshot_done",
                step,
                secs=knobs.monotonic() - began,
                nbytes=nbytes,
                buffer=buffer.number,
                role="PERSIST" if persist else "SNAPSHOT",
            )
            self._hand_over(version, buffer, records, persist)

        self.worker.start(task)
        if not session.policy.overlap:
            self.settle(step)
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
        session, pool, fate = self._session, self.pool, self._handover
        assert pool is not None
        known = max(fate.committed, fate.abandoned, fate.failed)
        persisting = Version(fate.marked, session.attempt) if fate.marked > known else None
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
                sealed_everywhere=self.sealed_everywhere,
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

    def _exceeds_buffer(self, choice: Choice) -> bool:
        session = self._session
        return any(
            len(ids) > session.policy.experts_per_save(count)[0]
            for ids, count in zip(choice.snapshot, session.experts_per_layer, strict=True)
        )

    def _persist_in_rounds(
        self, version: Version, structure: Structure, decision: Decision, state: ChooseState
    ) -> Choice:
        """Persist what goes beyond an ordinary snapshot, buffer by buffer, while training waits.

        Returns:
            The ordinary snapshot that is left for the end.
        """
        session = self._session
        holders = structure.plan.holders
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
        run_copies(_pairs(view, list(zip(records, slots, strict=True)), {}))
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

    def _unseal_others(self, newest: Buffer) -> None:
        """A step that is saved again replaces its first snapshot: one version is one state."""
        assert self.pool is not None
        for buffer in self.pool.buffers:
            if buffer is not newest and buffer.version == newest.version:
                buffer.unseal()

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

    def _tear(self, step: int, region: Region) -> None:
        self._written.add((region.fqn, region.part))
        text = (
            f"snapshot of step {step} is torn: {region.fqn} {region.part} changed while it was "
            "copied; something besides the optimizers writes it (it is copied before "
            "manager.step returns from now on; Policy(overlap=False) copies everything so)"
        )
        self._handover.counts["torn"] += 1
        self._session.note("torn", step, text=text)
        self._handover.fail(step, text)

    def settle(self, step: int) -> None:
        """Wait for the copy in flight; its failure is noted, not raised: training may go on.

        Raises:
            DeadlineError: the copy does not end, or a rank is missing; nothing can be saved now.
            RanksDisagree: other ranks save another step.
        """
        timeout = self._session.policy.timeout_secs + _MARGIN_SECS
        try:
            self.worker.wait(timeout, f"the copy of step {step}")
        except (DeadlineError, RanksDisagree):
            raise
        except (MocError, OSError, RuntimeError, ValueError) as error:
            if self.worker.busy:
                raise
            self._handover.fail(step, f"snapshot of step {step} failed: {error}", error)


def _pairs(
    view: memoryview, placed: Sequence[tuple[PieceRecord, Slot]], tensors: dict[int, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(destination in the buffer, source) of every piece; looks up what ``tensors`` lacks."""
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
