"""Copies, seals, tickets, persists, receipts, commits and deaths in any order, truly decided.

The edges are fake: a buffer is a dict from piece to the version whose values it has, the store is
another, a process is a few lists. Everything that is decided is decided by the library: what is
saved, which buffer is overwritten, what a receipt makes of a step, what retention takes, what is
live, and what a restore reads. At every moment somebody may die, so after every event the question
is asked: what would come back now?
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import moc
from moc.choose.fate import settle
from moc.choose.pick import Choice, ChooseState, choose
from moc.choose.retention import BufferFacts, ManifestFacts, sweep, victim
from moc.choose.ticket import HELD, Decision, Ticket, Words, decide
from moc.core.box import Box
from moc.core.manifest import (
    CommitHead,
    FileInfo,
    Manifest,
    Receipt,
    Seal,
    assemble,
    manifest_key,
    receipt_key,
    step_dir,
)
from moc.core.piece import Piece, PieceRecord
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import NothingValid
from moc.recover.ladder import STORAGE, Inventory, RecoveryPlan, climb

WORLD, EXPERTS = 2, 4
HOLDERS = ((0, 0, 1, 1),)
"""Weights of experts 0 and 1 lie on rank 0, their moments on rank 1; the others the other way."""

Contents = dict[str, Version]
"""Piece -> the version whose values these bytes have; a piece that is half copied is not there."""


def pieces_of(rank: int, experts: Collection[int], *, dense: bool = True) -> list[Piece]:
    """What a rank writes of a choice."""
    found = [Piece("dense", "weight", Box((rank,), (1,)), "F32")] * dense
    for expert in sorted(experts):
        part = "weight" if HOLDERS[0][expert] == rank else "exp_avg"
        found.append(Piece("moe.w", part, Box((expert,), (1,)), "F32", 0, expert))
    return found


@dataclass
class Buffer:
    """One buffer: sealed or not, and what its bytes are."""

    contents: Contents = field(default_factory=dict)
    seal: Seal | None = None
    locked: bool = False


@dataclass
class Task:
    """What a helper was told to persist, and how far it is."""

    version: Version
    buffer: int
    choice: Choice
    head: CommitHead
    state: str = "told"


@dataclass
class Copy:
    """A copy into a buffer that is under way."""

    version: Version
    buffer: int
    decision: Decision
    choice: Choice
    head: CommitHead


@dataclass
class Rank:
    """A trainer, its buffers and its helper."""

    number: int
    buffers: list[Buffer]
    state: ChooseState = field(default_factory=lambda: ChooseState.fresh([EXPERTS]))
    pending: dict[int, Choice] = field(default_factory=dict)
    base: Version | None = None
    copy: Copy | None = None
    tasks: list[Task] = field(default_factory=list)
    over: int = -1
    inbox: list[tuple[str, int]] = field(default_factory=list)
    marked: int = -1
    everywhere: Version | None = None
    failed: int = -1
    committed: int = -1
    abandoned: int = -1
    persisted: int = -1

    def names(self, buffer: int) -> str:
        return f"{self.number:05d}-{buffer}.safetensors"

    def restart(self) -> None:
        """A new process on the same node: the buffers are what is left."""
        fresh = Rank(self.number, self.buffers)
        self.__dict__.update(fresh.__dict__)


class Run(RuleBasedStateMachine):
    """One job, its memory and its store."""

    @initialize(
        ks=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 2), (4, 1), (4, 4)]),
        buffers=st.integers(3, 6),
        persist_every=st.integers(1, 3),
        keep=st.sampled_from([1, 2, None]),
    )
    def start(
        self, ks: tuple[int, int], buffers: int, persist_every: int, keep: int | None
    ) -> None:
        self.policy = moc.Policy(
            snapshot_every=1,
            persist_every=persist_every,
            k_snapshot=ks[0],
            k_persist=ks[1],
            keep_latest_k=keep,
            buffers=buffers,
        )
        self.ranks = [Rank(n, [Buffer() for _ in range(buffers)]) for n in range(WORLD)]
        self.files: dict[str, Contents] = {}
        self.receipts: dict[str, Receipt] = {}
        self.manifests: dict[str, Manifest] = {}
        self.awaited: Version | None = None
        self.posted: list[Words] | None = None
        self.records: list[AttemptRecord] = []
        self.past: frozenset[Version] = frozenset()  # what the live state has been
        self.lineage: dict[Version, frozenset[Version]] = {}
        self.floor: Version | None = None  # sealed everywhere, as far as all ranks have heard
        self.step = 0
        self.begin(0)

    # ------------------------------------------------------------------ the trainers

    @rule()
    def save(self) -> None:
        """An optimizer step and its save: only after the copies before, which is the fence."""
        for rank in self.ranks:
            if rank.copy is not None:
                self.end_copy(rank, torn=False)
        self.step += 1
        self.make_save(self.step, forced=False)

    def make_save(self, step: int, *, forced: bool) -> None:
        words = self.posted or [self.words(rank, step) for rank in self.ranks]
        packed = [w.pack() for w in words]
        ticket = Ticket.unpack([min(column) for column in zip(*packed, strict=True)])
        assert not ticket.differ
        decisions = []
        for rank in self.ranks:
            self.learn(rank, ticket)
            decisions.append(
                decide(
                    step,
                    ticket,
                    rank.state,
                    HOLDERS,
                    self.policy,
                    last_marked=rank.marked,
                    has_base=rank.base is not None,
                    forced=forced,
                )
            )
        assert decisions[0] == decisions[1], "ranks decide alike"
        held = [v for v, is_held in zip(self.recent, ticket.held, strict=False) if is_held]
        self.floor = held[0] if held else self.floor
        version = Version(step, self.attempt)
        self.past = self.lineage[version] = self.past | {version}
        self.recent = [version, *self.recent][:HELD]
        for rank in self.ranks:
            rank.everywhere = self.floor
            self.take(rank, version, decisions[0])
        self.posted = [self.words(rank, step + 1) for rank in self.ranks]

    def words(self, rank: Rank, due: int) -> Words:
        return Words(
            step=due,
            attempt=self.attempt,
            plan=1,
            unchanged=1,
            held=tuple(
                int(any(b.seal and b.seal.version == v for b in rank.buffers)) for v in self.recent
            ),
            failed=rank.failed,
            committed=rank.committed if rank.number == 0 else None,
            abandoned=rank.abandoned if rank.number == 0 else None,
        )

    def learn(self, rank: Rank, ticket: Ticket) -> None:
        rank.state, rank.pending = settle(
            rank.state,
            rank.pending,
            committed=ticket.committed,
            abandoned=ticket.abandoned,
            failed=ticket.failed,
            marked=rank.marked,
        )
        rank.over = max(rank.over, ticket.committed, ticket.abandoned, ticket.failed)
        newest = Version(ticket.committed, self.attempt)
        if ticket.committed >= 0 and (rank.base is None or newest > rank.base):
            rank.base = newest
            rank.committed = max(rank.committed, ticket.committed)
        hopeless = ticket.failed == rank.marked > max(ticket.committed, ticket.abandoned)
        if rank.number == 0 and hopeless and self.awaited == Version(rank.marked, self.attempt):
            self.give_up()

    def take(self, rank: Rank, version: Version, decision: Decision) -> None:
        choice = decision.choice
        if decision.marked:
            rank.marked, rank.pending[version.step] = version.step, choice
        head = CommitHead(
            model="m",
            base=None if decision.full else rank.base,
            layers=["moe"],
            saved=[list(choice.persist[0])],
            routed=[[version.step] * EXPERTS],
            lost=[[0] * EXPERTS],
            k_snapshot=self.policy.k_snapshot or EXPERTS,
            k_persist=self.policy.k_persist or EXPERTS,
        )
        try:
            if decision.full:  # what goes beyond a buffer is persisted first, in a round
                choice = choose(
                    rank.state.last_snapshot, rank.state.last_commit, HOLDERS, self.policy
                )
                early = set(range(EXPERTS)) - set(choice.snapshot[0])
                if early:
                    self.overwrite(rank)
                    key = f"{step_dir(version)}/experts-{rank.number:05d}-part01.safetensors"
                    self.put_file(
                        key, {p.name: version for p in pieces_of(rank.number, early, dense=False)}
                    )
            buffer = self.overwrite(rank)
        except LookupError:
            rank.failed = max(rank.failed, version.step) if decision.marked else rank.failed
        else:
            rank.copy = Copy(version, buffer, decision, choice, head)
        rank.state = rank.state.snapshotted(version.step, decision.choice.snapshot)

    def overwrite(self, rank: Rank) -> int:
        """Take a buffer as `engine/snapshots` does: what was in it is gone."""
        known = max(rank.committed, rank.abandoned, rank.failed)
        while True:
            versions = [b.seal.version if b.seal else None for b in rank.buffers]
            chosen = victim(
                [
                    BufferFacts(
                        i,
                        v,
                        frozenset((0, e) for _, e, _ in b.seal.expert_pieces)
                        if b.seal
                        else frozenset(),
                        b.locked,
                    )
                    for i, (v, b) in enumerate(zip(versions, rank.buffers, strict=True))
                ],
                live=[v is not None and self.timeline.is_live(v) for v in versions],
                commit=rank.base,
                persisting=Version(rank.marked, self.attempt) if rank.marked > known else None,
                sealed_everywhere=rank.everywhere,
            )
            if chosen is not None:
                break
            if not any(b.locked for b in rank.buffers):
                raise LookupError("no free buffer")
            self.finish_tasks(rank)  # the trainer waits for the lock
        buffer = rank.buffers[chosen]
        assert not buffer.locked
        assert versions[chosen] is None or versions[chosen] not in (rank.base, rank.everywhere)
        buffer.seal, buffer.contents = None, {}
        return chosen

    @rule(number=st.integers(0, WORLD - 1), torn=st.sampled_from([False] * 7 + [True]))
    def copied(self, number: int, torn: bool) -> None:
        """A copy ends, and is sealed unless it was torn."""
        if self.ranks[number].copy is not None:
            self.end_copy(self.ranks[number], torn=torn)

    def end_copy(self, rank: Rank, *, torn: bool) -> None:
        copy, rank.copy = rank.copy, None
        assert copy is not None
        version, buffer = copy.version, rank.buffers[copy.buffer]
        pieces = pieces_of(rank.number, copy.choice.snapshot[0])
        if torn:
            if version.step == rank.marked:
                rank.failed = max(rank.failed, version.step)
            return
        buffer.contents = {p.name: version for p in pieces}
        buffer.seal = Seal(
            run_id="r",
            version=version,
            rank=rank.number,
            world_size=WORLD,
            plan=1,
            file=rank.names(copy.buffer),
            pieces=[PieceRecord(p, 0, i) for i, p in enumerate(pieces)],
            expert_pieces=[(0, e, 2) for e in copy.choice.snapshot[0]],
            head=copy.head,
        )
        for other in rank.buffers:
            if other is not buffer and other.seal and other.seal.version == version:
                other.seal = None
        if copy.decision.marked:
            rank.tasks.append(Task(version, copy.buffer, copy.decision.choice, copy.head))

    @rule(number=st.integers(0, WORLD - 1))
    def hear(self, number: int) -> None:
        """A trainer listens to its helper."""
        rank = self.ranks[number]
        for kind, step in rank.inbox:
            setattr(rank, kind, max(getattr(rank, kind), step))
        rank.inbox.clear()

    # ------------------------------------------------------------------ the helpers

    @rule(number=st.integers(0, WORLD - 1))
    def works(self, number: int) -> None:
        """A helper goes on with what it was told: lock, write, receipt."""
        self.work(self.ranks[number])

    def work(self, rank: Rank) -> None:
        if not rank.tasks:
            return
        task = rank.tasks[0]
        buffer = rank.buffers[task.buffer]
        if task.state == "told":
            if buffer.seal is None or buffer.seal.version != task.version:
                known = max(rank.committed, rank.abandoned, rank.failed, rank.over)
                assert task.version.step <= known, "what is to be persisted is not overwritten"
                rank.inbox.append(("failed", task.version.step))
                del rank.tasks[0]
                return
            buffer.locked, task.state = True, "locked"
        elif task.state == "locked":
            for key, pieces in self.files_of(rank, task).items():
                self.put_file(key, {p.name: buffer.contents[p.name] for p in pieces})
            task.state = "written"
        else:
            self.put_receipt(rank, task)
            buffer.locked = False
            del rank.tasks[0]
            rank.inbox.append(("persisted", task.version.step))
            if rank.number == 0:
                self.awaited = task.version

    def finish_tasks(self, rank: Rank) -> None:
        while rank.tasks:
            self.work(rank)

    def files_of(self, rank: Rank, task: Task) -> dict[str, list[Piece]]:
        folder, number = step_dir(task.version), f"{rank.number:05d}"
        held = rank.buffers[task.buffer].contents
        chosen = pieces_of(rank.number, task.choice.persist[0])
        here = [p for p in chosen if p.name in held]
        return {
            f"{folder}/dense-{number}.safetensors": [p for p in here if not p.is_expert],
            f"{folder}/experts-{number}.safetensors": [p for p in here if p.is_expert],
        }

    def put_file(self, key: str, contents: Contents) -> None:
        if contents:
            assert self.files.setdefault(key, contents) == contents, "keys are written once"

    def put_receipt(self, rank: Rank, task: Task) -> None:
        version = task.version
        chosen = {p.name: p for p in pieces_of(rank.number, task.choice.persist[0])}
        mine = [
            key
            for key in sorted(self.files)
            if re.match(rf"{step_dir(version)}/\w+-{rank.number:05d}\b", key)
        ]
        records = [
            PieceRecord(chosen[name], file, i, str(content))
            for file, key in enumerate(mine)
            for i, (name, content) in enumerate(self.files[key].items())
        ]
        receipt = Receipt(
            version=version,
            rank=rank.number,
            world_size=WORLD,
            files=[FileInfo(key, 1, "h") for key in mine],
            pieces=records,
            head=task.head if rank.number == 0 else None,
        )
        key = receipt_key(version, rank.number)
        assert self.receipts.setdefault(key, receipt) == receipt

    @rule(number=st.integers(0, WORLD - 1))
    def fails(self, number: int) -> None:
        """The store refuses a helper for good."""
        rank = self.ranks[number]
        if rank.tasks:
            task = rank.tasks.pop(0)
            rank.buffers[task.buffer].locked = False
            rank.inbox.append(("failed", task.version.step))

    @rule(number=st.integers(0, WORLD - 1))
    def helper_dies(self, number: int) -> None:
        """SIGKILL to a helper; its trainer notices at once, as it does within a step."""
        rank = self.ranks[number]
        self.drop_tasks(rank)
        if number == 0:
            self.awaited = None
        self.hear(number)
        done = max(rank.committed, rank.abandoned) if number == 0 else rank.persisted
        if rank.marked > max(rank.failed, rank.committed, done):
            rank.failed = rank.marked

    def drop_tasks(self, rank: Rank) -> None:
        rank.tasks.clear()
        for buffer in rank.buffers:
            buffer.locked = False

    @rule(deletes=st.integers(0, 12))
    def commits(self, deletes: int) -> None:
        """The coordinator's helper looks for receipts; retention may die half way."""
        version = self.awaited
        if version is not None and self.commit(version):
            self.awaited = None
            self.ranks[0].inbox.append(("committed", version.step))
            self.prune(deletes)

    @precondition(lambda self: self.awaited is not None)
    @rule()
    def give_up(self) -> None:
        """Receipts miss the deadline, or a rank said that it failed."""
        assert self.awaited is not None
        self.ranks[0].inbox.append(("abandoned", self.awaited.step))
        self.awaited = None

    def commit(self, version: Version) -> bool:
        receipts = [self.receipts.get(receipt_key(version, r)) for r in range(WORLD)]
        if None in receipts:
            return False
        head = receipts[0].head  # type: ignore[union-attr]
        base = self.manifests[manifest_key(head.base)] if head.base else None
        manifest = assemble(receipts, base)  # type: ignore[arg-type]
        assert self.manifests.setdefault(manifest_key(version), manifest) == manifest
        return True

    def prune(self, deletes: int) -> None:
        facts = [
            ManifestFacts(m.version, frozenset(f.key for f in m.files))
            for m in self.manifests.values()
        ]
        keys = [*self.files, *self.receipts, *self.manifests]
        plan = sweep(facts, keys, self.timeline, self.policy.keep_latest_k, None)
        for key in [*(manifest_key(v) for v in plan.retire), *plan.delete][:deletes]:
            for tier in (self.manifests, self.receipts, self.files):
                tier.pop(key, None)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ deaths

    @rule(
        lost=st.sets(st.integers(0, WORLD - 1)),
        orphans=st.sets(st.integers(0, WORLD - 1)),
        back=st.sampled_from([False] * 5 + [True]),
    )
    def crash(self, lost: set[int], orphans: set[int], back: bool) -> None:
        """All trainers die; some nodes with their memory; some helpers finish what they write."""
        for rank in self.ranks:
            rank.copy = None
            if rank.number in orphans - lost:
                self.finish_tasks(rank)
            self.drop_tasks(rank)
            if rank.number in lost:
                rank.buffers[:] = [Buffer() for _ in rank.buffers]
        if self.awaited is not None and 0 in orphans - lost:
            self.commit(self.awaited)
        for version in {r.version for r in self.receipts.values()}:  # rolled forward
            if self.timeline.is_live(version) and manifest_key(version) not in self.manifests:
                self.commit(version)
        plan = self.look(complete=not lost)
        if back and len(self.live_manifests()) > 1:
            older = min(self.live_manifests())
            plan = climb(self.inventory(), older.step)
            self.check(plan)
        self.floor = plan.version if plan and not lost and not back else None
        self.begin(plan.version.step if plan else 0, plan)

    def begin(self, resumed: int, plan: RecoveryPlan | None = None) -> None:
        number = len(self.records) + 1
        self.records.append(
            AttemptRecord(
                attempt=number,
                parent=number - 1,
                resumed_step=resumed,
                world_size=WORLD,
                k_snapshot=1,
                k_persist=1,
            )
        )
        self.timeline = Timeline.of(self.records)
        self.attempt, self.step = number, resumed
        self.awaited = self.posted = None
        self.recent = []
        self.past = self.lineage[plan.version] if plan else frozenset()
        for rank in self.ranks:
            rank.restart()
            for buffer in rank.buffers:
                if buffer.seal and not self.timeline.is_live(buffer.seal.version):
                    buffer.seal = None
            if plan is not None:
                rank.base, rank.everywhere = plan.base, plan.version
                if plan.base_versions:
                    steps = tuple(tuple(v.step for v in row) for row in plan.base_versions)
                    rank.state = ChooseState(steps, steps)
        if plan is not None and plan.version != plan.base:
            self.make_save(resumed, forced=True)  # what came from memory is persisted first

    # ------------------------------------------------------------------ what would come back

    @invariant()
    def whoever_dies_now(self) -> None:
        """Nothing that is live is overwritten, mixed or lost, whatever dies at this moment."""
        if not hasattr(self, "ranks"):
            return
        for lost in ((), (0,), (1,), (0, 1)):
            self.look(lost=lost, complete=not lost)

    def look(self, *, complete: bool, lost: Sequence[int] = ()) -> RecoveryPlan | None:
        """What a restore would find; fails where it is less than was promised."""
        committed = self.live_manifests()
        try:
            plan = climb(self.inventory(lost))
        except NothingValid:
            assert not committed, "a committed step is for ever"
            return None  # before the first commit the windows in memory need not hold every expert
        self.check(plan)
        assert plan.version in self.past, "what is on no line of history never comes back"
        if committed:
            self.check(climb(self.inventory((0, 1)), min(committed).step))
            newest = max(committed)
            assert plan.version >= newest
            stored = self.manifests[manifest_key(newest)].versions
            assert all(a >= b for a, b in zip(plan.versions[0], stored[0], strict=True))
        if complete and self.floor is not None and self.timeline.is_live(self.floor):
            assert plan.version >= self.floor, f"{plan.version} < {self.floor}: {plan.reasons}"
        return plan

    def check(self, plan: RecoveryPlan) -> None:
        """Every source of every piece has the bytes of the version that is claimed."""
        found: dict[int, list[Version]] = {}
        assert {v for row in plan.versions for v in row} <= self.lineage[plan.version]
        for fetch in plan.fetches:
            name = fetch.piece.name
            for source in fetch.sources:
                if source.node == STORAGE:
                    assert self.files[source.file][name] == fetch.version
                else:
                    rank = self.ranks[int(source.file[:5])]
                    number = int(source.file.partition("-")[2].partition(".")[0])
                    assert rank.buffers[number].contents[name] == fetch.version
            if fetch.piece.is_expert:
                found.setdefault(fetch.piece.expert, []).append(fetch.version)
            else:
                assert fetch.version == plan.version
        assert found == {e: [plan.versions[0][e]] * 2 for e in range(EXPERTS)}
        assert sum(not f.piece.is_expert for f in plan.fetches) == WORLD

    def live_manifests(self) -> list[Version]:
        return [m.version for m in self.manifests.values() if self.timeline.is_live(m.version)]

    def inventory(self, lost: Sequence[int] = ()) -> Inventory:
        return Inventory(
            timeline=self.timeline,
            seals=tuple(
                (rank.number, buffer.seal)
                for rank in self.ranks
                if rank.number not in lost
                for buffer in rank.buffers
                if buffer.seal is not None
            ),
            manifests=tuple(self.manifests.values()),
        )


TestRun = pytest.mark.timeout(300)(Run.TestCase)
TestRun.settings = settings(max_examples=400, stateful_step_count=50)
