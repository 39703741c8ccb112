"""What a trainer and its helper process say to each other: framed msgpack over one socket."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import msgspec

from moc.core.faults import FaultScript
from moc.core.piece import PieceRecord
from moc.core.versions import Version
from moc.persist.endpoint import Address

__all__ = [
    "Abandon",
    "Abandoned",
    "Channel",
    "Close",
    "Committed",
    "Digest",
    "Failed",
    "FromHelper",
    "Hello",
    "PartDone",
    "Persist",
    "PersistPart",
    "Persisted",
    "Pruned",
    "ToHelper",
    "Warned",
]


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message: who the helper works for.

    Attributes:
        url: of the store.
        rank: of the trainer; rank 0's helper is the coordinator.
        world_size: how many receipts make a step.
        attempt: the trainer's attempt; helpers write nothing of another one.
        keep_latest_k: see `Policy`.
        keep_every: see `Policy`.
        timeout_secs: how long the coordinator waits for the other ranks' receipts.
        grace_secs: how long to go on when the trainer is gone.
        faults: operations of the store that are made to fail, for tests.
        unsound: keys of data files in which a restore found bad bytes: not to be referenced.
        node_local: ``url`` is this node's own disk, for its ranks' data files.
        control: where the other keys are; None on the coordinator's node, where ``url`` has them.
        token: opens the endpoint that the coordinator serves.
        copiers: ranks whose helpers keep copies of manifests, one on each of the other nodes.
    """

    url: str
    rank: int
    world_size: int
    attempt: int
    keep_latest_k: int | None
    keep_every: int | None
    timeout_secs: float
    grace_secs: float
    faults: FaultScript | None = None
    unsound: list[str] = []
    node_local: bool = False
    control: Address | None = None
    token: bytes = b""
    copiers: list[int] = []


class PersistPart(msgspec.Struct, frozen=True, tag=True):
    """Write one file now; its records join the receipt of the `Persist` that follows.

    Rounds of a save that is larger than a buffer; the trainer waits for `PartDone`.
    """

    version: Version
    buffer: str
    key: str
    records: list[PieceRecord]


class Persist(msgspec.Struct, frozen=True, tag=True):
    """Write files from a sealed buffer and then the receipt; the coordinator goes on to commit.

    Records are named by their index in the seal: a message stays far below the socket's buffer,
    so that the trainer never waits for a helper that is busy writing.
    """

    version: Version
    buffer: str
    files: list[tuple[str, list[int]]]
    saved: list[list[int]]


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Digest the pieces of a sealed buffer that is not persisted, and note them beside it."""

    version: Version
    buffer: str


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Give the commit of this version up; a rank has failed."""

    version: Version
    reason: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Finish what is in flight within the deadline and exit."""

    deadline_secs: float


class PartDone(msgspec.Struct, frozen=True, tag=True):
    """The files of a `PersistPart` are durable."""

    version: Version
    nbytes: int


class Persisted(msgspec.Struct, frozen=True, tag=True):
    """This rank's files and receipt are durable; the step is not yet committed.

    Attributes:
        version: of the save.
        nbytes: of the files that were written.
        secs: how long it took.
        referenced: bytes of unchanged pieces that were not written.
        time: when, seconds since 1970.
    """

    version: Version
    nbytes: int
    secs: float
    referenced: int = 0
    time: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of the save failed for good.

    Attributes:
        version: of the save.
        error: what went wrong.
        path: the file or key, empty where none is to blame.
        base_gone: the committed step that the save builds on is missing or damaged.
    """

    version: Version
    error: str
    path: str
    secs: float = 0.0
    base_gone: Version | None = None


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The manifest is durable: the step exists.

    Attributes:
        version: of the step.
        nbytes: of the files that all ranks wrote for it.
        secs: from the start of rank 0's persist.
        referenced: bytes of unchanged pieces that no rank wrote.
        slowest_rank: the rank whose persist took longest.
        slowest_secs: what it took.
        oldest_expert_age: steps between this step and the oldest expert version in it.
        time: when, seconds since 1970.
    """

    version: Version
    nbytes: int
    secs: float
    referenced: int = 0
    slowest_rank: int = -1
    slowest_secs: float = 0.0
    oldest_expert_age: int = 0
    time: float = 0.0


class Abandoned(msgspec.Struct, frozen=True, tag=True):
    """The coordinator gave the commit up; names the ranks that were missing."""

    version: Version
    reason: str
    secs: float = 0.0
    time: float = 0.0


class Pruned(msgspec.Struct, frozen=True, tag=True):
    """Retention removed these steps and files."""

    versions: list[Version]
    files: int
    secs: float = 0.0


class Warned(msgspec.Struct, frozen=True, tag=True):
    """Something went wrong that costs no state (a failed delete, say)."""

    text: str


ToHelper = Hello | PersistPart | Persist | Digest | Abandon | Close
FromHelper = PartDone | Persisted | Failed | Committed | Abandoned | Pruned | Warned

_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class Channel:
    """Framed messages over a connected stream socket; several threads may send."""

    def __init__(self, sock: socket.socket, receives: object) -> None:
        """Wrap a socket; ``receives`` is the union of messages that arrive here."""
        self.sock = sock
        self.closed = False
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone.
        """
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self.sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def receive(self, timeout_secs: float = 0.0) -> list[object]:
        """Messages that are there, or arrive within the timeout; sets ``closed`` at the end.

        One system call when nothing is there.
        """
        messages: list[object] = []
        while not self.closed and self._poll.poll(timeout_secs * 1000):
            try:
                data = self.sock.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self._buffer += data
            messages += self._take()
            if messages:
                timeout_secs = 0.0
        return messages

    def _take(self) -> Iterator[object]:
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield self._decoder.decode(body)
