"""What is kept and what may be overwritten or deleted, in memory and in storage.

One rule for both tiers: the newest live commits stay, what is being read or written stays, and
whatever holds the newest version of some expert stays as long as it can. In memory the unit is a
buffer, overwritten whole; in storage it is a file, deleted when no kept manifest names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from moc.core.manifest import manifest_key, parse_step_dir
from moc.core.versions import Timeline, Version

__all__ = ["BufferFacts", "ManifestFacts", "Role", "Sweep", "role", "sweep", "victim"]

Role = Literal["SNAPSHOT", "PERSIST", "RECOVERY"]
"""The three states of a buffer in the paper's triple buffer (Figure 9)."""

_SWEPT = re.compile(r"(dense|experts)-\d{5,}[\w.-]*\.safetensors|rank-\d{5,}\.receipt")


class BufferFacts(msgspec.Struct, frozen=True):
    """One buffer of one rank, as far as retention is concerned.

    Attributes:
        index: number of the buffer.
        version: what it holds, None where it is not sealed.
        experts: the (MoE layer, expert) pairs that it holds.
        locked: another process reads or writes it.
    """

    index: int
    version: Version | None
    experts: frozenset[tuple[int, int]] = frozenset()
    locked: bool = False


def role(buffer: BufferFacts, *, commit: Version | None, persisting: Version | None) -> Role:
    """The buffer's role in the paper's triple buffer; computed, never stored.

    Args:
        buffer: which buffer.
        commit: newest live commit.
        persisting: the version whose persist is not resolved yet.
    """
    if buffer.version is not None and buffer.version == persisting:
        return "PERSIST"
    if buffer.version is not None and buffer.version == commit:
        return "RECOVERY"
    return "SNAPSHOT"


def victim(
    buffers: Sequence[BufferFacts],
    *,
    live: Sequence[bool],
    commit: Version | None,
    persisting: Version | None,
    sealed_everywhere: Version | None,
) -> int | None:
    """The buffer that the next snapshot overwrites.

    Never one that is locked, or that holds the newest live commit (RECOVERY), the version being
    persisted (PERSIST), or the newest version that all ranks have sealed. Of the others, in this
    order: one without a live version, the lowest index first; the oldest that holds no expert's
    newest live version; the oldest.

    Args:
        buffers: the buffers of one rank.
        live: for each buffer, whether its version is on the live history.
        commit: newest live commit.
        persisting: the version whose persist is not resolved yet.
        sealed_everywhere: newest version that every rank has sealed.

    Returns:
        Its index, or None where every buffer is protected or locked.
    """
    facts = list(zip(buffers, live, strict=True))
    protected = {commit, persisting, sealed_everywhere} - {None}
    free = [(b, alive) for b, alive in facts if not b.locked and b.version not in protected]
    idle = [b.index for b, alive in free if b.version is None or not alive]
    if idle:
        return min(idle)

    newest: dict[tuple[int, int], Version] = {}
    for b, alive in facts:
        if alive and b.version is not None:
            for expert in b.experts:
                newest[expert] = max(newest.get(expert, b.version), b.version)
    ranked = [
        (any(newest[expert] == b.version for expert in b.experts), b.version, b.index)
        for b, _ in free
        if b.version is not None
    ]
    return min(ranked)[2] if ranked else None


class ManifestFacts(msgspec.Struct, frozen=True):
    """One committed step in storage.

    Attributes:
        version: of the step.
        files: keys of all data files that its manifest names, also those of older steps.
    """

    version: Version
    files: frozenset[str]


class Sweep(msgspec.Struct, frozen=True):
    """What to delete from storage, in this order: the manifests of ``retire``, then ``delete``.

    Attributes:
        keep: committed versions that stay, oldest first.
        retire: committed versions whose manifest goes, oldest first; from then on they do not
            exist, so that a crash in between leaves only files that the next sweep deletes.
        delete: keys of receipts and data files that no kept step needs. Receipts come first:
            with all of its receipts there, a step whose data is half gone would be committed anew.
    """

    keep: tuple[Version, ...] = ()
    retire: tuple[Version, ...] = ()
    delete: tuple[str, ...] = ()


def sweep(
    manifests: Sequence[ManifestFacts],
    keys: Sequence[str],
    timeline: Timeline,
    keep_latest_k: int | None,
    keep_every: int | None,
    protect: Sequence[Version] = (),
) -> Sweep:
    """Mark the files that kept manifests name, and sweep the rest.

    Kept are the newest ``keep_latest_k`` live *complete* steps (all files they name are listed),
    multiples of ``keep_every`` whether live or not, whatever is newer than the oldest of the first,
    and ``protect``. Other committed steps off the live history are retired, if their attempt is
    over.

    Never touched: anything while no live complete step exists; attempts newer than the timeline
    (then this process is the late one); folders without a manifest that are still live and not
    older than the newest live complete step (in flight, or to be rolled forward); folders whose
    manifest is listed but not given (unreadable); names that this library does not write.

    Args:
        manifests: the committed steps, in any order.
        keys: every key in the run.
        timeline: the attempts of the run, this one included.
        keep_latest_k: how many to keep; None keeps all live steps.
        keep_every: steps that are multiples of this stay for ever; None for none.
        protect: versions that stay in any case, such as the one being restored from.
    """
    listed = set(keys)
    facts = {m.version: m for m in manifests}
    live = sorted(v for v in facts if timeline.is_live(v))
    complete = [v for v in live if listed.issuperset(facts[v].files)]
    if not complete:
        return Sweep(keep=tuple(sorted(facts)))

    oldest = complete[0] if keep_latest_k is None else complete[-max(keep_latest_k, 1) :][0]
    shielded = set(protect)
    keep: list[Version] = []
    retire: list[Version] = []
    for version in sorted(facts):
        over = version.attempt < timeline.head or timeline.is_live(version)
        for_ever = keep_every is not None and version.step % keep_every == 0
        wanted = for_ever or (
            timeline.is_live(version) and (keep_latest_k is None or version >= oldest)
        )
        kept = wanted or version in shielded or not over
        (keep if kept else retire).append(version)

    marked = {key for version in keep for key in facts[version].files}
    gone = set(retire)

    def swept(version: Version) -> bool:
        """Whether a folder may lose files."""
        if version in facts or manifest_key(version) in listed:
            return version in gone
        if version in shielded or version.attempt > timeline.head:
            return False
        return version < complete[-1] or not timeline.is_live(version)

    delete = []
    for key in sorted(listed - marked, key=lambda k: (not k.endswith(".receipt"), k)):
        folder, _, name = key.partition("/")
        found = parse_step_dir(folder)
        if found is not None and _SWEPT.fullmatch(name) and swept(found):
            delete.append(key)
    return Sweep(tuple(keep), tuple(retire), tuple(delete))
