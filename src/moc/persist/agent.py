"""The helper process: persists, digests, writes receipts; rank 0's also commits and prunes.

It runs in a process session of its own and imports no torch, so that it outlives a killed trainer
and costs 50 ms and a few MB. It finishes or gives up within a deadline when its trainer is gone.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from moc import knobs
from moc.choose.reference import Split, split, unchanged
from moc.core.manifest import (
    CommitHead,
    DigestFile,
    FileInfo,
    Manifest,
    Receipt,
    digests_path,
    encode_json,
    manifest_key,
    receipt_key,
)
from moc.core.piece import PieceRecord
from moc.core.versions import Timeline, Version
from moc.errors import DamagedError, KeyMissing, MocError, StoreError
from moc.persist.commit import (
    commit,
    load_manifest,
    load_timeline,
    missing_receipts,
    plan_sweep,
    prune,
)
from moc.persist.endpoint import ControlClient, Endpoint
from moc.persist.messages import (
    Abandon,
    Abandoned,
    Channel,
    Close,
    Committed,
    Digest,
    Failed,
    Hello,
    PartDone,
    Persist,
    Persisted,
    PersistPart,
    Pruned,
    ToHelper,
    Warned,
)
from moc.persist.mirror import copy_manifests, is_copied, sweep_node
from moc.persist.writer import digest_records, read_seal, shared_buffer, write_file
from moc.store import open_store
from moc.store.base import Store
from moc.store.node_local import NodeLocalStore
from moc.store.wrap import FaultyStore, RetryingStore

__all__ = ["Agent", "main"]

_PATIENCE_SECS = 60.0  # with an operation of the store that fails
_REQUEST_SECS = 20.0  # for one answer of the coordinator's endpoint
_HEARTBEAT_SECS = 1.0  # how often an idle helper looks whether its trainer lives
_POLL_SECS = (0.01, 0.5)  # first and longest pause between looks for receipts
_COPY_SECS = 5.0  # at the end, for copies of the last manifest on other nodes


class _Files:
    """Files of a receipt in the making, and where pieces lie in them."""

    def __init__(self) -> None:
        self.infos: list[FileInfo] = []
        self.pieces: list[PieceRecord] = []

    def copy(self) -> _Files:
        copied = _Files()
        copied.infos, copied.pieces = list(self.infos), list(self.pieces)
        return copied

    def add(self, info: FileInfo, records: Iterable[PieceRecord]) -> None:
        """Pieces that lie in the file."""
        if info not in self.infos:
            self.infos.append(info)
        file = self.infos.index(info)
        self.pieces += [PieceRecord(r.piece, file, r.offset, r.digest) for r in records]


class _BaseGone(MocError):
    """What a save builds on cannot be read and never will: no try is worth the time."""

    def __init__(self, base: Version | None, error: MocError) -> None:
        super().__init__(
            f"it builds on step {base}, whose manifest is gone or damaged ({error}); the next "
            "save is full"
        )
        self.base = base


class Agent:
    """One trainer's helper. Single-threaded: at most one persist is in flight."""

    def __init__(
        self, hello: Hello, store: Store, channel: Channel, endpoint: Endpoint | None = None
    ) -> None:
        """Work for the trainer that said hello."""
        self._hello = hello
        self._endpoint = endpoint
        self._copying: Version | None = None  # a step whose manifest this node is to have
        self._copy_by = 0.0
        self._told_by = 0.0
        self._last: Version | None = None  # newest commit, for other nodes to copy
        # Far below what a trainer waits for this process: it hears nothing meanwhile.
        patience = min(_PATIENCE_SECS, hello.timeout_secs / 4)
        self._routed = store if isinstance(store, NodeLocalStore) else None
        if hello.faults is not None:
            store = FaultyStore(store, hello.faults)
        self._store = RetryingStore(store, deadline_secs=patience, on_retry=self._warn)
        self._channel = channel
        self._parts: dict[Version, _Files] = {}
        self._timeline = Timeline()
        self._awaited: Version | None = None
        self._since = 0.0
        self._began = 0.0
        self._deadline = 0.0
        self._pause = _POLL_SECS[0]
        self._closing = False
        self._parent = os.getppid()

    def run(self) -> None:
        """Serve until the trainer says so, or is gone and nothing is left to finish."""
        while not (self._closing and self._is_idle() and self._is_copied_elsewhere()):
            is_idle = self._is_idle() and not self._closing
            timeout = _HEARTBEAT_SECS if is_idle else self._pause
            if self._channel.closed and not is_idle:
                knobs.sleep(timeout)
            for message in self._channel.receive(timeout):
                self._handle(message)
            # A worker that the trainer forked keeps the socket open beyond the trainer's death.
            orphaned = self._channel.closed or os.getppid() != self._parent
            if orphaned and not self._closing:
                self._close(self._hello.grace_secs)
            if self._awaited is not None:
                self._look_for_receipts(self._awaited)
            if self._copying is not None:
                self._copy(self._copying)

    def _is_idle(self) -> bool:
        return self._awaited is None and self._copying is None

    def _is_copied_elsewhere(self) -> bool:
        """Whether the other nodes have the last manifest, or have had the time to read it."""
        if self._endpoint is None or self._last is None or knobs.monotonic() > self._told_by:
            return True
        return self._endpoint.was_told(manifest_key(self._last), self._hello.copiers)

    def _handle(self, message: object) -> None:
        match message:
            case PersistPart():
                self._attempt(message.version, self._persist_part, message)
            case Persist():
                self._attempt(message.version, self._persist, message)
            case Digest():
                self._digest(message)
            case Abandon():
                if self._awaited == message.version:
                    self._give_up(message.reason)
            case Close():
                self._close(message.deadline_secs)

    def _close(self, secs: float) -> None:
        self._closing = True
        self._deadline = min(self._deadline, knobs.monotonic() + secs)
        self._pause = _POLL_SECS[0]
        self._copy_by = min(self._copy_by, knobs.monotonic() + min(secs, _COPY_SECS))

    def _attempt(self, version: Version, work, message) -> None:  # type: ignore[no-untyped-def]
        """Run a persist and report the outcome. The store has its own tries, and tells of them."""
        self._began = knobs.monotonic()
        try:
            work(message)
        except (MocError, OSError) as error:
            self._parts.pop(version, None)
            path = getattr(error, "key", "") or getattr(error, "filename", "") or ""
            gone = error.base if isinstance(error, _BaseGone) else None
            self._say(Failed(version, str(error), str(path), self._secs(), gone))

    def _persist_part(self, message: PersistPart) -> None:
        with shared_buffer(message.buffer) as view:
            records = digest_records(view, message.records)
            written = write_file(self._store, message.key, message.version, view, records)
        self._parts.setdefault(message.version, _Files()).add(*written)
        self._say(PartDone(message.version, written[0].nbytes))

    def _persist(self, message: Persist) -> None:
        version, hello = message.version, self._hello
        with shared_buffer(message.buffer) as view:
            seal = read_seal(message.buffer, version)
            records = digest_records(view, seal.pieces)
            _note_digests(message.buffer, version, records)
            files = self._parts.get(version, _Files()).copy()
            head = msgspec.structs.replace(seal.head, saved=message.saved)
            wanted = [records[i] for _, indices in message.files for i in indices]
            fate, base = self._decide(head, wanted)
            skipped = {r.piece for r in fate.referenced}
            for key, indices in message.files:
                chosen = [records[i] for i in indices if records[i].piece not in skipped]
                changing = [r for r in chosen if r.piece not in fate.moving]
                moving = [r for r in chosen if r.piece in fate.moving]
                for name, group in ((key, changing), (_unchanged_key(key), moving)):
                    if group:
                        files.add(*write_file(self._store, name, version, view, group))
            for index, found in groupby(fate.referenced, key=lambda r: r.file):
                assert base is not None
                files.add(base.files[index], found)
            secs = self._secs()
            # Still under the lock: whoever waits for the lock finds the receipt, too.
            receipt = Receipt(
                version=version,
                rank=hello.rank,
                world_size=hello.world_size,
                files=files.infos,
                pieces=files.pieces,
                head=head if hello.rank == 0 else None,
                persist_secs=secs,
            )
            self._store.put_new(receipt_key(version, hello.rank), [encode_json(receipt)])
        self._parts.pop(version, None)
        nbytes = sum(f.nbytes for f in files.infos if f.is_of(version))
        referenced = sum(r.piece.nbytes for r in fate.referenced)
        self._say(Persisted(version, nbytes, secs, referenced, knobs.now_secs()))
        if hello.rank == 0:
            self._awaited, self._since = version, self._began
            self._deadline = knobs.monotonic() + (
                min(hello.timeout_secs, hello.grace_secs) if self._closing else hello.timeout_secs
            )
            self._pause = _POLL_SECS[0]
        elif hello.rank in hello.copiers:
            self._copying, self._pause = version, _POLL_SECS[0]
            self._copy_by = knobs.monotonic() + (
                min(hello.timeout_secs, _COPY_SECS) if self._closing else hello.timeout_secs
            )

    def _secs(self) -> float:
        """Since the persist in hand began, with the tries that failed."""
        return knobs.monotonic() - self._began

    def _decide(
        self, head: CommitHead, records: Sequence[PieceRecord]
    ) -> tuple[Split, Manifest | None]:
        """Which pieces are referenced."""
        base, fate = None, Split()
        if head.base is not None:
            try:
                base = load_manifest(self._store, head.base)
            except (KeyMissing, DamagedError) as error:
                raise _BaseGone(head.base, error) from error
            same = unchanged(records, base)
            used = {r.file for r in same}
            infos = [base.files[i] for i in sorted(used)]
            unsound = [info.key for info in infos if not self._is_sound(info)]
            fate = split(same, head.saved, base, unsound)
        return fate, base

    def _is_sound(self, info: FileInfo) -> bool:
        """Whether a file may be referenced, as far as can be told without reading it."""
        try:
            return info.key not in self._hello.unsound and (
                self._store.size(info.key) == info.nbytes
            )
        except KeyMissing:
            return False

    def _digest(self, message: Digest) -> None:
        try:
            with shared_buffer(message.buffer) as view:
                seal = read_seal(message.buffer, message.version)
                _note_digests(message.buffer, message.version, digest_records(view, seal.pieces))
        except (BlockingIOError, DamagedError):
            return  # the trainer has taken the buffer for a newer snapshot: nothing is lost
        except OSError as error:
            self._say(Warned(f"snapshot of step {message.version} was not digested: {error}"))

    def _look_for_receipts(self, version: Version) -> None:
        is_late = knobs.monotonic() > self._deadline
        manifest, trouble = None, ""
        try:
            manifest = commit(self._store, version)
            if manifest is not None and not self._look_at_attempts().is_live(version):
                self._give_up("a later attempt has taken this run over; its restore went back")
                return
            if manifest is None and is_late:
                missing = [*missing_receipts(self._store, version, self._hello.world_size)]
                trouble = f"no receipt of ranks {missing} within the deadline"
        except (StoreError, OSError, DamagedError) as error:
            trouble = f"commit failed until the deadline: {error}"
            self._say(Warned(f"commit of step {version} failed, trying again: {error}"))
        if manifest is not None:
            self._awaited, self._last = None, version
            self._told_by = knobs.monotonic() + min(self._hello.timeout_secs, _COPY_SECS)
            nbytes = sum(f.nbytes for f in manifest.files if f.is_of(version))
            secs = knobs.monotonic() - self._since
            self._say(
                Committed(
                    version,
                    nbytes,
                    secs,
                    manifest.referenced_bytes,
                    manifest.slowest_rank,
                    manifest.slowest_secs,
                    manifest.oldest_expert_age,
                    knobs.now_secs(),
                )
            )
            self._after_commit(version)
        elif is_late:
            self._give_up(trouble)
        else:
            self._pause = min(self._pause * 2, _POLL_SECS[1])

    def _give_up(self, reason: str) -> None:
        if self._awaited is not None:
            secs = knobs.monotonic() - self._since
            self._say(Abandoned(self._awaited, reason, secs, knobs.now_secs()))
        self._awaited = None

    def _look_at_attempts(self) -> Timeline:
        """The attempts of the run; one request where there is no new one."""
        self._timeline = load_timeline(self._store, self._timeline)
        return self._timeline

    def _after_commit(self, version: Version) -> None:
        """The hint, and retention; neither costs a checkpoint when it fails."""
        hello, start = self._hello, knobs.monotonic()
        try:
            self._store.put("latest", f"{version.step}\n".encode())
            if hello.keep_latest_k is None:
                return
            timeline = self._look_at_attempts()
            if timeline.head != hello.attempt:
                return  # a later attempt owns the run now; pruning is its business
            plan = plan_sweep(
                self._store,
                timeline,
                hello.keep_latest_k,
                hello.keep_every,
                node_local=hello.node_local,
            )
            for problem in prune(self._store, plan):
                self._say(Warned(problem))
            if plan.retire or plan.delete:
                secs = knobs.monotonic() - start
                self._say(Pruned(list(plan.retire), len(plan.delete), secs))
        except (MocError, OSError) as error:
            self._say(Warned(f"after the commit of step {version}: {error}"))

    def _copy(self, version: Version) -> None:
        """Keep a copy of the step's manifest on this node, and only the data files it needs."""
        routed = self._routed
        assert routed is not None
        start = knobs.monotonic()
        try:
            if not is_copied(routed.local, routed.control, version):
                self._pause = min(self._pause * 2, _POLL_SECS[1])
                if start > self._copy_by:
                    self._copying = None  # abandoned, as the coordinator says elsewhere
                return
            self._copying = None
            there, timeline = copy_manifests(routed.local, routed.control)
            if self._hello.keep_latest_k is None or timeline.head != self._hello.attempt:
                return
            gone = sweep_node(routed.local, there, timeline)
        except (MocError, OSError) as error:
            self._copying = None
            self._say(Warned(f"this node has no copy of the manifest of step {version}: {error}"))
            return
        if gone:
            self._say(Pruned([], len(gone), knobs.monotonic() - start))

    def _warn(self, error: Exception) -> None:
        self._say(Warned(f"trying again: {error}"))

    def _say(self, message: object) -> None:
        try:
            self._channel.send(message)
        except OSError:
            self._channel.closed = True  # the trainer is gone; what is in flight is finished


def _note_digests(buffer: str, version: Version, records: list[PieceRecord]) -> None:
    path = digests_path(buffer)
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "wb") as file:
        file.write(encode_json(DigestFile(version=version, digests=[r.digest for r in records])))
    os.replace(temp, path)


def _unchanged_key(key: str) -> str:
    return key.removesuffix(".safetensors") + "-unchanged.safetensors"


def main(arguments: list[str] | None = None) -> int:
    """Entry point: ``python -m moc.persist.agent --fd N``; the rest comes as `Hello`."""
    parser = argparse.ArgumentParser(prog="moc.persist.agent")
    parser.add_argument("--fd", type=int, required=True, help="connected socket to the trainer")
    parser.add_argument("--memory", default="", help="memory directory, for people who run ps")
    parser.add_argument("--rank", type=int, default=0, help="rank, for people who run ps")
    parser.add_argument("--run", default="", help="URL of the run, for whoever looks for it")
    parser.add_argument("--listen", type=int, default=-1, help="socket to serve other nodes from")
    parser.add_argument("--trainer", type=int, default=0, help="process id of the trainer")
    options = parser.parse_args(arguments)
    channel = Channel(socket.socket(fileno=options.fd), ToHelper)
    hello: Hello | None = None
    rest: list[object] = []
    while hello is None and not channel.closed:
        for message in channel.receive(_HEARTBEAT_SECS):
            if isinstance(message, Hello):
                hello = message
            else:
                rest.append(message)
    if hello is None:
        return 0
    store = open_store(hello.url)
    endpoint = None
    if options.listen >= 0:
        endpoint = Endpoint(socket.socket(fileno=options.listen), hello.token, store)
    if hello.control is not None:
        timeout_secs = min(_REQUEST_SECS, hello.timeout_secs / 4)
        control = ControlClient(hello.control, hello.rank, timeout_secs)
        store = NodeLocalStore(store, control)
    agent = Agent(hello, store, channel, endpoint)
    for message in rest:
        agent._handle(message)
    agent.run()
    if endpoint is not None:
        endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
