"""A restore, from the question "what is left?" to a new attempt.

The phases, in order: let orphaned helpers finish, identify the run, take the inventory, plan,
check that the plan fits this model, load and verify, start the attempt. Every rank computes the
same plan from the same gathered facts; all checks that can be made come before the first live
byte is touched.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import torch

from moc import knobs
from moc.comm.group import agree, gather_values
from moc.core.box import Box, bounding_shape, uncovered
from moc.core.digest import digest_bytes
from moc.core.manifest import Manifest, RunInfo, Seal, encode_json
from moc.core.piece import EXTRA, STEP_OF_EXPERT
from moc.core.tokens import planned_routed, plt, plt_unique
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.engine.report import SOURCES, RestoreReport
from moc.engine.session import Session, host_name
from moc.engine.structure import EXTRAS, OPTIMIZER_GROUPS
from moc.errors import (
    DamagedError,
    KeyExists,
    KeyMissing,
    MismatchError,
    NothingValid,
    RanksDisagree,
    RestoreError,
    RunBusy,
    StoreError,
)
from moc.persist.client import orphans, stop
from moc.persist.commit import load_manifest, load_timeline, put_attempt, roll_forward, versions_in
from moc.persist.survey import RUN_KEY, find_run, read_run
from moc.persist.writer import shared_buffer
from moc.recover.ladder import STORAGE, Fetch, Inventory, RecoveryPlan, Source, climb
from moc.snapshot.buffers import lock_holders, read_seals, remove_dead, remove_forgotten, run_memory
from moc.state.extras import decode
from moc.state.groups import match_groups, restore_groups
from moc.state.live import Always, OwnedParam, Region
from moc.state.tensors import over

__all__ = ["restore", "start_fresh"]

_KILL_SECS = 5.0
_FORGOTTEN_SECS = 24 * 3600.0  # other runs' buffers that are older and unlocked are removed
_POLL_SECS = 0.02
_SHOWN = 8


class _Facts(msgspec.Struct):
    """What rank 0 found in the store."""

    timeline: Timeline = Timeline()
    manifests: list[Manifest] = []
    problems: list[str] = []


class _Held(msgspec.Struct):
    """What one rank found in its node's memory."""

    node: int
    seals: list[Seal]


def restore(session: Session, asked_step: int | None, *, strict: bool) -> RestoreReport | None:
    """Restore and start the attempt; see `CheckpointManager.restore`. Collective."""
    began = knobs.monotonic()
    _identify(session, write=False)
    if not session.is_foreign:
        _settle_orphans(session)
    facts = _read_store(session)
    seals = _memory(session)
    inventory = Inventory(
        timeline=facts.timeline,
        seals=seals,
        manifests=tuple(facts.manifests),
        problems=tuple(facts.problems),
    )
    nothing = not facts.manifests and not any(facts.timeline.is_live(s.version) for _, s in seals)
    if nothing and asked_step is None and not facts.problems:
        _identify(session, write=True)
        _start_attempt(session, facts.timeline, 0, {}, [])
        return None
    try:
        plan = climb(inventory, asked_step)
    except NothingValid as error:
        if facts.manifests or facts.problems or session.policy.persist_every is None:
            raise
        # A node was lost before the first commit: no restart would ever find more than this one.
        session.note("warning", 0, text=f"nothing was committed yet, starting over: {error}")
        _start_attempt(session, facts.timeline, 0, {}, [])
        return None
    _compare_plans(session, plan)
    inventoried = knobs.monotonic()
    while True:
        loader = _Loader(session, plan)
        missing, unexpected = loader.check(strict=strict)
        try:
            bad = loader.load(strict=strict)
        except StoreError as error:
            raise RestoreError(f"restore of step {plan.version} failed: {error}") from error
        if not bad:
            break
        inventory = msgspec.structs.replace(
            inventory,
            struck=inventory.struck | {place for place, _ in bad},
            why={**inventory.why, **dict(bad)},
        )
        for text in _once_per_file(bad) if session.rank == 0 else ():
            session.note("warning", plan.version.step, text=text)
        try:
            plan = climb(inventory, asked_step)
        except RestoreError as error:
            raise type(error)(
                f"{error}; the model's contents are undefined now, start from a new process"
            ) from error
        _compare_plans(session, plan)
    loader.finish(strict=strict)
    loaded = knobs.monotonic()
    by_class, entries = _sum_over_ranks(session, loader)
    sources = {name: sum(c[name] for c in by_class.values()) for name in SOURCES}
    session.base, session.base_versions = plan.base, plan.base_versions
    session.lost, session.restored = plan.lost, plan.version
    session.routed = plan.head.routed
    if session.is_foreign and not missing and not unexpected:
        session.model_id = session.run_model  # the same, but for how ranks share it
    if not session.is_foreign:
        _start_attempt(session, facts.timeline, plan.version.step, sources, plan.fault_lost)
    return _report(
        session,
        plan,
        by_class,
        sources,
        entries,
        (missing, unexpected),
        (began, inventoried, loaded),
    )


def start_fresh(session: Session, *, force: bool) -> None:
    """Start an attempt at step 0. Collective.

    Raises:
        RestoreError: the run has live versions and ``force`` is not set.
    """
    _identify(session, write=True)
    facts = _read_store(session)
    live = [m.version.step for m in facts.manifests]
    if live and not force:
        raise RestoreError(
            f"{session.store.url} has committed steps {live[-_SHOWN:]}; call manager.restore() "
            "before the first save, or give fresh=True to start over beside them"
        )
    _start_attempt(session, facts.timeline, 0, {}, [])


# ---------------------------------------------------------------------- run, inventory, plan


def _identify(session: Session, *, write: bool) -> None:
    """Rank 0 reads, or with ``write`` makes, the identity of the run; all ranks learn it."""

    def look() -> tuple[str, str]:
        return _read_identity(session, write) if session.rank == 0 else ("", "")

    mine = agree(session.group, look)
    told = session.group.broadcast(msgspec.msgpack.encode(mine))
    session.run_id, session.run_model = msgspec.msgpack.decode(told, type=tuple[str, str])


def _read_identity(session: Session, write: bool) -> tuple[str, str]:
    store = session.store
    run = find_run(store)
    if run is None:
        if not write:
            return "", ""
        run = RunInfo(run_id=secrets.token_hex(8), model=session.model_id, created=knobs.now_utc())
        try:
            store.put_new(RUN_KEY, [encode_json(run)])
        except KeyExists:  # another start was faster; the attempt's number decides who goes on
            run = read_run(store)
    if write and run.model != session.model_id:
        raise RunBusy(
            f"{store.url} belongs to another model (fingerprint {run.model}, this one is "
            f"{session.model_id}): parameter names, shapes or experts differ; use another directory"
        )
    return run.run_id, run.model


def _settle_orphans(session: Session) -> None:
    """Let helpers of the attempt before finish what they write, then end them. Collective.

    They may hold complete files whose receipts are on the way; a commit after the step to resume
    from is chosen would come too late.
    """

    def settle() -> None:
        folder = run_memory(session.memory_dir, session.run_id)
        if not _is_lister(session) or not folder.is_dir():
            return
        end = knobs.monotonic() + session.policy.grace_secs
        while lock_holders(folder) and knobs.monotonic() < end:
            knobs.sleep(_POLL_SECS)
        stop(orphans(str(folder)), _KILL_SECS)

    agree(session.group, settle)


def _read_store(session: Session) -> _Facts:
    """Rank 0 finishes and lists commits; all ranks learn them, or its error."""

    def look() -> _Facts:
        if session.rank != 0 or not session.run_id:
            return _Facts()
        store = session.store
        timeline = load_timeline(store)
        problems = [] if session.is_foreign else roll_forward(store, timeline)[1]
        unborn: list[Version] = []
        manifests: list[Manifest] = []
        for version in filter(timeline.is_live, versions_in(store)):
            try:
                manifests.append(load_manifest(store, version))
            except KeyMissing:
                unborn.append(version)
            except DamagedError as error:
                problems.append(str(error))
        # Older folders without a manifest were retired, and hold files that later steps need.
        newest = max((m.version for m in manifests), default=None)
        problems += [
            f"step {v} was never committed" for v in unborn if newest is None or v > newest
        ]
        if not manifests and not any("damaged" in p for p in problems):
            problems = []  # a run that died before its first commit has lost nothing
        return _Facts(timeline, manifests, problems)

    mine = agree(session.group, look)
    told = session.group.broadcast(msgspec.msgpack.encode(mine))
    facts = msgspec.msgpack.decode(told, type=_Facts)
    session.timeline = facts.timeline
    return facts


def _memory(session: Session) -> tuple[tuple[int, Seal], ...]:
    """Seals of all nodes; one rank of each node looks."""

    def look() -> _Held:
        if not _is_lister(session) or not session.run_id:
            return _Held(session.node, [])
        seals = read_seals(run_memory(session.memory_dir, session.run_id))
        return _Held(session.node, [s for s in seals if s.run_id == session.run_id])

    told = gather_values(session.group, agree(session.group, look), _Held)
    return tuple((held.node, seal) for held in told for seal in held.seals)


def _compare_plans(session: Session, plan: RecoveryPlan) -> None:
    told = gather_values(session.group, plan.digest, int)
    if len(set(told)) > 1:
        raise RanksDisagree(f"ranks computed different recovery plans: {told}")


# ---------------------------------------------------------------------- load


class _Target(msgspec.Struct, frozen=True):
    """A live region to fill, and what to do when it is filled."""

    region: Region
    finish: Callable[[], None]


class _Loader:
    """Fills this rank's live state from a plan."""

    def __init__(self, session: Session, plan: RecoveryPlan) -> None:
        self._session = session
        self._plan = plan
        self._extras: dict[str, bytearray] = {}
        self._targets: dict[tuple[str, str], list[_Target]] = {}
        self._steps: list[tuple[OwnedParam, torch.Tensor]] = []
        # Ranks beyond the old world take the place of an old one, in turn.
        self._as_rank = session.rank % plan.world_size
        self._fetches = [f for f in plan.fetches if f.piece.rank in (-1, self._as_rank)]
        self._table = _by_tensor(self._fetches)
        self.nbytes = {c: dict.fromkeys(SOURCES, 0) for c in ("dense", "experts")}
        self.entries = 0

    def check(self, *, strict: bool) -> tuple[list[str], list[str]]:
        """Compare the plan with the model before anything is touched. Collective.

        Raises:
            MismatchError: shapes or dtypes differ, or (strict) names do.
        """
        regions = list(self._session.live.model_regions())
        missing: list[str] = []
        differing = self._other_layers()
        for region in regions:
            label = f"{region.fqn} ({region.part})"
            entry = self._table.get((region.fqn, region.part))
            if entry is None:
                missing.append(label)
                continue
            wanted = self._session.live.logical_shape(region)
            if (entry.dtype, entry.shape) != (region.dtype, wanted):
                differing.append(
                    f"{label}: checkpoint {entry.dtype} {list(entry.shape)}, "
                    f"model {region.dtype} {list(wanted)}"
                )
            elif uncovered(region.box, entry.boxes):
                missing.append(f"{label}: parts of it")
            self._targets.setdefault((region.fqn, region.part), []).append(
                _Target(region, _nothing)
            )
        here = {key for key in self._table if key in self._targets}
        told = gather_values(
            self._session.group,
            (missing, differing, sorted(here)),
            tuple[list[str], list[str], list[tuple[str, str]]],
        )
        known = {key for _, _, keys in told for key in keys}
        names = {fqn for fqn, part in self._table if part in ("weight", "buffer")}
        unexpected = sorted(names - {fqn for fqn, _ in known})
        all_missing = sorted({text for texts, _, _ in told for text in texts})
        all_differing = sorted({text for _, texts, _ in told for text in texts})
        if all_differing or (strict and (all_missing or unexpected)):
            raise MismatchError(
                _tell_mismatch(self._plan.version, all_missing, unexpected, all_differing),
                missing=tuple(all_missing),
                unexpected=tuple(unexpected),
                differing=tuple(all_differing),
            )
        return all_missing, unexpected

    def _other_layers(self) -> list[str]:
        """MoE layers are compared even without ``strict``: experts are counted by them."""
        head, here = self._plan.head, self._session.live.experts
        saved = dict(zip(head.layers, map(len, head.routed), strict=True))
        now = dict(zip(here.layers, here.experts, strict=True))
        return [
            f"MoE layer {name}: {saved.get(name, 'no')} experts in the checkpoint, "
            f"{now.get(name, 'none')} in the model"
            for name in {**saved, **now}
            if saved.get(name) != now.get(name)
        ]

    def load(self, *, strict: bool) -> _Bad:
        """Read, verify and copy everything this rank wants. Collective.

        Returns:
            Places whose bytes were bad or gone, on any rank, with a line about each.

        Raises:
            MismatchError: optimizers or extras differ; nothing was touched by this call.
        """
        bad = self._fetch([f for f in self._fetches if f.piece.part == EXTRA])
        if bad:
            return bad
        agree(self._session.group, lambda: self._check_small(strict=strict))
        self._adopt_optimizer_state()
        return self._fetch(
            [f for f in self._fetches if f.piece.part != EXTRA and self._is_wanted(f)]
        )

    def _check_small(self, *, strict: bool) -> None:
        if OPTIMIZER_GROUPS in self._extras:
            match_groups(self._session.live, decode(self._extras[OPTIMIZER_GROUPS]))
        if EXTRAS in self._extras and strict:
            self._session.extras.check(self._extras[EXTRAS])

    def _fetch(self, wanted: Sequence[Fetch]) -> _Bad:
        chosen = [(f, self._source(f)) for f in wanted]
        bad: list[tuple[tuple[int, str, int], str]] = []
        with ExitStack() as stack:
            views: dict[str, memoryview] = {}
            local = [(f, s) for f, s in chosen if s.node in (STORAGE, self._session.node)]
            for fetch, source in sorted(local, key=lambda item: item[1]):
                try:
                    data = self._read(fetch, source, views, stack)
                except (DamagedError, StoreError, OSError) as error:
                    bad.append((source.place, _tell_bad(fetch, source, error)))
                    continue
                self._fill(fetch, data)
                self._count(fetch, source)
                del data
            remote = [(f, s) for f, s in chosen if s.node not in (STORAGE, self._session.node)]
            bad += self._exchange(remote, views, stack)
            views.clear()
        return [item for told in gather_values(self._session.group, bad, _Bad) for item in told]

    def finish(self, *, strict: bool) -> None:
        """After every byte has arrived: Python numbers, stale moments, groups, extras."""
        session = self._session
        for targets in self._targets.values():
            for target in targets:
                target.finish()
        for owned, steps in self._steps:
            entry = owned.entry
            assert entry is not None
            versions = self._plan.versions[entry.layer]
            stale = {
                entry.first + row: float(steps[row])
                for row in range(entry.count)
                if versions[entry.first + row] < self._plan.version
            }
            session.live.rescale(owned, stale)
        if OPTIMIZER_GROUPS in self._extras:
            restore_groups(session.live, decode(self._extras[OPTIMIZER_GROUPS]))
        routed = self._plan.head.routed
        width = max(map(len, routed), default=0)
        total = torch.zeros((len(routed), width), dtype=torch.int64)
        if session.rank == 0:  # the total is a sum over ranks; one of them carries the past
            for layer, row in enumerate(routed):
                total[layer, : len(row)] = torch.tensor(row, dtype=torch.int64)
        session.tokens.load(total)
        if EXTRAS in self._extras:
            session.extras.restore(self._extras[EXTRAS], strict=strict)

    def _adopt_optimizer_state(self) -> None:
        parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for (fqn, part), entry in self._table.items():
            if part not in ("weight", "buffer", EXTRA, STEP_OF_EXPERT):
                parts.setdefault(fqn, {})[part] = (entry.dtype, entry.shape)
        live = self._session.live
        self._steps = []
        self.entries = 0
        for owned in live.owned():
            name = live.global_name(owned.fqn)
            for region, finish in live.adopt(owned, parts.get(name, {})):
                self._targets[region.fqn, region.part] = [_Target(region, finish)]
                self.entries += 1
            if (name, STEP_OF_EXPERT) in self._table and owned.entry is not None:
                steps = torch.zeros(owned.entry.count)
                box = Box((owned.entry.first,), (owned.entry.count,))
                self._steps.append((owned, steps))
                self._targets[name, STEP_OF_EXPERT] = [
                    _Target(
                        Region(
                            fqn=name,
                            part=STEP_OF_EXPERT,
                            box=box,
                            dtype="F32",
                            tensor=Always(steps),
                            overlapped=False,
                        ),
                        _nothing,
                    )
                ]

    def _is_wanted(self, fetch: Fetch) -> bool:
        piece = fetch.piece
        return any(
            piece.box.numel == 0 or target.region.box.intersect(piece.box) is not None
            for target in self._targets.get((piece.fqn, piece.part), ())
        )

    def _source(self, fetch: Fetch) -> Source:
        """Own memory, then the store, then another node's memory."""
        rank = {self._session.node: 0, STORAGE: 1}
        return min(fetch.sources, key=lambda s: (rank.get(s.node, 2), s))

    def _read(
        self, fetch: Fetch, source: Source, views: dict[str, memoryview], stack: ExitStack
    ) -> memoryview | bytearray:
        nbytes = fetch.piece.nbytes
        data: memoryview | bytearray
        if source.node == STORAGE:
            data = bytearray(self._session.store.get(source.file, source.offset, nbytes))
        else:
            if source.file not in views:
                folder = run_memory(self._session.memory_dir, self._session.run_id)
                views[source.file] = stack.enter_context(shared_buffer(str(folder / source.file)))
            data = views[source.file][source.offset : source.offset + nbytes]
        if len(data) != nbytes:
            raise DamagedError(f"{len(data)} bytes instead of {nbytes}")
        if source.digest and digest_bytes(memoryview(data)) != source.digest:
            raise DamagedError("the digest differs")
        return data

    def _exchange(
        self,
        remote: Sequence[tuple[Fetch, Source]],
        views: dict[str, memoryview],
        stack: ExitStack,
    ) -> list[tuple[tuple[int, str, int], str]]:
        """Pieces that only another node's memory holds: its lister reads, all ranks hear."""
        session = self._session
        index = {f.piece.name: i for i, f in enumerate(self._plan.fetches)}
        mine = [(index[f.piece.name], s) for f, s in remote]
        told = gather_values(session.group, mine, list[tuple[int, Source]])
        asked = sorted({item for items in told for item in items})
        wanted = {i for i, _ in mine}
        bad = []
        for i, source in asked:
            fetch = self._plan.fetches[i]
            reader = session.nodes.index(source.node)
            data: bytes | None = None
            if session.rank == reader:
                try:
                    data = bytes(self._read(fetch, source, views, stack))
                except (DamagedError, OSError) as error:
                    bad.append((source.place, _tell_bad(fetch, source, error)))
                    data = b""
            data = session.group.broadcast(data, src=reader)
            if i in wanted and len(data) == fetch.piece.nbytes:
                self._fill(fetch, bytearray(data))
                self._count(fetch, source)
        return bad

    def _fill(self, fetch: Fetch, data: memoryview | bytearray) -> None:
        piece = fetch.piece
        if piece.part == EXTRA:
            self._extras[piece.fqn] = bytearray(data)
            return
        source = over(data, 0, piece.dtype, piece.box.sizes)
        with torch.no_grad():
            for target in self._targets[piece.fqn, piece.part]:
                common = target.region.box.intersect(piece.box) if piece.box.sizes else piece.box
                if common is None:
                    continue
                values = source[common.within(piece.box)] if piece.box.sizes else source
                target.region.view(common).copy_(values)

    def _count(self, fetch: Fetch, source: Source) -> None:
        kind = "experts" if fetch.piece.is_expert else "dense"
        place = {STORAGE: "storage", self._session.node: "memory"}.get(source.node, "peer")
        older = "_older" if fetch.version < self._plan.version else ""
        self.nbytes[kind][place + older] += fetch.piece.nbytes


class _Logical(msgspec.Struct):
    """A logical tensor in the checkpoint."""

    dtype: str
    boxes: list[Box]
    shape: tuple[int, ...] = ()


_Bad = list[tuple[tuple[int, str, int], str]]


def _by_tensor(fetches: Sequence[Fetch]) -> dict[tuple[str, str], _Logical]:
    table: dict[tuple[str, str], _Logical] = {}
    for fetch in fetches:
        piece = fetch.piece
        entry = table.setdefault((piece.fqn, piece.part), _Logical(piece.dtype, []))
        entry.boxes.append(piece.box)
    for entry in table.values():
        entry.shape = bounding_shape(entry.boxes)
    return table


def _nothing() -> None:
    """Nothing is left to do."""


# ---------------------------------------------------------------------- attempt, report


def _start_attempt(
    session: Session,
    timeline: Timeline,
    resumed_step: int,
    sources: dict[str, int],
    lost: list[list[int]],
) -> None:
    """Put the attempt's record: from here on this attempt owns the run. Collective."""
    experts = session.experts_per_layer
    record = AttemptRecord(
        attempt=timeline.head + 1,
        parent=timeline.head,
        resumed_step=resumed_step,
        world_size=session.group.world_size,
        k_snapshot=session.most_experts(0),
        k_persist=session.most_experts(1),
        sources=sources,
        lost=lost,
        host=host_name(),
        pid=os.getpid(),
        time=knobs.now_utc(),
    )

    def put() -> AttemptRecord:
        if session.rank == 0:
            try:
                put_attempt(session.store, record)
            except KeyExists:
                raise RunBusy(
                    f"another job has started attempt {record.attempt} in {session.store.url} "
                    "while this one was restoring; one directory serves one job at a time"
                ) from None
        return record

    agree(session.group, put)
    told = session.group.broadcast(msgspec.msgpack.encode(record) if session.rank == 0 else None)
    started = msgspec.msgpack.decode(told, type=AttemptRecord)
    session.timeline = Timeline.of([*timeline.attempts, started])
    session.attempt, session.resumed_step = started.attempt, resumed_step
    if not session.lost:
        session.lost = [[0] * n for n in experts]
    if _is_lister(session):
        folder = run_memory(session.memory_dir, session.run_id)
        remove_dead(folder, session.timeline)
        remove_forgotten(session.memory_dir, session.run_id, knobs.now_secs() - _FORGOTTEN_SECS)


def _is_lister(session: Session) -> bool:
    return session.nodes.index(session.node) == session.rank


def _sum_over_ranks(session: Session, loader: _Loader) -> tuple[dict[str, dict[str, int]], int]:
    told = gather_values(
        session.group, (loader.nbytes, loader.entries), tuple[dict[str, dict[str, int]], int]
    )
    summed = {
        kind: {name: sum(nbytes[kind][name] for nbytes, _ in told) for name in SOURCES}
        for kind in loader.nbytes
    }
    return summed, sum(entries for _, entries in told)


def _report(
    session: Session,
    plan: RecoveryPlan,
    by_class: dict[str, dict[str, int]],
    sources: dict[str, int],
    entries: int,
    names: tuple[list[str], list[str]],
    times: tuple[float, float, float],
) -> RestoreReport:
    step = plan.version.step
    planned = planned_routed(plan.head.routed, step, session.policy.total_steps)
    faults = [a.lost for a in session.timeline.live_attempts() if a.lost]
    ages = [step - v.step for row in plan.versions for v in row]
    began, inventoried, loaded = times
    return RestoreReport(
        step=step,
        attempt=session.attempt,
        restored_attempt=plan.version.attempt,
        sources=sources,
        by_class=by_class,
        oldest_expert_age=max(ages, default=0),
        stale_experts=sum(v < plan.version for row in plan.versions for v in row),
        lost_tokens=sum(map(sum, plan.fault_lost)),
        plt=plt(faults, planned),
        plt_unique=plt_unique(plan.lost, planned),
        plt_is_estimate=True,
        secs={
            "inventory": inventoried - began,
            "load": loaded - inventoried,
            "total": knobs.monotonic() - began,
        },
        optimizer_entries=entries,
        missing=names[0],
        unexpected=names[1],
        reasons=list(plan.reasons),
    )


def _once_per_file(bad: _Bad) -> list[str]:
    """A line for every file with bad or missing pieces: one lost file holds hundreds."""
    by_file: dict[tuple[int, str], list[str]] = {}
    for (node, file, _), text in sorted(bad):
        by_file.setdefault((node, file), []).append(text)
    return [
        texts[0] + (f" (and {len(texts) - 1} more pieces of it)" if len(texts) > 1 else "")
        for texts in by_file.values()
    ]


def _tell_bad(fetch: Fetch, source: Source, error: Exception) -> str:
    where = "the store" if source.node == STORAGE else f"the memory of node {source.node}"
    return f"{fetch.piece.name} in {source.file} ({where}) cannot be used: {error}"


def _tell_mismatch(
    version: Version, missing: Sequence[str], unexpected: Sequence[str], differing: Sequence[str]
) -> str:
    lines = [f"step {version} is of another model, or does not fit this one; nothing was changed"]
    for title, names in (
        ("missing in the checkpoint", missing),
        ("unexpected in the checkpoint", unexpected),
        ("different", differing),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{title} ({len(names)}): {', '.join(names[:_SHOWN])}{more}")
    return "; ".join(lines)
