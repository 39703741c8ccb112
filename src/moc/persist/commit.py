"""Receipts to manifest: the coordinator's half, and what any later attempt can finish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from moc import knobs
from moc.choose.retention import ManifestFacts, Sweep, sweep
from moc.core.manifest import (
    Manifest,
    Receipt,
    assemble,
    attempt_key,
    decode_json,
    encode_json,
    manifest_key,
    parse_attempt_key,
    parse_step_dir,
    receipt_key,
    step_dir,
)
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import DamagedError, KeyExists, KeyMissing, StoreError
from moc.store.base import Store

__all__ = [
    "commit",
    "load_manifest",
    "load_timeline",
    "missing_receipts",
    "named_files",
    "plan_sweep",
    "prune",
    "put_attempt",
    "roll_forward",
    "unfinished_bases",
    "versions_in",
]


def load_timeline(store: Store, known: Timeline | None = None) -> Timeline:
    """All attempts of a run.

    Their keys are consecutive numbers, so a listing that lags hides none: what comes after the
    newest that is known or listed is asked for by its key.

    Args:
        store: of the run.
        known: what was loaded before, and is not read again; saves the listing as well.
    """
    records = {a.attempt: a for a in known.attempts} if known else {}
    listed = [] if records else [parse_attempt_key(key) for key in store.list("attempts")]
    newest = max([n for n in listed if n is not None] + [*records], default=0)
    number = 1
    while True:
        if number not in records:
            key = attempt_key(number)
            try:
                records[number] = decode_json(store.get(key), AttemptRecord, key)
            except KeyMissing:  # somebody may have deleted an old one
                if number > newest:
                    return Timeline.of([*records.values()])
        number += 1


def put_attempt(store: Store, record: AttemptRecord) -> None:
    """Write an attempt's record.

    Raises:
        KeyExists: another job took the number.
    """
    store.put_new(attempt_key(record.attempt), [encode_json(record)])


def versions_in(store: Store, timeline: Timeline | None = None) -> list[Version]:
    """Versions that have a folder, committed or not; names that merely look alike are skipped.

    A listing may lag. So with a timeline, the live version that ``latest`` speaks of is looked for
    by its key, and so is what it builds on. The hint decides nothing: what it names counts if the
    manifest exists.
    """
    listed = {v for v in map(parse_step_dir, store.children()) if v is not None}
    if timeline is None:
        return sorted(listed)
    step = _hint(store)
    hinted = [] if step is None else [Version(step, a.attempt) for a in timeline.attempts]
    live = [v for v in hinted if timeline.is_live(v)]
    # One of them is committed at most; the listed one, as nearly always, is it.
    unlisted = [] if listed.intersection(live) else live
    found: set[Version] = set()
    while unlisted:
        version = unlisted.pop()
        if version in listed or version in found:
            continue
        try:
            base = load_manifest(store, version).head.base
        except KeyMissing:
            continue
        except DamagedError:
            base = None
        found.add(version)
        unlisted += [base] if base else []
    return sorted(listed | found)


def _hint(store: Store) -> int | None:
    """The step that ``latest`` names; None where it is missing or anything else stands there."""
    try:
        text = store.get("latest")
    except KeyMissing:
        return None
    return int(text) if text.strip().isdigit() else None


def load_manifest(store: Store, version: Version) -> Manifest:
    """The manifest of a version.

    Raises:
        KeyMissing: the step was never committed.
        DamagedError: the manifest is damaged, or names another version than its folder.
    """
    key = manifest_key(version)
    manifest = decode_json(store.get(key), Manifest, key)
    if manifest.version != version:
        raise DamagedError(f"{key} is the manifest of step {manifest.version}")
    return manifest


def missing_receipts(store: Store, version: Version, world_size: int) -> Iterator[int]:
    """Ranks whose receipts are not there yet, in order; what a listing lacks is looked for."""
    names = set(store.children(step_dir(version)))
    for rank in range(world_size):
        key = receipt_key(version, rank)
        if key.rpartition("/")[2] not in names and not store.exists(key):
            yield rank


def commit(store: Store, version: Version) -> Manifest | None:
    """Make a step exist, if all of its receipts are there. Safe to repeat.

    Returns:
        The manifest, or None where receipts are missing.
    """
    try:
        first = decode_json(store.get(receipt_key(version, 0)), Receipt, receipt_key(version, 0))
    except KeyMissing:
        return None
    if any(True for _ in missing_receipts(store, version, first.world_size)):
        return None
    keys = [receipt_key(version, rank) for rank in range(first.world_size)]
    receipts = [decode_json(store.get(key), Receipt, key) for key in keys]
    base_version = first.head.base if first.head else None
    base = load_manifest(store, base_version) if base_version else None
    manifest = assemble(receipts, base, knobs.now_utc())
    try:
        store.put_new(manifest_key(version), [encode_json(manifest)])
    except KeyExists:
        return load_manifest(store, version)
    return manifest


def roll_forward(store: Store, timeline: Timeline) -> tuple[list[Version], list[str]]:
    """Finish commits of live versions whose receipts are all there.

    Returns:
        Versions that now exist, and one line for every commit that could not be finished.
    """
    done, problems = [], []
    for version in versions_in(store, timeline):
        if not timeline.is_live(version) or store.exists(manifest_key(version)):
            continue
        try:
            if commit(store, version) is not None:
                done.append(version)
        except (DamagedError, KeyMissing) as error:
            problems.append(f"step {version} cannot be committed: {error}")
    return done, problems


def plan_sweep(
    store: Store,
    timeline: Timeline,
    keep_latest_k: int | None,
    keep_every: int | None,
    protected: Sequence[Version] = (),
    *,
    node_local: bool = False,
) -> Sweep:
    """What retention would remove now.

    With node-local disks, files that this node does not have count as there: each node answers
    for its own.

    A listing may lack a step. A step needs its own files, which are then not listed either, and
    files that the one it builds on needs as well: so the newest may be missing here, and any
    other is found by what builds on it.
    """
    facts, protect = [], list(protected)
    todo = versions_in(store, timeline)
    seen = set(todo)
    while todo:
        version = todo.pop()
        try:
            manifest = load_manifest(store, version)
        except KeyMissing:
            continue
        except DamagedError:
            protect.append(version)  # evidence; `moc verify` names it
            continue
        facts.append(ManifestFacts(version, frozenset(f.key for f in manifest.files)))
        base = manifest.head.base
        if base is not None and base not in seen:
            seen.add(base)
            todo.append(base)
    keys = [key for key in store.list() if parse_step_dir(key.partition("/")[0]) is not None]
    if not node_local:
        return sweep(facts, keys, timeline, keep_latest_k, keep_every, protect)
    elsewhere = {key for fact in facts for key in fact.files}.difference(keys)
    plan = sweep(facts, [*keys, *elsewhere], timeline, keep_latest_k, keep_every, protect)
    return Sweep(plan.keep, plan.retire, tuple(k for k in plan.delete if k not in elsewhere))


def named_files(store: Store, versions: Sequence[Version]) -> dict[str, list[Version]]:
    """Which of these steps name a file, by key; a damaged manifest names none."""
    named: dict[str, list[Version]] = {}
    for version in versions:
        with suppress(DamagedError, KeyMissing):
            for file in load_manifest(store, version).files:
                named.setdefault(file.key, []).append(version)
    return named


def unfinished_bases(store: Store, timeline: Timeline) -> list[Version]:
    """Steps that live, uncommitted saves build on, as far as rank 0's receipts tell."""
    bases = []
    for version in filter(timeline.is_live, versions_in(store)):
        if store.exists(manifest_key(version)):
            continue
        with suppress(DamagedError, KeyMissing):
            key = receipt_key(version, 0)
            head = decode_json(store.get(key), Receipt, key).head
            if head is not None and head.base is not None:
                bases.append(head.base)
    return bases


def prune(store: Store, plan: Sweep) -> list[str]:
    """Carry a sweep out: manifests first, so that no step ever exists without its files.

    Returns:
        One line for every key that could not be deleted.
    """
    problems = []
    for key in [*(manifest_key(v) for v in plan.retire), *plan.delete]:
        try:
            store.delete(key)
        except (StoreError, OSError) as error:
            problems.append(f"could not delete {key}: {error}")
            if key.endswith("/manifest.json"):
                return problems
    return problems
