"""What is written about a checkpoint: seals, receipts, manifests, and their one assembly rule.

A *seal* makes a buffer in memory valid. A *receipt* says that one rank's files of a step are
durable. A *manifest* makes the step exist; it depends on nothing but the receipts and the
manifest before it, so any later attempt can finish a commit whose receipts are all there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from moc.core.digest import digest_bytes
from moc.core.piece import Piece, PieceRecord
from moc.core.versions import Version
from moc.errors import DamagedError, NewerFormat

__all__ = [
    "FORMAT",
    "CommitHead",
    "DigestFile",
    "FileInfo",
    "Manifest",
    "Receipt",
    "RunInfo",
    "Seal",
    "assemble",
    "attempt_key",
    "decode_json",
    "digests_path",
    "encode_json",
    "is_control_key",
    "is_data_key",
    "manifest_key",
    "parse_attempt_key",
    "parse_step_dir",
    "receipt_key",
    "seal_path",
    "sign",
    "step_dir",
    "writer_of",
]

FORMAT = 1
"""Newest format this library writes; it refuses to read newer ones and ignores unknown fields."""

_STEP_DIR = re.compile(r"step-(\d{8,})-a(\d{4,})")
_ATTEMPT = re.compile(r"attempts/(\d{4,})\.json")
_DATA = re.compile(r"step-\d{8,}-a\d{4,}/(?:dense|experts)-(\d{5,})[\w.-]*\.safetensors")
_CONTROL = re.compile(
    r"run\.json|latest|attempts/\d{4,}\.json"
    r"|step-\d{8,}-a\d{4,}/(?:manifest\.json|rank-\d{5,}\.receipt)"
)

_DIGEST_START = b'{"digest":"'
_DIGEST_SKIP = 18  # 16 digits, a quote and a comma

S = TypeVar("S", bound=msgspec.Struct)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: the identity of a run.

    Attributes:
        run_id: random name, which the memory tier's directories carry.
        model: digest of the model's parameter names and global shapes.
        format: version of the layout on disk.
        created: ISO-8601 UTC.
        node_local: every node holds the data files of its own ranks, on a disk of its own.
    """

    run_id: str
    model: str
    format: int = FORMAT
    created: str = ""
    node_local: bool = False


class FileInfo(msgspec.Struct, frozen=True):
    """A data file: its key in the run, its size in bytes, and the xxh3 of its header."""

    key: str
    nbytes: int
    header_digest: str

    def is_of(self, version: Version) -> bool:
        """Whether the save of this version wrote it; otherwise it is *referenced*."""
        return self.key.startswith(step_dir(version) + "/")


class CommitHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit needs beyond the receipts' own pieces; rides in rank 0's receipt.

    Attributes:
        model: digest of the model, as in ``run.json``.
        base: the committed version whose expert records are inherited, None for a full save.
        layers: names of the MoE layers, in order.
        saved: global expert ids saved in this step, per MoE layer.
        routed: cumulative routed tokens [layer][expert] at this step.
        lost: tokens that the state at this step has lost for good, [layer][expert].
        k_snapshot: experts per MoE layer and snapshot in force.
        k_persist: experts per MoE layer and persist in force.
        left_out: names of live tensors that are not saved by rule (rope tables, masks).
        frozen: names of parameters that are not saved because they are not trained.
    """

    model: str
    base: Version | None
    layers: list[str]
    saved: list[list[int]]
    routed: list[list[int]]
    lost: list[list[int]]
    k_snapshot: int
    k_persist: int
    left_out: list[str] = []
    frozen: list[str] = []


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """``rank-00004.receipt``: this rank's files of this step are durable.

    A piece that has not changed since ``head.base`` may be *referenced*: its record names the
    file of an older step that the base's own record of the piece names. So a reference is never
    more than one file deep, and rests on nothing but the base.

    Attributes:
        version: of the save.
        rank: writer.
        world_size: how many receipts make the step.
        files: what was written, and files of older steps that hold unchanged pieces.
        pieces: where each piece lies, with digests.
        head: on rank 0 only.
        persist_secs: from the message to persist until the files were durable, tries included.
    """

    version: Version
    rank: int
    world_size: int
    files: list[FileInfo]
    pieces: list[PieceRecord]
    head: CommitHead | None = None
    persist_secs: float = 0.0


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Beside a buffer in memory: the buffer holds this version, whole, of this rank.

    Attributes:
        run_id: the run it belongs to.
        version: what it holds.
        rank: writer.
        world_size: how many ranks' seals make the step.
        plan: digest of the save plan, equal on all ranks.
        file: name of the buffer file; the only entry that records index.
        pieces: where each piece lies; digests are empty.
        expert_pieces: [layer, expert, pieces over all ranks] for every expert in this snapshot.
        head: as it would be committed; ``saved`` lists the experts of this snapshot.
    """

    run_id: str
    version: Version
    rank: int
    world_size: int
    plan: int
    file: str
    pieces: list[PieceRecord]
    expert_pieces: list[tuple[int, int, int]]
    head: CommitHead


class DigestFile(msgspec.Struct, frozen=True, kw_only=True):
    """Beside a sealed buffer, once the helper had time: digests of the seal's pieces, in order."""

    version: Version
    digests: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest.json``: put last; the step exists when this exists.

    Attributes:
        version: of this checkpoint.
        world_size: ranks that wrote it.
        head: model, layers, tokens, K's; see `CommitHead`.
        files: every file that the records name, also those of older steps.
        dense: records of all dense pieces, as they are at this step.
        experts: records of all routed experts' pieces, each of its expert's newest version. The
            file of an unchanged piece is older than the version.
        versions: the version of every expert, [layer][expert].
        version_routed: cumulative routed tokens at that version.
        version_lost: lost tokens at that version.
        format: version of the layout on disk.
        created: ISO-8601 UTC.
        slowest_rank: whose persist took longest, the lowest of equals; -1 where nobody said.
        slowest_secs: what it took.
    """

    version: Version
    world_size: int
    head: CommitHead
    files: list[FileInfo]
    dense: list[PieceRecord]
    experts: list[PieceRecord]
    versions: list[list[Version]]
    version_routed: list[list[int]]
    version_lost: list[list[int]]
    format: int = FORMAT
    created: str = ""
    slowest_rank: int = -1
    slowest_secs: float = 0.0

    @property
    def oldest_expert_age(self) -> int:
        """Steps between this step and the oldest version of an expert in it."""
        return max((self.version.step - v.step for row in self.versions for v in row), default=0)

    @property
    def own_records(self) -> list[PieceRecord]:
        """Records of what this step saved, written or referenced; others are inherited."""
        return [*self.dense, *(r for r in self.experts if self._is_saved(r.piece))]

    @property
    def referenced_bytes(self) -> int:
        """Bytes of pieces that this step saved without writing them."""
        own = [f.is_of(self.version) for f in self.files]
        return sum(r.piece.nbytes for r in self.own_records if not own[r.file])

    def _is_saved(self, piece: Piece) -> bool:
        return piece.expert in self.head.saved[piece.layer]


class _Format(msgspec.Struct):
    """What tells whether the rest can be read at all."""

    format: int = FORMAT


def assemble(receipts: Sequence[Receipt], base: Manifest | None, created: str = "") -> Manifest:
    """Build the manifest of a step from all of its receipts and the manifest it builds on.

    Args:
        receipts: one per rank of the step's world.
        base: the manifest that ``head.base`` names; its expert records are inherited for experts
            that this step did not save.
        created: time stamp to record.

    Raises:
        DamagedError: receipts are missing or of different versions, the base is not the one
            named, an expert has no record in either, the receipts hold other experts than the
            head says, or they reference what the base does not have.
    """
    receipts = sorted(receipts, key=lambda r: r.rank)
    head = _check_receipts(receipts)
    first = receipts[0]
    if (base.version if base else None) != head.base:
        raise DamagedError(f"step {first.version} builds on {head.base}, not on the given base")
    _check_references(receipts, base)

    files: list[FileInfo] = []
    index: dict[str, int] = {}

    def adopt(record: PieceRecord, info: FileInfo) -> PieceRecord:
        if info.key not in index:
            index[info.key] = len(files)
            files.append(info)
        return PieceRecord(record.piece, index[info.key], record.offset, record.digest)

    dense: list[PieceRecord] = []
    experts: list[PieceRecord] = []
    for receipt in receipts:
        for record in receipt.pieces:
            target = experts if record.piece.is_expert else dense
            target.append(adopt(record, receipt.files[record.file]))

    saved = [set(ids) for ids in head.saved]
    versions: list[list[Version]] = []
    routed: list[list[int]] = []
    lost: list[list[int]] = []
    for layer, ids in enumerate(saved):
        count = len(head.routed[layer])
        inherited = [e for e in range(count) if e not in ids]
        if inherited and base is None:
            raise DamagedError(f"step {first.version}: no version of experts {inherited[:8]}")
        versions.append(
            [
                first.version if e in ids or not base else base.versions[layer][e]
                for e in range(count)
            ]
        )
        for out, now, old in (
            (routed, head.routed, base.version_routed if base else None),
            (lost, head.lost, base.version_lost if base else None),
        ):
            out.append(
                [now[layer][e] if e in ids or old is None else old[layer][e] for e in range(count)]
            )
    if base:
        experts += [
            adopt(record, base.files[record.file])
            for record in base.experts
            if record.piece.expert not in saved[record.piece.layer]
        ]
    slowest = max(receipts, key=lambda r: (r.persist_secs, -r.rank))
    return Manifest(
        version=first.version,
        world_size=first.world_size,
        head=head,
        files=files,
        dense=dense,
        experts=experts,
        versions=versions,
        version_routed=routed,
        version_lost=lost,
        created=created,
        slowest_rank=slowest.rank if slowest.persist_secs else -1,
        slowest_secs=slowest.persist_secs,
    )


def _check_receipts(receipts: Sequence[Receipt]) -> CommitHead:
    """The head of a complete set of receipts, sorted by rank; refuses any other set."""
    if not receipts:
        raise DamagedError("no receipts, so no step")
    first = receipts[0]
    if [r.rank for r in receipts] != list(range(first.world_size)):
        raise DamagedError(f"step {first.version}: receipts of ranks {[r.rank for r in receipts]}")
    if any(r.version != first.version for r in receipts) or first.head is None:
        raise DamagedError(f"step {first.version}: receipts do not belong together")
    said = {(layer, e) for layer, ids in enumerate(first.head.saved) for e in ids}
    pieces = [record.piece for receipt in receipts for record in receipt.pieces]
    wrong = said ^ {(piece.layer, piece.expert) for piece in pieces if piece.is_expert}
    if wrong:
        raise DamagedError(
            f"step {first.version}: records and saved experts disagree on (layer, expert) "
            f"{sorted(wrong)[:8]}"
        )
    return first.head


def _check_references(receipts: Sequence[Receipt], base: Manifest | None) -> None:
    """Refuse records in files of older steps, unless the base says the same."""
    places = {
        (record.piece, receipt.files[record.file], record.offset, record.digest)
        for receipt in receipts
        for record in receipt.pieces
        if not receipt.files[record.file].is_of(receipt.version)
    }
    if places and base:
        places -= {
            (record.piece, base.files[record.file], record.offset, record.digest)
            for record in (*base.dense, *base.experts)
        }
    if places:
        names = sorted(piece.name for piece, *_ in places)[:8]
        raise DamagedError(
            f"step {receipts[0].version}: its base does not hold {names} where receipts say"
        )


def step_dir(version: Version) -> str:
    """Folder of a version: ``step-00001200-a0003``."""
    return f"step-{version.step:08d}-a{version.attempt:04d}"


def parse_step_dir(name: str) -> Version | None:
    """The version that a folder name stands for; None for anything that merely looks like one."""
    match = _STEP_DIR.fullmatch(name)
    if match is None:
        return None
    version = Version(int(match[1]), int(match[2]))
    return version if step_dir(version) == name else None


def manifest_key(version: Version) -> str:
    """Key of a version's manifest."""
    return f"{step_dir(version)}/manifest.json"


def receipt_key(version: Version, rank: int) -> str:
    """Key of a rank's receipt."""
    return f"{step_dir(version)}/rank-{rank:05d}.receipt"


def is_data_key(key: str) -> bool:
    """Whether a key is that of a data file; with node-local disks it stays on its node."""
    return _DATA.fullmatch(key) is not None


def is_control_key(key: str) -> bool:
    """Whether a key is one that all nodes share: what the run is, receipts, manifests."""
    return _CONTROL.fullmatch(key) is not None


def writer_of(key: str) -> int:
    """The rank that wrote a data file; -1 for any other key."""
    match = _DATA.fullmatch(key)
    return int(match[1]) if match else -1


def seal_path(buffer: str) -> str:
    """Path of the seal beside a buffer."""
    return buffer.removesuffix(".safetensors") + ".seal"


def digests_path(buffer: str) -> str:
    """Path of the digests beside a buffer."""
    return buffer.removesuffix(".safetensors") + ".digests"


def attempt_key(attempt: int) -> str:
    """Key of an attempt's record."""
    return f"attempts/{attempt:04d}.json"


def parse_attempt_key(key: str) -> int | None:
    """The attempt that a key stands for, None for any other key."""
    match = _ATTEMPT.fullmatch(key)
    return int(match[1]) if match and attempt_key(int(match[1])) == key else None


def encode_json(value: msgspec.Struct) -> bytes:
    """One line of JSON whose first field is the digest of the rest: no digit may change unseen."""
    return sign(msgspec.json.encode(value))


def sign(body: bytes) -> bytes:
    """A JSON object with the digest of its bytes as its first field, and a line end."""
    return _DIGEST_START + digest_bytes(body).encode() + b'",' + body[1:] + b"\n"


def decode_json(data: bytes, kind: type[S], what: str) -> S:
    """Read JSON that this library wrote.

    Args:
        data: the bytes.
        kind: the struct to read.
        what: name for the error, a key or a path.

    Raises:
        DamagedError: the bytes are not such a value.
        NewerFormat: they are of a newer format.
    """
    start = len(_DIGEST_START)
    body = b"{" + data[start + _DIGEST_SKIP :].removesuffix(b"\n")
    if sign(body) != data:
        raise DamagedError(f"{what} is damaged: its digest does not fit")
    try:
        written = msgspec.json.decode(body, type=_Format).format
        if written > FORMAT:
            raise NewerFormat(
                f"{what} has format {written}, and this version of moc reads up to {FORMAT}; "
                "install a newer moc"
            )
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{what} is damaged: {error}") from error
