"""A restore, from the question "what is left?" to a new attempt.

The phases, in order: identify the run, let orphaned helpers finish, take the inventory, plan,
check that the plan fits this model, load and verify, start the attempt. Every rank computes the
same plan from the same gathered facts; all checks that can be made come before the first live
byte is touched.
"""

from __future__ import annotations

import os

import msgspec

from moc import knobs
from moc.comm.group import agree, gather_values
from moc.core.manifest import attempt_key, encode_json
from moc.core.piece import parts_of_all
from moc.core.tokens import planned_routed, plt, plt_unique
from moc.core.versions import AttemptRecord, Timeline
from moc.engine.inventory import identify, list_memory, read_store, settle_orphans
from moc.engine.load import Loader, Wanted, once_per_file
from moc.engine.nodes import find_files, gather_control, keep_copy
from moc.engine.report import SOURCES, RestoreReport
from moc.engine.session import Session, host_name
from moc.errors import KeyExists, NothingValid, RanksDisagree, RestoreError, RunBusy, StoreError
from moc.persist.commit import put_attempt
from moc.persist.survey import runs_below
from moc.recover.ladder import STORAGE, Inventory, RecoveryPlan, climb
from moc.snapshot.buffers import remove_dead, remove_forgotten, run_memory

__all__ = ["restore", "start_fresh"]

_FORGOTTEN_SECS = 24 * 3600.0  # other runs' buffers that are older and unlocked are removed
_SHOWN = 8


def restore(session: Session, asked_step: int | None, wanted: Wanted) -> RestoreReport | None:
    """Restore and start the attempt; see `CheckpointManager.restore`. Collective."""
    began = knobs.monotonic()
    session.weights_only = wanted.weights_only
    gather_control(session)
    identify(session, write=False)
    if not session.is_read_only:
        settle_orphans(session)
    facts = read_store(session)
    seals = list_memory(session)
    why, lost_files = find_files(session, facts.manifests, facts.timeline)
    inventory = Inventory(
        timeline=facts.timeline,
        seals=seals,
        manifests=tuple(facts.manifests),
        problems=tuple(facts.problems),
        struck=frozenset(why),
        why=why,
    )
    nothing = not facts.manifests and not any(facts.timeline.is_live(s.version) for _, s in seals)
    if nothing and asked_step is None and not facts.problems:
        _tell_of_runs_below(session)
        if not wanted.weights_only:
            identify(session, write=True)
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
        loader = Loader(session, plan, wanted)
        missing, unexpected = loader.check()
        try:
            bad = loader.load()
        except StoreError as error:
            raise RestoreError(f"restore of step {plan.version} failed: {error}") from error
        if not bad:
            break
        inventory = msgspec.structs.replace(
            inventory,
            struck=inventory.struck | {place for place, _ in bad},
            why={**inventory.why, **dict(bad)},
        )
        for text in once_per_file(bad) if session.rank == 0 else ():
            session.note("warning", plan.version.step, text=text)
        try:
            plan = climb(inventory, asked_step)
        except RestoreError as error:
            raise type(error)(
                f"{error}; the model's contents are undefined now, start from a new process"
            ) from error
        _compare_plans(session, plan)
    loader.finish()
    loaded = knobs.monotonic()
    by_class, entries, slowest = _sum_over_ranks(session, loader, loaded - inventoried)
    sources = {name: sum(c[name] for c in by_class.values()) for name in SOURCES}
    session.unsound = sorted({file for node, file, _ in inventory.struck if node == STORAGE})
    if not wanted.weights_only:
        is_same = not missing and not unexpected
        inherits = not loader.is_other_kind and not lost_files
        _go_on(session, facts.timeline, plan, sources, is_same=is_same, inherits=inherits)
    return _report(
        session,
        plan,
        by_class,
        sources,
        entries,
        (missing, unexpected),
        (began, inventoried, loaded),
        slowest,
    )


def _tell_of_runs_below(session: Session) -> None:
    """Starting from scratch in the wrong folder would cost a run and say nothing."""
    if session.rank != 0 or session.run_id:
        return
    store = session.store
    found = runs_below(store, store.children())
    if found:
        meant = " or ".join(found[:3])
        text = f"no run in {store.url}: training starts anew; did you mean {meant}?"
        session.note("warning", 0, text=text)


def start_fresh(session: Session, *, force: bool) -> None:
    """Start an attempt at step 0. Collective.

    Raises:
        RestoreError: the run has live versions and ``force`` is not set.
    """
    gather_control(session)
    identify(session, write=True)
    settle_orphans(session)
    facts = read_store(session)
    seals = list_memory(session)
    live = {s.version.step for _, s in seals if facts.timeline.is_live(s.version)}
    live |= {m.version.step for m in facts.manifests}
    if live and not force:
        raise RestoreError(
            f"{session.store.url} has steps {sorted(live)[-_SHOWN:]}; call manager.restore() "
            "before the first save, or give fresh=True to start over beside them"
        )
    _start_attempt(session, facts.timeline, 0, {}, [])


def _go_on(
    session: Session,
    timeline: Timeline,
    plan: RecoveryPlan,
    sources: dict[str, int],
    *,
    is_same: bool,
    inherits: bool,
) -> None:
    """What was restored becomes what this attempt starts from. Collective."""
    if not inherits:  # from an older step, experts that are of another dtype there, or lost
        plan = msgspec.structs.replace(plan, base=None, base_versions=[])
    if is_same:
        session.model_id = session.run_model  # but for how ranks share it
    session.base, session.base_versions = plan.base, plan.base_versions
    session.base_parts = parts_of_all(f.piece for f in plan.fetches)
    session.lost, session.restored = plan.lost, plan.version
    session.routed = plan.head.routed
    if not session.is_foreign:
        _start_attempt(session, timeline, plan.version.step, sources, plan.fault_lost)


def _compare_plans(session: Session, plan: RecoveryPlan) -> None:
    told = gather_values(session.group, plan.digest, int)
    if len(set(told)) > 1:
        raise RanksDisagree(f"ranks computed different recovery plans: {told}")


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
        places=session.places,
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
    keep_copy(session, attempt_key(started.attempt), encode_json(started))
    session.timeline = Timeline.of([*timeline.attempts, started])
    session.attempt, session.resumed_step = started.attempt, resumed_step
    if not session.lost:
        session.lost = [[0] * n for n in experts]
    is_tidier = session.is_lister if session.node_local else session.rank == 0
    if is_tidier:  # no helper of this attempt has begun, and those of others are fenced
        try:
            session.store.tidy()
        except (StoreError, OSError) as error:
            session.note("warning", resumed_step, text=f"leftovers stay in the store: {error}")
    if session.is_lister:
        folder = run_memory(session.memory_dir, session.run_id)
        remove_dead(folder, session.timeline)
        remove_forgotten(session.memory_dir, session.run_id, knobs.now_secs() - _FORGOTTEN_SECS)


def _sum_over_ranks(
    session: Session, loader: Loader, secs: float
) -> tuple[dict[str, dict[str, int]], int, tuple[int, float]]:
    """Bytes by class and source, optimizer entries, and the slowest rank with its seconds."""
    told = gather_values(
        session.group,
        (loader.nbytes, loader.entries, secs),
        tuple[dict[str, dict[str, int]], int, float],
    )
    summed = {
        kind: {name: sum(nbytes[kind][name] for nbytes, *_ in told) for name in SOURCES}
        for kind in loader.nbytes
    }
    took = [secs for *_, secs in told]
    slowest = max(took)
    return summed, sum(entries for _, entries, _ in told), (took.index(slowest), slowest)


def _report(
    session: Session,
    plan: RecoveryPlan,
    by_class: dict[str, dict[str, int]],
    sources: dict[str, int],
    entries: int,
    names: tuple[list[str], list[str]],
    times: tuple[float, float, float],
    slowest: tuple[int, float],
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
        slowest_rank=slowest[0],
        slowest_secs=slowest[1],
        uncounted=[
            name
            for name, routed in zip(plan.head.layers, plan.head.routed, strict=True)
            if not any(routed)
        ],
        optimizer_entries=entries,
        missing=names[0],
        unexpected=names[1],
        reasons=list(plan.reasons),
        weights_only=session.weights_only,
    )
