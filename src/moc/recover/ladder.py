"""The recovery ladder: from what is left after a fault to one plan, equal on all ranks.

Dense state comes whole from one step, the newest that is whole; each routed expert from its newest
whole version that is not newer. For every piece the sources are listed best first. An expert's
version counts only whole: halves of two ages are never joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from moc.core.digest import digest_plan
from moc.core.manifest import CommitHead, Manifest, Seal
from moc.core.piece import Piece, PieceRecord
from moc.core.tokens import lost_after, lost_in_fault
from moc.core.versions import Timeline, Version
from moc.errors import NothingValid, StepNotFound

__all__ = ["STORAGE", "Fetch", "Inventory", "RecoveryPlan", "Source", "climb"]

STORAGE = -1
"""Node number of the store."""


class Source(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One place that holds a piece.

    Attributes:
        node: node whose memory holds it, -1 for the store.
        file: buffer file name, or key in the store.
        offset: first byte in the file.
        digest: of the bytes; empty where the helper had no time to make one.
    """

    node: int
    file: str
    offset: int
    digest: str

    @property
    def place(self) -> tuple[int, str, int]:
        """What is struck out when the bytes turn out to be bad."""
        return self.node, self.file, self.offset


class Fetch(msgspec.Struct, frozen=True):
    """A piece to restore, its version, and where it can be had; at least one source."""

    piece: Piece
    version: Version
    sources: tuple[Source, ...]


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is left.

    Attributes:
        timeline: attempts so far.
        seals: (node, seal) of every sealed buffer that can be read; records carry digests where
            they are known.
        manifests: committed steps.
        struck: places whose bytes were bad or gone.
        why: what was found there, for people.
        problems: steps that exist and cannot be read, one line each.
    """

    timeline: Timeline
    seals: tuple[tuple[int, Seal], ...] = ()
    manifests: tuple[Manifest, ...] = ()
    struck: frozenset[tuple[int, str, int]] = frozenset()
    why: dict[tuple[int, str, int], str] = {}
    problems: tuple[str, ...] = ()


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to restore, from where.

    Attributes:
        version: the step that training resumes from.
        committed: whether that step is in storage.
        base: newest committed version on the timeline at or before it, None for none.
        world_size: ranks that had made the step.
        head: layers and token counts of the step.
        fetches: every piece, dense ones first.
        versions: the version restored of every expert, [layer][expert].
        base_versions: versions of the base, empty without one.
        fault_lost: tokens between each expert's version and the step (L_ij of eq. 7).
        lost: tokens that the restored state lacks, each counted once.
        reasons: one line for every newer step that was passed over.
    """

    version: Version
    committed: bool
    base: Version | None
    world_size: int
    head: CommitHead
    fetches: tuple[Fetch, ...]
    versions: list[list[Version]]
    base_versions: list[list[Version]]
    fault_lost: list[list[int]]
    lost: list[list[int]]
    reasons: tuple[str, ...] = ()

    @property
    def digest(self) -> int:
        """Number that ranks compare before anything is touched."""
        return digest_plan([self.version, *self.fetches, self.versions, self.lost])


class _NotWhole(Exception):
    """A candidate step lacks something; the message says what.

    Attributes:
        places: where it was and cannot be had.
    """

    def __init__(self, message: str, places: Sequence[tuple[int, str, int]] = ()) -> None:
        super().__init__(message)
        self.places = places


class _Holding(msgspec.Struct):
    """Pieces of one expert's version that were found, by name; how many make it whole."""

    needed: int
    sources: dict[str, list[Source]]
    pieces: dict[str, Piece]
    routed: int
    lost: int


def climb(inventory: Inventory, asked_step: int | None = None) -> RecoveryPlan:
    """Plan a restore.

    Args:
        inventory: what is left.
        asked_step: restore exactly this step; there is no falling back from it.

    Raises:
        StepNotFound: the step asked for does not exist on the live history, or is not whole.
        NothingValid: there are steps, but none is whole.
    """
    alive = inventory.timeline.is_live
    seals = [(node, seal) for node, seal in inventory.seals if alive(seal.version)]
    manifests = {m.version: m for m in inventory.manifests if alive(m.version)}
    candidates = sorted({s.version for _, s in seals} | set(manifests), reverse=True)
    if asked_step is not None:
        candidates = [v for v in candidates if v.step == asked_step]
    reasons = list(inventory.problems)
    for version in candidates:
        try:
            return _plan(version, seals, manifests, inventory.struck, tuple(reasons))
        except _NotWhole as reason:
            found = sorted({inventory.why[p] for p in reason.places if p in inventory.why})
            reasons.append(f"step {version} is not whole: {'; '.join([str(reason), *found])}")
    told = "; ".join(reasons) or "nothing of it was found"
    if asked_step is not None:
        have = sorted({v.step for v in manifests})
        raise StepNotFound(f"step {asked_step} cannot be restored: {told}; committed: {have}")
    raise NothingValid(f"there are checkpoints, but none can be restored: {told}")


def _plan(
    version: Version,
    seals: Sequence[tuple[int, Seal]],
    manifests: dict[Version, Manifest],
    struck: frozenset[tuple[int, str, int]],
    reasons: tuple[str, ...],
) -> RecoveryPlan:
    here = [(node, seal) for node, seal in seals if seal.version == version]
    manifest = manifests.get(version)
    head, world = _head(here, manifest)
    dense = _dense(version, here, manifest, world, struck)
    older = {v: m for v, m in manifests.items() if v <= version}
    holdings = _holdings(version, seals, older, struck)
    fetches = list(dense)
    versions: list[list[Version]] = []
    chosen_routed: list[list[int]] = []
    chosen_lost: list[list[int]] = []
    for layer, routed in enumerate(head.routed):
        row = []
        for expert in range(len(routed)):
            found = [
                (v, h)
                for v, h in holdings.get((layer, expert), {}).items()
                if len(h.sources) == h.needed
            ]
            if not found:
                raise _NotWhole(f"expert {expert} of MoE layer {layer} has no whole version")
            row.append(max(found, key=lambda item: item[0]))
        versions.append([v for v, _ in row])
        chosen_routed.append([h.routed for _, h in row])
        chosen_lost.append([h.lost for _, h in row])
        for v, holding in row:
            for name in sorted(holding.sources):
                sources = tuple(sorted(set(holding.sources[name]), key=_preference))
                fetches.append(Fetch(holding.pieces[name], v, sources))
    base = max(older, default=None)
    return RecoveryPlan(
        version=version,
        committed=manifest is not None,
        base=base,
        world_size=world,
        head=head,
        fetches=tuple(fetches),
        versions=versions,
        base_versions=older[base].versions if base else [],
        fault_lost=lost_in_fault(chosen_routed, head.routed),
        lost=lost_after(chosen_lost, chosen_routed, head.routed),
        reasons=reasons,
    )


def _head(here: Sequence[tuple[int, Seal]], manifest: Manifest | None) -> tuple[CommitHead, int]:
    if manifest is not None:
        return manifest.head, manifest.world_size
    seal = min((seal for _, seal in here), key=lambda s: s.rank)
    return seal.head, seal.world_size


def _dense(
    version: Version,
    here: Sequence[tuple[int, Seal]],
    manifest: Manifest | None,
    world: int,
    struck: frozenset[tuple[int, str, int]],
) -> Iterator[Fetch]:
    pieces: dict[str, Piece] = {}
    sources: dict[str, list[Source]] = {}
    digests: dict[str, str] = {}
    if manifest is not None:
        for record in manifest.dense:
            name = record.piece.name
            pieces[name] = record.piece
            digests[name] = record.digest
            sources[name] = [_stored(record, manifest)]
    else:
        missing = sorted(set(range(world)) - {seal.rank for _, seal in here})
        if missing:
            raise _NotWhole(
                f"it was never committed, and the snapshots of ranks {missing} are lost"
            )
    for node, seal in here:
        for record in seal.pieces:
            name = record.piece.name
            if record.piece.is_expert or (manifest is not None and name not in pieces):
                continue
            pieces[name] = record.piece
            held = _held(node, seal, record, digests.get(name, ""))
            sources.setdefault(name, []).append(held)
    for name in sorted(pieces):
        alive = {s for s in sources[name] if s.place not in struck}
        if not alive:
            places = [s.place for s in sources[name]]
            raise _NotWhole(f"every source of {name} is lost or damaged", places)
        yield Fetch(pieces[name], version, tuple(sorted(alive, key=_preference)))


def _holdings(
    newest: Version,
    seals: Sequence[tuple[int, Seal]],
    manifests: dict[Version, Manifest],
    struck: frozenset[tuple[int, str, int]],
) -> dict[tuple[int, int], dict[Version, _Holding]]:
    """Versions of every expert that are not newer, with what was found of each."""
    holdings: dict[tuple[int, int], dict[Version, _Holding]] = {}
    digests: dict[tuple[Version, str], str] = {}
    for manifest in manifests.values():
        counts: dict[tuple[int, int], int] = {}
        for record in manifest.experts:
            key = (record.piece.layer, record.piece.expert)
            counts[key] = counts.get(key, 0) + 1
        for record in manifest.experts:
            layer, expert = record.piece.layer, record.piece.expert
            version = manifest.versions[layer][expert]
            holding = holdings.setdefault((layer, expert), {}).setdefault(
                version,
                _Holding(
                    counts[layer, expert],
                    {},
                    {},
                    manifest.version_routed[layer][expert],
                    manifest.version_lost[layer][expert],
                ),
            )
            digests[version, record.piece.name] = record.digest
            _add(holding, record.piece, _stored(record, manifest), struck)
    for node, seal in seals:
        if seal.version > newest:
            continue
        for layer, expert, needed in seal.expert_pieces:
            holdings.setdefault((layer, expert), {}).setdefault(
                seal.version,
                _Holding(
                    needed, {}, {}, seal.head.routed[layer][expert], seal.head.lost[layer][expert]
                ),
            )
        for record in seal.pieces:
            if record.piece.is_expert:
                known = digests.get((seal.version, record.piece.name), "")
                holding = holdings[record.piece.layer, record.piece.expert][seal.version]
                _add(holding, record.piece, _held(node, seal, record, known), struck)
    return holdings


def _add(
    holding: _Holding, piece: Piece, source: Source, struck: frozenset[tuple[int, str, int]]
) -> None:
    if source.place not in struck:
        holding.pieces[piece.name] = piece
        holding.sources.setdefault(piece.name, []).append(source)


def _stored(record: PieceRecord, manifest: Manifest) -> Source:
    return Source(STORAGE, manifest.files[record.file].key, record.offset, record.digest)


def _held(node: int, seal: Seal, record: PieceRecord, known_digest: str) -> Source:
    return Source(node, seal.file, record.offset, record.digest or known_digest)


def _preference(source: Source) -> tuple[bool, Source]:
    """Memory before storage, then by node, file and offset: equal on all ranks."""
    return source.node == STORAGE, source
