"""A node's copies of the coordinator's keys, and its own data files that nobody needs.

All of these keys are written once, so copies of them never disagree, and what the nodes hold
together only grows: a lost coordinator costs no committed step that another node has heard of.
"""

from __future__ import annotations

from contextlib import suppress

from moc.core.manifest import (
    attempt_key,
    is_data_key,
    manifest_key,
    parse_step_dir,
)
from moc.core.versions import Timeline, Version
from moc.errors import DamagedError, KeyExists, KeyMissing
from moc.persist.commit import load_manifest, load_timeline
from moc.store.base import Store

__all__ = ["copy_manifests", "is_copied", "manifests_in", "sweep_node"]


def manifests_in(keys: list[str]) -> list[Version]:
    """Versions whose manifests are among the keys, oldest first."""
    found = (parse_step_dir(key.partition("/")[0]) for key in keys)
    named = {v for v in found if v is not None}
    return sorted(named.intersection(v for v in named if manifest_key(v) in set(keys)))


def is_copied(local: Store, control: Store, version: Version) -> bool:
    """Copy a step's manifest if there is one by now."""
    key = manifest_key(version)
    with suppress(KeyMissing):
        _put(local, key, control.get(key))
        return True
    return False


def copy_manifests(local: Store, control: Store) -> tuple[list[Version], Timeline]:
    """Bring a node's copies up to date; what the coordinator has retired goes here, too.

    Returns:
        The committed steps, and the attempts.
    """
    listed = control.list()
    there, here = manifests_in(listed), manifests_in(local.list())
    for version in there:
        if version not in here:
            is_copied(local, control, version)
    timeline = load_timeline(control)
    for record in timeline.attempts:
        key = attempt_key(record.attempt)
        if not local.exists(key):
            _put(local, key, control.get(key))
    newest = max(filter(timeline.is_live, there), default=None)
    for version in here:
        # Only below a newer one: a coordinator that has lost its disk retires nothing.
        if version not in there and newest is not None and version < newest:
            local.delete(manifest_key(version))
    return there, timeline


def sweep_node(local: Store, versions: list[Version], timeline: Timeline) -> list[str]:
    """Delete this node's data files that no committed step names. Newer ones are being written.

    Args:
        local: this node's folder, with copies of the manifests.
        versions: the committed steps.
        timeline: the attempts.

    Returns:
        The keys that are gone.
    """
    newest = max(filter(timeline.is_live, versions), default=None)
    if newest is None:
        return []
    try:
        named = {f.key for v in versions for f in load_manifest(local, v).files}
    except (DamagedError, KeyMissing):
        return []  # retired meanwhile, or evidence: the next sweep knows more
    gone = []
    for key in local.list():
        version = parse_step_dir(key.partition("/")[0])
        if version is None or not is_data_key(key) or key in named:
            continue
        is_over = version < newest or not timeline.is_live(version)
        if is_over and version.attempt <= timeline.head:
            local.delete(key)
            gone.append(key)
    return gone


def _put(local: Store, key: str, data: bytes) -> None:
    with suppress(KeyExists):
        local.put_new(key, [data])
