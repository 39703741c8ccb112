"""What is left after a fault: the run, its orphaned helpers, commits, and every node's memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import msgspec

from moc import knobs
from moc.comm.group import agree, gather_values
from moc.core.manifest import Manifest, RunInfo, Seal, encode_json
from moc.core.versions import Timeline, Version
from moc.engine.nodes import check_directory, keep_copy
from moc.engine.session import Session, host_name
from moc.errors import ConfigError, DamagedError, KeyExists, KeyMissing, NewerFormat, RunBusy
from moc.persist.client import orphans, stop
from moc.persist.commit import load_manifest, load_timeline, roll_forward, versions_in
from moc.persist.residents import live_trainers, start_time
from moc.persist.survey import RUN_KEY, find_run, read_run
from moc.snapshot.buffers import lock_holders, read_seals, run_memory

__all__ = ["StoreFacts", "identify", "list_memory", "read_store", "settle_orphans"]

_KILL_SECS = 5.0
_POLL_SECS = 0.02
_LEAVE_SECS = 2.0


class StoreFacts(msgspec.Struct):
    """What rank 0 found in the store."""

    timeline: Timeline = Timeline()
    manifests: list[Manifest] = []
    problems: list[str] = []


class _Held(msgspec.Struct):
    """What one rank found in its node's memory."""

    node: int
    seals: list[Seal]


def identify(session: Session, *, write: bool) -> None:
    """Rank 0 reads, or with ``write`` makes, the identity of the run; all ranks learn it."""

    def look() -> tuple[RunInfo | None, bool]:
        return _read_identity(session, write) if session.rank == 0 else (None, False)

    mine = agree(session.group, look)
    told = session.group.broadcast(msgspec.msgpack.encode(mine))
    run, made = msgspec.msgpack.decode(told, type=tuple[RunInfo | None, bool])
    if run is None:
        session.run_id = session.run_model = ""
        return
    session.run_id, session.run_model = run.run_id, run.model
    check_directory(session, made)
    if made:
        keep_copy(session, RUN_KEY, encode_json(run))


def _read_identity(session: Session, write: bool) -> tuple[RunInfo | None, bool]:
    """The run, if there is one by now, and whether this start has made it."""
    store, made = session.store, False
    run = find_run(store)
    if run is None:
        if not write:
            return None, False
        run = RunInfo(
            run_id=secrets.token_hex(8),
            model=session.model_id,
            created=knobs.now_utc(),
            node_local=session.node_local,
        )
        try:
            store.put_new(RUN_KEY, [encode_json(run)])
            made = True
        except KeyExists:  # another start was faster; the attempt's number decides who goes on
            run = read_run(store)
    if write and run.model != session.model_id:
        raise RunBusy(
            f"{store.url} belongs to another model (fingerprint {run.model}, this one is "
            f"{session.model_id}): parameter names, shapes or experts differ; use another directory"
        )
    if run.node_local and not session.node_local and len(set(session.nodes)) > 1:
        raise ConfigError(
            f"{store.url} has a run whose data files are on the nodes' own disks; give "
            "node_local=True"
        )
    return run, made


def settle_orphans(session: Session) -> None:
    """Let helpers of the attempt before finish what they write, then end them. Collective.

    They may hold complete files whose receipts are on the way; a commit after the step to resume
    from is chosen would come too late. Helpers whose trainer lives belong to another job.

    Raises:
        RunBusy: another job trains in this run on one of the nodes, and is not to be taken over.
    """
    told = gather_values(session.group, (host_name(), os.getpid()), tuple[str, int])
    ours = [pid for host, pid in told if host == host_name()]

    def settle() -> None:
        if session.is_lister and session.run_id:
            _refuse_two(session, ours)
        folder = run_memory(session.memory_dir, session.run_id)
        if not session.is_lister or not folder.is_dir():
            return
        end = knobs.monotonic() + session.policy.grace_secs
        while lock_holders(folder) and knobs.monotonic() < end:
            knobs.sleep(_POLL_SECS)
        spared = (
            {r.pid for r in live_trainers(str(folder), "", ours)} if not session.take_over else ()
        )
        stop([pid for pid in orphans(str(folder)) if pid not in spared], _KILL_SECS)

    agree(session.group, settle)


def _refuse_two(session: Session, ours: Sequence[int]) -> None:
    """Two jobs in one run would overwrite each other's buffers and undo each other's history."""
    if session.take_over:
        return
    folder = str(run_memory(session.memory_dir, session.run_id))
    end = knobs.monotonic() + min(session.policy.grace_secs, _LEAVE_SECS)
    # A manager that has just been left lets its helper finish while its process lives on.
    while others := live_trainers(folder, session.store.url, ours):
        if knobs.monotonic() > end:
            break
        knobs.sleep(_POLL_SECS)
    if not others:
        return
    pids = sorted({other.trainer for other in others})
    began = start_time(pids[0])
    since = f" since {knobs.as_utc(began)}" if began is not None else ""
    more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
    raise RunBusy(
        f"{session.store.url} is being trained by process {pids[0]}{more} on {host_name()}{since}; "
        "one run serves one job at a time: end that one, use another directory, or take the run "
        "over with CheckpointManager(take_over=True), after which its saves fail"
    )


def read_store(session: Session) -> StoreFacts:
    """Rank 0 finishes and lists commits; all ranks learn them, or its error."""

    def look() -> StoreFacts:
        if session.rank != 0 or not session.run_id:
            return StoreFacts()
        store = session.store
        timeline = load_timeline(store)
        problems = [] if session.is_read_only else roll_forward(store, timeline)[1]
        unborn: list[Version] = []
        manifests: list[Manifest] = []
        for version in filter(timeline.is_live, versions_in(store, timeline)):
            try:
                manifests.append(load_manifest(store, version))
            except KeyMissing:
                unborn.append(version)
            except NewerFormat as error:  # not to be gone back behind without a word
                raise NewerFormat(f"{store.url}: {error}") from error
            except DamagedError as error:
                problems.append(str(error))
        # Older folders without a manifest were retired, and hold files that later steps need.
        newest = max((m.version for m in manifests), default=None)
        problems += [
            f"step {v} was never committed" for v in unborn if newest is None or v > newest
        ]
        if not manifests and not any("damaged" in p for p in problems):
            problems = []  # a run that died before its first commit has lost nothing
        return StoreFacts(timeline, manifests, problems)

    mine = agree(session.group, look)
    told = session.group.broadcast(msgspec.msgpack.encode(mine))
    facts = msgspec.msgpack.decode(told, type=StoreFacts)
    session.timeline = facts.timeline
    return facts


def list_memory(session: Session) -> tuple[tuple[int, Seal], ...]:
    """Seals of all nodes; one rank of each node looks.

    None where weights alone are read: a job that trains may be overwriting its buffers.
    """

    def look() -> _Held:
        if not session.is_lister or not session.run_id or session.weights_only:
            return _Held(session.node, [])
        seals = read_seals(run_memory(session.memory_dir, session.run_id))
        return _Held(session.node, [s for s in seals if s.run_id == session.run_id])

    told = gather_values(session.group, agree(session.group, look), _Held)
    return tuple((held.node, seal) for held in told for seal in held.seals)
