"""Receipts to manifest: the coordinator's half, and what any later attempt can finish."""

from __future__ import annotations

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
    "plan_sweep",
    "prune",
    "put_attempt",
    "roll_forward",
    "versions_in",
]


def load_timeline(store: Store) -> Timeline:
    """All attempts of a run."""
    keys = [key for key in store.list("attempts") if parse_attempt_key(key) is not None]
    return Timeline.of([decode_json(store.get(key), AttemptRecord, key) for key in keys])


def put_attempt(store: Store, record: AttemptRecord) -> None:
    """Write an attempt's record.

    Raises:
        KeyExists: another job took the number.
    """
    store.put_new(attempt_key(record.attempt), [encode_json(record)])


def versions_in(store: Store) -> list[Version]:
    """Versions that have a folder, committed or not; names that merely look alike are skipped."""
    found = (parse_step_dir(name) for name in store.children())
    return sorted(v for v in found if v is not None)


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


def missing_receipts(store: Store, version: Version, world_size: int) -> list[int]:
    """Ranks whose receipts are not there yet."""
    names = set(store.children(step_dir(version)))
    return [r for r in range(world_size) if receipt_key(version, r).rpartition("/")[2] not in names]


def commit(store: Store, version: Version) -> Manifest | None:
    """Make a step exist, if all of its receipts are there. Safe to repeat.

    Returns:
        The manifest, or None where receipts are missing.
    """
    if missing_receipts(store, version, 1):
        return None
    first = decode_json(store.get(receipt_key(version, 0)), Receipt, receipt_key(version, 0))
    if missing_receipts(store, version, first.world_size):
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
    for version in versions_in(store):
        if not timeline.is_live(version) or store.exists(manifest_key(version)):
            continue
        try:
            if commit(store, version) is not None:
                done.append(version)
        except (DamagedError, KeyMissing) as error:
            problems.append(f"step {version} cannot be committed: {error}")
    return done, problems


def plan_sweep(
    store: Store, timeline: Timeline, keep_latest_k: int | None, keep_every: int | None
) -> Sweep:
    """What retention would remove now."""
    facts, protect = [], []
    for version in versions_in(store):
        try:
            manifest = load_manifest(store, version)
        except KeyMissing:
            continue
        except DamagedError:
            protect.append(version)  # evidence; `moc verify` names it
            continue
        facts.append(ManifestFacts(version, frozenset(f.key for f in manifest.files)))
    keys = [key for v in versions_in(store) for key in store.list(step_dir(v))]
    return sweep(facts, keys, timeline, keep_latest_k, keep_every, protect)


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
