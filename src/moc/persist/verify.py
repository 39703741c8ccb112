"""Read everything that the live manifests of a run name, and say what is not as it was written.

Each file is read once, whichever manifests name it, in ranges of at most 64 MiB: its header
against the header's digest, every piece against its own. Records are held against one another:
manifest against receipts, manifest against manifest, attempts against their chain. Nothing is
written, printed or repaired here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import TypeVar

import msgspec

from moc.core.digest import digest_bytes
from moc.core.manifest import (
    CommitHead,
    FileInfo,
    Manifest,
    Receipt,
    RunInfo,
    attempt_key,
    decode_json,
    manifest_key,
    parse_attempt_key,
    parse_step_dir,
    receipt_key,
)
from moc.core.piece import MAX_PIECE_BYTES, Piece, PieceRecord
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import DamagedError, KeyMissing, StepNotFound, StoreError
from moc.persist.commit import versions_in
from moc.persist.survey import RUN_KEY, read_run
from moc.store.base import Store

__all__ = ["Damage", "VerifyReport", "verify"]

_HEADER_LENGTH_BYTES = 8  # of a safetensors file
_SHOWN = 8

S = TypeVar("S", bound=msgspec.Struct)
_Place = tuple[Piece, str, int, str]  # piece, key, offset, digest


class Damage(msgspec.Struct, frozen=True, order=True):
    """One thing that is not as it was written.

    Attributes:
        file: key in the run.
        piece: name of the piece, empty where the file as a whole is concerned.
        why: what was found.
    """

    file: str
    piece: str
    why: str


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was verified.

    Attributes:
        steps: committed live versions that were looked at, oldest first.
        files: data files read.
        pieces: pieces read.
        nbytes: bytes read from data files.
        damaged: everything that is wrong, sorted by file.
    """

    steps: tuple[Version, ...]
    files: int
    pieces: int
    nbytes: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damaged


class _File(msgspec.Struct):
    """A data file, and what manifests say is in it."""

    info: FileInfo
    records: dict[tuple[int, str, str], PieceRecord]
    needed_by: set[Version]


def verify(
    store: Store,
    steps: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verify the committed live steps of a run.

    Args:
        store: of the run.
        steps: only these; by default all.
        progress: called now and then with bytes done and bytes in all.

    Raises:
        ConfigError: there is no run.
        StepNotFound: a step asked for is not committed on the live history.
    """
    return _Verifier(store).run(steps, progress or _silent)


class _Verifier:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._damaged: set[Damage] = set()
        self._maybe_retired: list[tuple[Damage, set[Version]]] = []
        self._files: dict[str, _File] = {}
        self._pieces = 0
        self._nbytes = 0

    def run(
        self, steps: Sequence[int] | None, progress: Callable[[int, int], None]
    ) -> VerifyReport:
        run = self._run_info()
        timeline = self._attempts()
        manifests = self._manifests(timeline, steps)
        by_version = {m.version: m for m in manifests}
        known: dict[tuple[int, int, Version], tuple[str, object]] = {}
        for manifest in manifests:
            if run is not None and manifest.head.model != run.model:
                self._add(manifest_key(manifest.version), "it is of another model than run.json")
            problem = _shape_problem(manifest)
            if problem:
                self._add(manifest_key(manifest.version), problem)
                continue
            self._references(manifest, timeline)
            self._compare_base(manifest, by_version)
            self._receipts(manifest)
            self._compare_manifests(manifest, known)
            self._collect(manifest)
        total = sum(f.info.nbytes for f in self._files.values())
        progress(0, total)
        for key in sorted(self._files):
            self._check_file(self._files[key], lambda: progress(self._nbytes, total))
        self._settle()
        return VerifyReport(
            steps=tuple(m.version for m in manifests),
            files=len(self._files),
            pieces=self._pieces,
            nbytes=self._nbytes,
            damaged=tuple(sorted(self._damaged)),
        )

    # ------------------------------------------------------------------ records

    def _add(self, file: str, why: str, piece: str = "") -> None:
        self._damaged.add(Damage(file, piece, why))

    def _run_info(self) -> RunInfo | None:
        try:
            return read_run(self._store)
        except DamagedError as error:
            self._add(RUN_KEY, str(error))
            return None

    def _attempts(self) -> Timeline:
        """The timeline of all records that can be read."""
        records = []
        seen = set()
        listed = [parse_attempt_key(key) for key in self._store.list("attempts")]
        newest = max((n for n in listed if n is not None), default=0)
        for number in count(1):  # a listing may lag: the next key is asked for
            key = attempt_key(number)
            try:
                data = self._store.get(key)
            except KeyMissing:
                if number > newest:
                    break
                self._add(key, "missing: which steps are live cannot be told for certain")
                continue
            seen.add(number)
            try:
                record = decode_json(data, AttemptRecord, key)
            except DamagedError as error:
                self._add(key, str(error))
                continue
            if record.attempt != number:
                self._add(key, f"it is the record of attempt {record.attempt}")
                continue
            if not (record.parent == 0 or record.parent in seen) or record.parent >= number:
                self._add(key, f"it names attempt {record.parent} as its parent")
            if record.resumed_step < 0 or record.world_size < 1 or not _is_time(record.time):
                self._add(key, "step, world size or time make no sense")
            records.append(record)
        return Timeline.of(records)

    def _manifests(self, timeline: Timeline, steps: Sequence[int] | None) -> list[Manifest]:
        manifests, found = [], set()
        for version in versions_in(self._store, timeline):
            if not timeline.is_live(version) or (steps is not None and version.step not in steps):
                continue
            key = manifest_key(version)
            try:
                manifest = decode_json(self._store.get(key), Manifest, key)
                if manifest.version != version:
                    raise DamagedError(f"it is the manifest of step {manifest.version}")
            except KeyMissing:
                continue  # not committed, or retired: no step, so no damage
            except (DamagedError, StoreError) as error:
                self._add(key, str(error))
                found.add(version.step)
                continue
            if not _is_time(manifest.created) or manifest.format < 1:
                self._add(key, "format or time make no sense")
            manifests.append(manifest)
            found.add(version.step)
        absent = sorted(set(steps or ()) - found)
        if absent:
            raise StepNotFound(
                f"no committed step {', '.join(map(str, absent))} on the live history of "
                f"{self._store.url}; `moc ls` lists what there is"
            )
        return manifests

    def _references(self, manifest: Manifest, timeline: Timeline) -> None:
        """Files and versions that the manifest points to must be able to be there."""
        key = manifest_key(manifest.version)
        for file in manifest.files:
            origin = parse_step_dir(file.key.partition("/")[0])
            if origin is None or not timeline.is_live(origin) or origin > manifest.version:
                self._add(key, f"it needs {file.key}, which is of no live step before it")
        for layer, row in enumerate(manifest.versions):
            for expert, version in enumerate(row):
                if not timeline.is_live(version) or version > manifest.version:
                    self._add(
                        key,
                        f"expert {expert} of MoE layer {layer} is of step {version}, which is "
                        "not live",
                    )
        for record in (*manifest.dense, *manifest.experts):
            piece, file = record.piece, manifest.files[record.file]
            if record.offset + piece.nbytes > file.nbytes:
                self._add(key, "the piece lies beyond the end of its file", piece.name)
            origin = parse_step_dir(file.key.partition("/")[0])
            if piece.is_expert and origin is not None:
                version = manifest.versions[piece.layer][piece.expert]
                if origin > version:
                    self._add(key, f"it says step {version} of a piece of {origin}", piece.name)

    def _receipts(self, manifest: Manifest) -> None:
        """A manifest says what its receipts said."""
        version, key = manifest.version, manifest_key(manifest.version)
        receipts: list[Receipt] = []
        for rank in range(manifest.world_size):
            name = receipt_key(version, rank)
            try:
                receipt = decode_json(self._store.get(name), Receipt, name)
            except KeyMissing:
                self._maybe_retired.append(
                    (Damage(name, "", "missing, though no restore needs it"), {version})
                )
                continue
            except (DamagedError, StoreError) as error:
                self._add(name, str(error))
                continue
            if (receipt.version, receipt.rank, receipt.world_size) != (
                version,
                rank,
                manifest.world_size,
            ) or any(not 0 <= r.file < len(receipt.files) for r in receipt.pieces):
                self._add(name, "it is not the receipt of this rank, step and world size")
                continue
            receipts.append(receipt)
        in_manifest = _places(manifest.own_records, manifest.files)
        infos = {f.key: f for f in manifest.files}
        for receipt in receipts:
            name = receipt_key(version, receipt.rank)
            for piece in _first_names(_places(receipt.pieces, receipt.files) - in_manifest):
                self._add(name, f"it disagrees with {key} about the piece", piece)
            if any(infos.get(f.key) != f for f in receipt.files if _is_used(receipt, f)):
                self._add(name, f"it disagrees with {key} about a file's size or header")
            if receipt.rank == 0 and receipt.head != manifest.head:
                self._add(name, f"it disagrees with {key} about {_differing(receipt, manifest)}")
        if len(receipts) == manifest.world_size:
            told = {place for r in receipts for place in _places(r.pieces, r.files)}
            for piece in _first_names(in_manifest - told):
                self._add(key, "no receipt says so about the piece", piece)

    def _compare_base(self, manifest: Manifest, by_version: Mapping[Version, Manifest]) -> None:
        """What a step did not write is as in the step that it builds on."""
        base = by_version.get(manifest.head.base) if manifest.head.base else None
        referenced = [
            r for r in manifest.own_records if not manifest.files[r.file].is_of(manifest.version)
        ]
        places = _places(referenced, manifest.files)
        if manifest.head.base is None:
            for piece in _first_names(places):
                self._add(manifest_key(manifest.version), "a full save did not write it", piece)
        if base is None or _shape_problem(base):
            return  # a full save, or one whose base was retired
        if list(map(len, base.versions)) != list(map(len, manifest.versions)):
            self._add(manifest_key(manifest.version), f"it has other experts than {base.version}")
            return
        there = _places([*base.dense, *base.experts], base.files)
        for piece in _first_names(places - there):
            self._add(
                manifest_key(manifest.version),
                f"step {base.version}, which it builds on, does not hold it there",
                piece,
            )
        for layer, ids in enumerate(manifest.head.saved):
            for expert, version in enumerate(manifest.versions[layer]):
                if expert not in ids and version != base.versions[layer][expert]:
                    self._add(
                        manifest_key(manifest.version),
                        f"expert {expert} of MoE layer {layer} has another version than in step "
                        f"{base.version}, which it builds on",
                    )

    def _compare_manifests(
        self, manifest: Manifest, known: dict[tuple[int, int, Version], tuple[str, object]]
    ) -> None:
        """Two manifests that name one version of an expert say the same about it."""
        key = manifest_key(manifest.version)
        places: dict[tuple[int, int], set[_Place]] = {}
        for record in manifest.experts:
            places.setdefault((record.piece.layer, record.piece.expert), set()).add(
                _place(record, manifest.files)
            )
        for layer, row in enumerate(manifest.versions):
            saved = set(manifest.head.saved[layer])
            for expert, version in enumerate(row):
                fact = (
                    places.get((layer, expert), set()),
                    manifest.version_routed[layer][expert],
                    manifest.version_lost[layer][expert],
                )
                said, other = known.setdefault((layer, expert, version), (key, fact))
                what = f"expert {expert} of MoE layer {layer} at step {version}"
                if other != fact:
                    self._add(key, f"it disagrees with {said} about {what}")
                is_own = fact[1:] == (
                    manifest.head.routed[layer][expert],
                    manifest.head.lost[layer][expert],
                )
                if (version == manifest.version) != (expert in saved) or (
                    expert in saved and not is_own
                ):
                    self._add(key, f"it contradicts itself about {what}")
                if not fact[0]:
                    self._add(key, f"it has no pieces of {what}")

    def _collect(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.version)
        for info in manifest.files:
            file = self._files.setdefault(info.key, _File(info, {}, set()))
            file.needed_by.add(manifest.version)
            if file.info != info:
                self._add(key, f"it disagrees with other steps about {info.key}")
        for record in (*manifest.dense, *manifest.experts):
            file = self._files[manifest.files[record.file].key]
            file.records[record.offset, record.piece.name, record.digest] = record

    # ------------------------------------------------------------------ bytes

    def _check_file(self, file: _File, tick: Callable[[], None]) -> None:
        key, info = file.info.key, file.info
        try:
            size = self._store.size(key)
            if size != info.nbytes:
                self._add(key, f"{size} bytes long, {info.nbytes} were written")
            self._check_header(file)
            for start, end, records in _ranges(file.records.values()):
                data = memoryview(self._store.get(key, start, end - start))
                self._nbytes += len(data)
                for record in records:
                    self._pieces += 1
                    self._check_piece(key, record, data[record.offset - start :])
                tick()
        except KeyMissing:
            self._maybe_retired.append((Damage(key, "", "missing"), file.needed_by))
        except StoreError as error:
            self._add(key, f"cannot be read: {error}")

    def _check_header(self, file: _File) -> None:
        key = file.info.key
        start = self._store.get(key, 0, _HEADER_LENGTH_BYTES)
        area = _HEADER_LENGTH_BYTES + int.from_bytes(start, "little")
        # The digest is over the whole header area; a length beyond the file is damage at once.
        header = self._store.get(key, 0, area) if area <= file.info.nbytes else start
        self._nbytes += len(header)
        if digest_bytes(header) != file.info.header_digest:
            self._add(key, "the header is not what was written: its digest differs")

    def _check_piece(self, key: str, record: PieceRecord, data: memoryview) -> None:
        nbytes = record.piece.nbytes
        if len(data) < nbytes:
            self._add(key, f"only {len(data)} of {nbytes} bytes are there", record.piece.name)
            return
        found = digest_bytes(data[:nbytes])
        if found != record.digest:
            self._add(
                key,
                f"bytes {record.offset} to {record.offset + nbytes} have digest {found}, "
                f"{record.digest} was written",
                record.piece.name,
            )

    def _settle(self) -> None:
        """What is missing is damage only if a step that needs it was not retired meanwhile."""
        for damage, versions in self._maybe_retired:
            if any(self._store.exists(manifest_key(version)) for version in versions):
                self._damaged.add(damage)


def _shape_problem(manifest: Manifest) -> str:
    """Why nothing else about the manifest can be judged; empty where it can."""
    head = manifest.head
    widths = [len(row) for row in head.routed]
    tables = (head.lost, manifest.versions, manifest.version_routed, manifest.version_lost)
    if any([len(row) for row in table] != widths for table in tables):
        return "its tables of experts have different shapes"
    if len(head.layers) != len(widths) or len(head.saved) != len(widths):
        return "its tables of experts have another number of MoE layers than it names"
    records = [*manifest.dense, *manifest.experts]
    if any(not 0 <= r.file < len(manifest.files) or r.offset < 0 for r in records):
        return "pieces lie in files that it does not name"
    if any(r.piece.is_expert for r in manifest.dense) or any(
        not 0 <= r.piece.layer < len(widths) or not 0 <= r.piece.expert < widths[r.piece.layer]
        for r in manifest.experts
    ):
        return "pieces belong to experts that it does not have"
    if any(not 0 <= e < widths[layer] for layer, ids in enumerate(head.saved) for e in ids):
        return "it saved experts that it does not have"
    return ""


def _ranges(
    records: Iterable[PieceRecord],
) -> Iterator[tuple[int, int, list[PieceRecord]]]:
    """Neighbouring pieces in ranges of at most 64 MiB, or of one piece that is larger."""
    batch: list[PieceRecord] = []
    start = end = 0
    ordered = sorted(records, key=lambda r: (r.offset, r.piece.name))
    for record in ordered:
        stop = record.offset + record.piece.nbytes
        if batch and (record.offset > end or max(stop, end) - start > MAX_PIECE_BYTES):
            yield start, end, batch
            batch = []
        if not batch:
            start = end = record.offset
        batch.append(record)
        end = max(end, stop)
    if batch:
        yield start, end, batch


def _place(record: PieceRecord, files: Sequence[FileInfo]) -> _Place:
    return record.piece, files[record.file].key, record.offset, record.digest


def _places(records: Sequence[PieceRecord], files: Sequence[FileInfo]) -> set[_Place]:
    return {_place(record, files) for record in records}


def _first_names(places: set[_Place]) -> list[str]:
    return sorted(piece.name for piece, *_ in places)[:_SHOWN]


def _is_used(receipt: Receipt, file: FileInfo) -> bool:
    """Whether a piece lies in the file: a manifest names no others."""
    return any(receipt.files[r.file] == file for r in receipt.pieces)


def _differing(receipt: Receipt, manifest: Manifest) -> str:
    fields = CommitHead.__struct_fields__
    if receipt.head is None:
        return "everything: it has no head"
    return ", ".join(
        name for name in fields if getattr(receipt.head, name) != getattr(manifest.head, name)
    )


def _is_time(text: str) -> bool:
    try:
        return not text or datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def _silent(_done: int, _total: int) -> None:
    """Nobody watches."""
