"""A save, from the ticket to the seal, and what becomes of it.

The phases, in order: read the ticket, agree on the structure where it changed, decide, copy what
is eager, start the copies that overlap with training, seal, hand over to the helper. No rank
decides alone; no collective runs off the main thread; whatever fails in the background surfaces at
the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from torch import Tensor

from moc import knobs
from moc.choose.cadence import is_snapshot_due, next_snapshot
from moc.choose.pick import Choice, ChooseState, choose
from moc.choose.retention import BufferFacts, victim
from moc.choose.ticket import Decision, Ticket, Words, decide
from moc.comm.group import Pending, gather_values
from moc.core.box import Box
from moc.core.digest import digest_bytes
from moc.core.manifest import CommitHead, Seal, step_dir
from moc.core.piece import EXTRA, WEIGHT, Piece, PieceRecord
from moc.core.safetensors import in_file_order, lay_out, make_header
from moc.core.versions import Version
from moc.engine.session import Session, Totals
from moc.errors import (
    DeadlineError,
    HelperError,
    LayoutError,
    MocError,
    RanksDisagree,
    SaveError,
)
from moc.persist import messages as say
from moc.persist.client import Helper
from moc.plan.save import RankPlan, plan_save
from moc.snapshot.buffers import Buffer, BufferPool, run_memory, usable_bytes
from moc.snapshot.copier import CopyJob, run_copies
from moc.snapshot.gate import Gate
from moc.snapshot.worker import Worker
from moc.state.extras import encode
from moc.state.groups import capture_groups
from moc.state.live import BUFFER, Region
from moc.state.tensors import over, tensor_bytes

__all__ = ["EXTRAS", "OPTIMIZER_GROUPS", "Saver"]

log = logging.getLogger("moc")

EXTRAS = "moc.extras"
"""Name of the per-rank piece that holds scheduler, loader, RNG and the like."""

OPTIMIZER_GROUPS = "moc.optimizer_groups"
"""Name of the per-rank piece that holds the optimizers' groups."""

_EXTRAS_SLACK_BYTES = 64 << 10
_MIN_BUFFERS = 3
_SPARE_BUFFERS = 3  # beyond the windows: one written, one persisted, one kept for recovery
_MEMORY_SHARE = 0.5  # of what is free on tmpfs, unless the user says how much


class Saver:
    """Saves of one rank in one attempt."""

    def __init__(self, session: Session, memory_bytes: int | None, faults: object = None) -> None:
        """Hook into the optimizers; nothing is allocated or written before the first save."""
        self._session = session
        self._memory_bytes = memory_bytes
        self._faults = faults
        self._worker = Worker()
        self._pool: BufferPool | None = None
        self._helper: Helper | None = None
        self._gate = Gate([*session.live.optimizers, *session.live.inner], self.fence)
        self._steps_seen = 0
        self._warned_idle = False

        self._plan: RankPlan | None = None
        self._regions: dict[tuple[str, str], list[Region]] = {}
        self._stamp: tuple[int, ...] = ()
        self._diverged: frozenset[tuple[str, str]] = frozenset()
        self._header_area = 0
        self._buffer_bytes = 0

        self._state = ChooseState.fresh(session.experts_per_layer)
        self._posted: tuple[int, Pending] | None = None
        self._pending: dict[int, Choice] = {}
        self._last_marked = -1
        self._sealed = -1
        self._sealed_everywhere = -1
        self._failed = -1
        self._resolved_here = -1
        self._committed = -1
        self._abandoned = -1
        self._failures: list[SaveError] = []
        self._parts_done: set[Version] = set()

        self.stall_secs: dict[int, float] = {}
        self.saved_bytes: dict[int, int] = {}
        self.committed_bytes: dict[int, int] = {}
        self._last_persisted: tuple[tuple[int, ...], ...] = ()
        self.counts = {"saves": 0, "marked": 0, "committed": 0, "abandoned": 0, "failed": 0}
        self.counts |= {"torn": 0, "warnings": 0, "helper_restarts": 0}

    # ------------------------------------------------------------------ called by the manager

    def begin(self) -> None:
        """Start from what was restored: the base's versions are what was last committed."""
        session = self._session
        if session.base is not None:
            self._committed = session.base.step
            state = ChooseState.fresh(session.experts_per_layer)
            for layer, versions in enumerate(session.base_versions):
                for expert, version in enumerate(versions):
                    only = [() if m != layer else (expert,) for m in range(len(state.last_commit))]
                    state = state.committed(version.step, only).snapshotted(version.step, only)
            self._state = state
        folder = run_memory(session.memory_dir, session.run_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pool = BufferPool(folder, session.rank)
        self._start_helper()

    def step(self, step: int) -> None:
        """After an optimizer step; see `CheckpointManager.step`."""
        if self._gate.steps == self._steps_seen and self._session.live.optimizers:
            if not self._warned_idle:
                self._warned_idle = True
                self._session.note(
                    "warning", step, text="manager.step without an optimizer step: ignored"
                )
                self._session.flush()
            return
        self._steps_seen = self._gate.steps
        self._listen()
        policy = self._session.policy
        if is_snapshot_due(step, policy):
            self.save(step)
        elif next_snapshot(step, policy) == step + 1:
            self._post(step + 1)
        self._surface()

    def save(self, step: int, *, full: bool = False, forced: bool = False) -> None:
        """Save now. Collective; returns when the eager part is copied."""
        start = knobs.monotonic()
        session = self._session
        self._settle_copy()
        ticket = self._read_ticket(step)
        if self._plan is None or not ticket.unchanged:
            self._agree()
        plan = self._plan
        assert plan is not None
        self._learn(ticket)
        decision = decide(
            step,
            ticket,
            self._state,
            plan.holders,
            session.policy,
            last_marked=self._last_marked,
            has_base=session.base is not None,
            full=full,
            forced=forced,
        )
        counted = session.group.post_sum(_flatten(session.tokens.counts().tolist()))
        if decision.marked:
            self._last_marked = step
            self._pending[step] = decision.choice
            self._last_persisted = decision.choice.persist
            self.counts["marked"] += 1
        try:
            nbytes = self._snapshot(step, decision, counted)
        except (MocError, OSError) as error:
            self._fail(step, f"snapshot of step {step} failed: {error}", error)
            nbytes = 0
        self._state = self._state.snapshotted(step, decision.choice.snapshot)
        self.counts["saves"] += 1
        self.saved_bytes[step] = nbytes
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
        self._stall(max(self.stall_secs, default=0), knobs.monotonic() - start)

    def wait(self) -> None:
        """Until the newest marked save is committed. Collective.

        Raises:
            SaveError: it was not; names the step, and the ranks to blame.
            DeadlineError: nobody said so in time.
        """
        session, step = self._session, self._last_marked
        self._settle_copy()
        if step < 0:
            return
        deadline = knobs.monotonic() + session.policy.timeout_secs
        outcome = ""
        while not self._is_resolved_here(step) and not outcome:
            left = deadline - knobs.monotonic()
            if left <= 0:
                outcome = f"rank {session.rank}'s helper said nothing of step {step} in time"
            self._listen(min(max(left, 0.0), 1.0))
        if self._failed >= step:
            outcome = f"persist failed on rank {session.rank}"
        elif session.rank == 0 and self._abandoned >= step:
            outcome = "the coordinator gave it up"
        mine = (outcome, self._committed, self._abandoned, self._failed)
        told = gather_values(session.group, mine, tuple[str, int, int, int])
        problems = [f"rank {r}: {text}" for r, (text, *_) in enumerate(told) if text]
        self._apply_fate(told[0][1], told[0][2], max(failed for *_, failed in told))
        session.flush()
        if told[0][1] < step:
            self._failed = max(self._failed, step)
            reasons = [str(f) for f in self._failures if f.step == step]
            self._failures = [f for f in self._failures if f.step != step]
            raise SaveError(
                f"step {step} was not committed: {'; '.join([*problems, *reasons])}", step=step
            )
        self._surface()

    def stats(self) -> dict[str, object]:
        """Counters, stall in seconds by step, bytes by step, and sizes of full and last save."""
        plan, session = self._plan, self._session
        chosen = [(layer, e) for layer, ids in enumerate(self._last_persisted) for e in ids]
        partial = 0
        if plan is not None:
            experts = sum(plan.expert_bytes.values())
            picked = sum(plan.expert_bytes.get(key, 0) for key in chosen)
            partial = plan.full_bytes - experts + picked
        return {
            **self.counts,
            "rank": session.rank,
            "stall_secs": dict(self.stall_secs),
            "saved_bytes": dict(self.saved_bytes),
            "full_bytes": plan.full_bytes if plan else 0,
            "partial_bytes": partial,
            "committed_bytes": dict(self.committed_bytes),
        }

    def close(self, *, drain: bool) -> None:
        """End; with ``drain`` only after the save in flight is committed."""
        error: Exception | None = None
        try:
            if drain and self._plan is not None:
                self.wait()
        except (MocError, OSError) as caught:
            error = caught
        self._gate.close()
        if drain:
            try:
                self._worker.wait(self._session.policy.timeout_secs, "the snapshot in flight")
            except Exception as caught:  # noqa: BLE001 - reported below
                error = error or caught
        self._worker.close()
        if self._helper is not None:
            if drain:
                try:
                    for message in self._helper.close(self._session.policy.timeout_secs):
                        self._hear(message)
                except (MocError, OSError) as caught:
                    error = error or caught
            else:
                self._helper.detach()
            self._helper = None
        if self._pool is not None:
            self._pool.close()
        self._session.flush()
        if error is not None:
            raise error

    # ------------------------------------------------------------------ ticket

    def _post(self, due: int) -> None:
        session = self._session
        is_coordinator = session.rank == 0
        words = Words(
            step=due,
            attempt=session.attempt,
            plan=self._plan.digest if self._plan else 0,
            unchanged=int(self._plan is not None and self._stamp == session.live.stamp()),
            sealed=self._sealed,
            failed=self._failed,
            committed=self._committed if is_coordinator else None,
            abandoned=self._abandoned if is_coordinator else None,
        )
        self._posted = (due, session.group.post_min(words.pack()))

    def _read_ticket(self, step: int) -> Ticket:
        """The ticket for this step; one that was posted for another step is read and dropped."""
        session = self._session
        timeout = session.policy.timeout_secs
        if self._posted is not None and self._posted[0] != step:
            self._posted[1].wait(timeout)
            self._posted = None
        if self._posted is None:
            self._post(step)
        assert self._posted is not None
        due, pending = self._posted
        self._posted = None
        ticket = Ticket.unpack(pending.wait(timeout))
        if ticket.differ:
            mine = (due, session.attempt, self._plan.digest if self._plan else 0)
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

    def _learn(self, ticket: Ticket) -> None:
        self._sealed_everywhere = ticket.sealed
        self._apply_fate(ticket.committed, ticket.abandoned, ticket.failed)
        hopeless = ticket.failed == self._last_marked > max(ticket.committed, ticket.abandoned)
        if hopeless and self._session.rank == 0:
            # Some rank cannot deliver; the coordinator need not wait for its receipt.
            version = Version(ticket.failed, self._session.attempt)
            self._tell(say.Abandon(version, "a rank's persist failed"))

    def _apply_fate(self, committed: int, abandoned: int, failed: int) -> None:
        """Fold what is known of marked saves into what is chosen next, alike on all ranks."""
        session = self._session
        for step in sorted(self._pending):
            if step == committed:
                choice = self._pending.pop(step)
                self._state = self._state.committed(step, choice.persist)
                session.base = Version(step, session.attempt)
                if session.rank != 0:
                    self._committed = step
            elif step < committed or (step <= max(abandoned, failed) and step != self._last_marked):
                self._pending.pop(step)

    # ------------------------------------------------------------------ structure

    def _agree(self) -> None:
        """Describe what is held, gather it, compare replicas, and plan. Collective."""
        session = self._session
        first = self._plan is None
        regions = list(session.live.regions())
        self._regions = {}
        for region in regions:
            self._regions.setdefault((region.fqn, region.part), []).append(region)
        mine: list[tuple[Piece, str]] = []
        for region in regions:
            own = session.rank if (region.fqn, region.part) in self._diverged else -1
            for piece in region.pieces():
                digest = ""
                if first:
                    digest = digest_bytes(tensor_bytes(region.view(piece.box)))
                if own >= 0:
                    piece = msgspec.structs.replace(piece, rank=own)
                mine.append((piece, digest))
        told = gather_values(session.group, mine, list[tuple[Piece, str]])
        if first:
            self._diverged = frozenset(_compare_replicas(told))
            for fqn, part in sorted(self._diverged):
                if session.rank == 0:
                    session.note(
                        "warning", 0, text=f"{part} {fqn} differs between replicas: saved per rank"
                    )
        catalogues = [
            [
                msgspec.structs.replace(p, rank=r) if (p.fqn, p.part) in self._diverged else p
                for p, _ in pieces
            ]
            for r, pieces in enumerate(told)
        ]
        self._plan = plan_save(catalogues, session.rank, session.experts_per_layer)
        self._stamp = session.live.stamp()
        self._size_buffers(self._plan)

    def _size_buffers(self, plan: RankPlan) -> None:
        session, pool = self._session, self._pool
        assert pool is not None
        per_layer = {
            layer: session.policy.experts_per_save(count)[0]
            for layer, count in enumerate(session.experts_per_layer)
        }
        everything = [*plan.dense, *(p for pieces in plan.experts.values() for p in pieces)]
        extras = [_extras_piece(name, 1 << 40, session.rank) for name in (EXTRAS, OPTIMIZER_GROUPS)]
        self._header_area = len(make_header(in_file_order([*everything, *extras])))
        slack = 2 * sum(len(data) for _, data in self._capture_extras()) + _EXTRAS_SLACK_BYTES
        size = self._header_area + plan.capacity(per_layer) + slack
        self._buffer_bytes = -(-size // 4096) * 4096
        count = self._buffer_count(per_layer)
        pool.open(count)
        session.note(
            "warning"
            if count < _wanted_buffers(per_layer, session.experts_per_layer)
            else "marked",
            0,
            nbytes=count * self._buffer_bytes,
            text=f"memory tier: {count} buffers of {self._buffer_bytes / 1e6:.1f} MB per rank in "
            f"{pool.folder}; a full checkpoint is {plan.full_bytes / 1e6:.1f} MB",
        ) if session.rank == 0 else None

    def _buffer_count(self, per_layer: dict[int, int]) -> int:
        session = self._session
        wanted = session.policy.buffers or _wanted_buffers(per_layer, session.experts_per_layer)
        ranks_here = session.nodes.count(session.node)
        budget = self._memory_bytes
        if budget is None:
            budget = int(usable_bytes(session.memory_dir) * _MEMORY_SHARE) // ranks_here
        affordable = budget // self._buffer_bytes
        if affordable < _MIN_BUFFERS:
            raise SaveError(
                f"rank {session.rank}: {_MIN_BUFFERS} buffers of {self._buffer_bytes} bytes do not "
                f"fit into {budget} bytes of {session.memory_dir}; enlarge the tmpfs, name another "
                "directory (memory_dir=), or lower k_snapshot",
                rank=session.rank,
                path=str(session.memory_dir),
            )
        return int(min(wanted, affordable))

    # ------------------------------------------------------------------ snapshot

    def _snapshot(self, step: int, decision: Decision, counted: Pending) -> int:
        session, plan = self._session, self._plan
        assert plan is not None
        version = Version(step, session.attempt)
        session.note("snapshot_started", step)
        extras = self._capture_extras()
        choice = decision.choice
        rounds: list[list[Piece]] = []
        if decision.full and self._exceeds_buffer(choice):
            choice, rounds = self._in_rounds(choice, decision.marked)
        for number, pieces in enumerate(rounds):
            self._persist_round(version, number, pieces)

        chosen = [p for p in plan.dense] + self._expert_pieces(choice.snapshot)
        chosen += [_extras_piece(name, len(data), session.rank) for name, data in extras]
        buffer, view, pieces = self._prepare(chosen)
        records = lay_out(pieces, self._header_area)
        eager, late = self._copies(view, records, dict(extras))
        run_copies(eager)
        job = CopyJob(late)
        nbytes = sum(p.nbytes for p in pieces)
        seal = Seal(
            run_id=session.run_id,
            version=version,
            rank=session.rank,
            world_size=session.group.world_size,
            plan=plan.digest,
            file=buffer.name,
            pieces=records,
            expert_pieces=[
                (layer, e, plan.expert_pieces.get((layer, e), 0))
                for layer, ids in enumerate(choice.snapshot)
                for e in ids
            ],
            head=CommitHead(
                model=session.model_id,
                base=None if decision.full else session.base,
                layers=list(session.live.experts.layers),
                saved=[list(ids) for ids in choice.snapshot],
                routed=[],
                lost=session.lost,
                k_snapshot=_k(session, 0),
                k_persist=_k(session, 1),
                left_out=session.live.left_out,
            ),
        )
        persist = decision.choice if decision.marked else None
        began = knobs.monotonic()
        if decision.marked:
            session.note("marked", step, nbytes=nbytes, text=_told(decision))

        def task() -> None:
            torn = job.run()
            if torn >= 0:
                buffer.release()
                self._torn(step, records, late, torn)
                return
            totals = counted.wait(session.policy.timeout_secs)
            head = msgspec.structs.replace(seal.head, routed=_unflatten(totals, session))
            buffer.put_seal(msgspec.structs.replace(seal, head=head))
            buffer.release()
            self._sealed = step
            session.note("snapshot_done", step, secs=knobs.monotonic() - began, nbytes=nbytes)
            self._hand_over(version, buffer, records, persist)

        self._worker.start(task)
        if not session.policy.overlap:
            self._settle_copy()
        return nbytes

    def _prepare(self, chosen: Sequence[Piece]) -> tuple[Buffer, memoryview, list[Piece]]:
        """Take a buffer and write the header for these pieces into it."""
        pieces = in_file_order(chosen)
        data = sum(p.nbytes for p in pieces)
        nbytes = max(self._buffer_bytes, self._header_area + data)
        buffer, view = self._take_buffer(nbytes)
        header = make_header(
            pieces,
            area=self._header_area,
            data_bytes=len(view) - self._header_area,
        )
        view[: len(header)] = header
        return buffer, view, pieces

    def _take_buffer(self, nbytes: int) -> tuple[Buffer, memoryview]:
        session, pool = self._session, self._pool
        assert pool is not None
        locked: set[int] = set()
        while True:
            facts = [
                BufferFacts(
                    index,
                    b.version,
                    frozenset((m, e) for m, e, _ in b.seal.expert_pieces)
                    if b.seal
                    else frozenset(),
                    index in locked,
                )
                for index, b in enumerate(pool.buffers)
            ]
            chosen = victim(
                facts,
                live=[
                    b.version is not None and session.timeline.is_live(b.version)
                    for b in pool.buffers
                ],
                commit=session.base,
                persisting=self._persisting(),
                sealed_everywhere=self._version_of(self._sealed_everywhere) or session.restored,
            )
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

    def _copies(
        self, view: memoryview, records: Sequence[PieceRecord], extras: dict[str, bytes]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """(destination, source) pairs: those to copy at once, and those that may overlap."""
        eager: list[tuple[Tensor, Tensor]] = []
        late: list[tuple[Tensor, Tensor]] = []
        for record in records:
            piece = record.piece
            if piece.part == EXTRA:
                view[record.offset : record.offset + piece.nbytes] = extras[piece.fqn]
                continue
            region = self._region_of(piece)
            target = over(view, record.offset, piece.dtype, piece.box.sizes)
            (late if region.overlapped else eager).append((target, region.view(piece.box)))
        return eager, late

    def _region_of(self, piece: Piece) -> Region:
        for region in self._regions[piece.fqn, piece.part]:
            if piece.box.intersect(region.box) == piece.box or piece.box.numel == 0:
                return region
        raise AssertionError(f"no live tensor for planned piece {piece.name}")

    def _capture_extras(self) -> list[tuple[str, bytes]]:
        session = self._session
        return [
            (EXTRAS, session.extras.capture()),
            (OPTIMIZER_GROUPS, encode(capture_groups(session.live), "optimizer.param_groups")),
        ]

    def _expert_pieces(self, choice: Sequence[Sequence[int]]) -> list[Piece]:
        assert self._plan is not None
        experts = self._plan.experts
        return [
            piece
            for layer, ids in enumerate(choice)
            for expert in ids
            for piece in experts.get((layer, expert), ())
        ]

    # ------------------------------------------------------------------ saves larger than a buffer

    def _exceeds_buffer(self, choice: Choice) -> bool:
        session = self._session
        return any(
            len(ids) > session.policy.experts_per_save(count)[0]
            for ids, count in zip(choice.snapshot, session.experts_per_layer, strict=True)
        )

    def _in_rounds(self, full: Choice, marked: bool) -> tuple[Choice, list[list[Piece]]]:
        """Split a full save: what an ordinary snapshot holds stays for the end."""
        session, plan = self._session, self._plan
        assert plan is not None
        last = choose(
            self._state.last_snapshot,
            self._state.last_commit,
            plan.holders,
            session.policy,
            marked=True,
        )
        if not marked:
            session.note("warning", 0, text="a full save that is not persisted keeps K_snapshot")
            return last, []
        early = [
            sorted(set(everything) - set(ids))
            for everything, ids in zip(full.snapshot, last.snapshot, strict=True)
        ]
        room = self._buffer_bytes - self._header_area
        rounds: list[list[Piece]] = [[]]
        used = 0
        for piece in self._expert_pieces(early):
            if used + piece.nbytes > room and rounds[-1]:
                rounds.append([])
                used = 0
            rounds[-1].append(piece)
            used += piece.nbytes
        return last, [r for r in rounds if r]

    def _persist_round(self, version: Version, number: int, chosen: list[Piece]) -> None:
        """Copy some experts, persist them, and wait: nothing may change in between."""
        session = self._session
        buffer, view, pieces = self._prepare(chosen)
        records = lay_out(pieces, self._header_area)
        eager, late = self._copies(view, records, {})
        run_copies([*eager, *late])
        buffer.release()
        key = f"{step_dir(version)}/experts-{session.rank:05d}-part{number + 1:02d}.safetensors"
        self._tell(say.PersistPart(version, str(buffer.path), key, records))
        deadline = knobs.monotonic() + session.policy.timeout_secs
        self._parts_done.discard(version)
        while version not in self._parts_done:
            left = deadline - knobs.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the helper of rank {session.rank} did not persist {key} in time"
                )
            self._listen(min(left, 1.0))
            if self._failed >= version.step:
                raise SaveError(f"{key} could not be written", step=version.step, path=key)

    # ------------------------------------------------------------------ background: worker, helper

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
            self._tell(say.Digest(version, path))
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
        self._tell(say.Persist(version, path, files, saved))

    def _torn(
        self,
        step: int,
        records: Sequence[PieceRecord],
        late: Sequence[tuple[Tensor, Tensor]],
        index: int,
    ) -> None:
        overlapped = [r for r in records if r.piece.part != EXTRA]
        overlapped = [r for r in overlapped if self._region_of(r.piece).overlapped]
        name = overlapped[index].piece.name
        self.counts["torn"] += 1
        self._session.note("torn", step, text=f"{name} changed while it was copied")
        self._fail(
            step,
            f"snapshot of step {step} is torn: {name} changed while it was copied; "
            "something besides the optimizers writes it (use Policy(overlap=False))",
            None,
        )

    def _settle_copy(self) -> None:
        """Wait for the copy in flight; a failure is noted, not raised: training may go on."""
        step = max(self.stall_secs, default=0)
        try:
            self._worker.wait(self._session.policy.timeout_secs, f"the snapshot of step {step}")
        except DeadlineError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the copy raised is a failed save
            self._fail(step, f"snapshot of step {step} failed: {error}", error)

    def _tell(self, message: object) -> None:
        assert self._helper is not None
        try:
            self._helper.send(message)
        except HelperError as error:
            self._helper_died(error)

    def _listen(self, timeout_secs: float = 0.0) -> None:
        """Hear what the helper has to say; one system call when that is nothing."""
        if self._helper is None:
            return
        try:
            for message in self._helper.receive(timeout_secs):
                self._hear(message)
        except HelperError as error:
            self._helper_died(error)

    def _hear(self, message: object) -> None:
        session = self._session
        match message:
            case say.PartDone():
                self._parts_done.add(message.version)
            case say.Persisted():
                self._resolved_here = max(self._resolved_here, message.version.step)
            case say.Failed():
                step = message.version.step
                self._fail(
                    step,
                    f"persist of step {step} failed on rank {session.rank}"
                    f" ({message.path or 'no path'}): {message.error}",
                    None,
                    message.path,
                )
            case say.Committed():
                self._committed = max(self._committed, message.version.step)
                self.counts["committed"] += 1
                self.committed_bytes[message.version.step] = message.nbytes
                session.note(
                    "committed", message.version.step, secs=message.secs, nbytes=message.nbytes
                )
            case say.Abandoned():
                self._abandoned = max(self._abandoned, message.version.step)
                self.counts["abandoned"] += 1
                session.note("abandoned", message.version.step, text=message.reason)
                self._failures.append(
                    SaveError(
                        f"step {message.version.step} was abandoned: {message.reason}",
                        step=message.version.step,
                        rank=session.rank,
                    )
                )
            case say.Pruned():
                steps = ", ".join(str(v.step) for v in message.versions)
                session.note("pruned", 0, text=f"steps {steps or '-'}; {message.files} files")
            case say.Warned():
                self.counts["warnings"] += 1
                session.note("warning", 0, text=message.text)

    def _start_helper(self) -> None:
        session, policy = self._session, self._session.policy
        assert self._pool is not None
        hello = say.Hello(
            url=session.store.url,
            rank=session.rank,
            world_size=session.group.world_size,
            attempt=session.attempt,
            keep_latest_k=policy.keep_latest_k,
            keep_every=policy.keep_every,
            timeout_secs=policy.timeout_secs,
            grace_secs=policy.grace_secs,
            faults=self._faults,  # type: ignore[arg-type]
        )
        self._helper = Helper(hello, str(self._pool.folder))

    def _helper_died(self, error: HelperError) -> None:
        self.counts["helper_restarts"] += 1
        step = self._last_marked
        if step > max(self._committed, self._abandoned, self._failed) and not (
            self._session.rank != 0 and self._resolved_here >= step
        ):
            self._fail(step, f"persist of step {step} failed: {error}", error)
        else:
            self._session.note("warning", step, text=f"{error}; started again")
        self._start_helper()

    def _fail(self, step: int, text: str, error: Exception | None, path: str = "") -> None:
        failure = SaveError(text, step=step, rank=self._session.rank, path=path)
        failure.__cause__ = error
        if step == self._last_marked:
            self._failed = max(self._failed, step)
        self._failures.append(failure)
        self.counts["failed"] += 1
        self._session.note("failed", step, text=text)

    def _surface(self) -> None:
        """Raise or forget what failed since the last call; events have told it already."""
        self._session.flush()
        failures, self._failures = self._failures, []
        if failures and self._session.policy.on_error == "raise":
            raise failures[0]

    # ------------------------------------------------------------------ small

    def _is_resolved_here(self, step: int) -> bool:
        """Whether this rank has nothing left to do for a marked step."""
        if self._failed >= step:
            return True
        if self._session.rank == 0:
            return max(self._committed, self._abandoned) >= step
        return self._resolved_here >= step

    def _persisting(self) -> Version | None:
        known = max(self._committed, self._abandoned, self._failed)
        return self._version_of(self._last_marked) if self._last_marked > known else None

    def _version_of(self, step: int) -> Version | None:
        return Version(step, self._session.attempt) if step >= 0 else None

    def _stall(self, step: int, secs: float) -> None:
        self.stall_secs[step] = self.stall_secs.get(step, 0.0) + secs
        self._session.note("stalled", step, secs=secs)


def _compare_replicas(told: Sequence[Sequence[tuple[Piece, str]]]) -> Iterator[tuple[str, str]]:
    """Find buffers that differ between their holders.

    Raises:
        LayoutError: a parameter or its optimizer state differs: a wrong group, or replicas that
            have drifted apart.
    """
    seen: dict[str, tuple[int, str]] = {}
    for rank, pieces in enumerate(told):
        for piece, digest in pieces:
            other, expected = seen.setdefault(piece.name, (rank, digest))
            if digest == expected:
                continue
            if piece.part == BUFFER:
                yield piece.fqn, piece.part
                continue
            group = "edp (or ep)" if piece.is_expert else "dp"
            what = "parameter" if piece.part == WEIGHT else f"optimizer state {piece.part} of"
            raise LayoutError(
                f"{what} {piece.fqn} differs between ranks {other} and {rank}, which the layout "
                f"says are replicas; is the {group} group right, and are replicas in step?"
            )


def _extras_piece(name: str, nbytes: int, rank: int) -> Piece:
    return Piece(name, EXTRA, Box.whole((nbytes,)), "U8", rank=rank)


def _wanted_buffers(per_layer: dict[int, int], experts: Sequence[int]) -> int:
    windows = max((-(-n // per_layer[layer]) for layer, n in enumerate(experts)), default=1)
    return windows + _SPARE_BUFFERS


def _k(session: Session, level: int) -> int:
    return max(
        (session.policy.experts_per_save(n)[level] for n in session.experts_per_layer), default=0
    )


def _told(decision: Decision) -> str:
    if decision.full:
        return "full"
    return f"{sum(map(len, decision.choice.persist))} experts"


def _flatten(rows: Iterable[Iterable[int]]) -> list[int]:
    return [int(value) for row in rows for value in row]


def _unflatten(values: Sequence[int], session: Session) -> Totals:
    """Totals per layer and expert, from rows as wide as the largest layer."""
    width = max(session.experts_per_layer, default=0)
    return [
        list(values[m * width : m * width + count])
        for m, count in enumerate(session.experts_per_layer)
    ]
