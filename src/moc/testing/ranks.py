"""Ranks for tests: forked processes over gloo, or threads of this one.

A fork of a process that has torch imported starts four ranks in half a second, where four fresh
processes take fifteen. That holds only while no other thread lives here and nothing parallel has
run, so `start_ranks` refuses to fork beside Python threads, and children use one torch thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle  # noqa: TID251 - between a test and its own children, nothing on disk
import selectors
import shutil
import signal
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - ranks as threads, in tests
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist  # noqa: TID251 - plays the trainer that sets it up
from torch.distributed import FileStore  # type: ignore[attr-defined]  # noqa: TID251

from moc import knobs
from moc.comm.group import Group
from moc.comm.local_group import LocalGroup
from moc.errors import DeadlineError

__all__ = ["Died", "RankFailed", "Ranks", "reach", "run_ranks", "run_threads", "start_ranks"]

_GRACE_SECS = 5.0
"""How long the other ranks may go on after one failed: they should notice by themselves."""

_FRAME = struct.Struct("<cQ")  # kind of message, length
_REACHED, _RESULT, _ERROR = b"r", b"v", b"e"


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """In place of a result: a signal ended this rank."""

    rank: int
    signal: int


class RankFailed(Exception):
    """A rank raised, or ended without a result; its own error is the cause where there is one.

    Attributes:
        rank: the first that failed.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank = rank


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: object,
    timeout_secs: float = 60,
    init: bool = True,
    allow_death: bool = False,
    on_start: Callable[[Ranks], None] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on n forked ranks and give back what each returned, in rank order.

    Args:
        fn: any function, closures too; it asks ``torch.distributed`` for its rank. Without
            ``init`` it gets the rank as first argument.
        n: number of ranks.
        args: given to every rank, by fork: not copied, not pickled.
        timeout_secs: deadline for everything; also the group's timeout.
        init: set up a gloo group over a file store.
        allow_death: give a `Died` for a rank that a signal ended, instead of raising.
        on_start: called in this process once all ranks are forked.

    Raises:
        RankFailed: a rank raised, or ended without a result.
        DeadlineError: the deadline passed; has the ranks' tracebacks. All ranks are killed.
    """
    with start_ranks(
        fn, n, *args, timeout_secs=timeout_secs, init=init, allow_death=allow_death
    ) as ranks:
        if on_start is not None:
            on_start(ranks)
        return ranks.join()


def start_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: object,
    timeout_secs: float = 60,
    init: bool = True,
    allow_death: bool = False,
) -> Ranks:
    """Fork ranks as `run_ranks` does, and leave them running. Use the result in ``with``."""
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if others:
        raise RuntimeError(f"a fork beside threads may deadlock; still alive: {others}")
    ranks = Ranks(timeout_secs=timeout_secs, allow_death=allow_death)
    try:
        for rank in range(n):
            ranks._fork(_Task(fn, args, rank, n, ranks.folder if init else None, timeout_secs))
    except BaseException:
        ranks.close()
        raise
    return ranks


def reach(name: str) -> None:
    """Tell the parent, from within a rank, that it got here; see `Ranks.wait_reached`."""
    assert _up is not None, "not in a rank that start_ranks forked"
    _send(_up, _REACHED, name.encode())


def run_threads(
    fn: Callable[..., Any], n: int, *args: object, timeout_secs: float = 10
) -> list[Any]:
    """Run ``fn(group, *args)`` on n ranks that are threads; results in rank order.

    The error of the lowest rank that failed by itself is raised; one that failed only because
    another was gone comes last.
    """
    groups = LocalGroup.make(n, timeout_secs)

    def one(group: Group) -> Any:
        try:
            return fn(group, *args)
        finally:
            group.close()

    with ThreadPoolExecutor(n, thread_name_prefix="rank") as pool:
        futures = [pool.submit(one, group) for group in groups]
    errors = [error for error in (future.exception() for future in futures) if error]
    if errors:
        raise min(errors, key=lambda e: isinstance(e, LocalGroup.Gone))
    return [future.result() for future in futures]


class Ranks:
    """Forked ranks at work. Leaving the ``with`` block kills those that are still alive.

    Attributes:
        pids: process ids, by rank.
        folder: a folder of these ranks, removed at the end.
    """

    def __init__(self, *, timeout_secs: float, allow_death: bool) -> None:
        self.pids: list[int] = []
        self.folder = Path(tempfile.mkdtemp(prefix="moc-ranks-"))
        self._deadline = knobs.monotonic() + timeout_secs
        self._timeout_secs = timeout_secs
        self._allow_death = allow_death
        self._channels: list[int] = []  # what each rank sends, read end
        self._received: list[bytearray] = []
        self._reached: list[set[str]] = []
        self._outcomes: dict[int, _Outcome] = {}  # in order of arrival
        self._alive: set[int] = set()
        self._closed = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to a rank, by default the one that it cannot notice."""
        if rank in self._alive:
            os.kill(self.pids[rank], sig)

    def wait_reached(self, rank: int, name: str) -> None:
        """Wait until a rank has called ``reach(name)``.

        Raises:
            RankFailed: it ended before.
            DeadlineError: the deadline passed.
        """
        while name not in self._reached[rank]:
            if rank not in self._alive:
                raise RankFailed(rank, f"ended without reaching {name!r}")
            self._listen(f"rank {rank} to reach {name!r}")

    def join(self) -> list[Any]:
        """Wait for all ranks and give back their results; see `run_ranks`."""
        n = len(self.pids)
        while len(self._outcomes) < n:
            self._listen(f"results of ranks {sorted(set(range(n)) - set(self._outcomes))}")
        self.close()
        self._raise_failures()
        return [self._outcomes[rank].value for rank in range(n)]

    def close(self) -> None:
        """End the ranks that are alive, also those that have given their results; clean up."""
        if self._closed:
            return
        self._closed = True
        for rank in sorted(self._alive):
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        self._alive.clear()
        for channel in self._channels:
            os.close(channel)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _fork(self, task: _Task) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 counts the idle pools that numpy and torch start at import.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for descriptor in (*self._channels, read):
                os.close(descriptor)
            _be_rank(task, write, self.folder)
        os.close(write)
        self.pids.append(pid)
        self._alive.add(task.rank)
        self._channels.append(read)
        self._received.append(bytearray())
        self._reached.append(set())

    def _raise_failures(self, more: str = "") -> None:
        failed = [(r, o) for r, o in self._outcomes.items() if not o.ok(self._allow_death)]
        if failed:
            # The first to arrive is the reason; the others met its absence.
            rank, first = failed[0]
            also = [f"also rank {r} {o.text.strip().splitlines()[-1]}" for r, o in failed[1:]]
            raise RankFailed(rank, "\n".join([first.text, *also, more])) from first.error

    def _listen(self, what: str) -> None:
        """Take in what ranks sent, for a moment; find out who ended."""
        if knobs.monotonic() > self._deadline:
            places = self._tracebacks()
            self.close()
            self._raise_failures(places)
            raise DeadlineError(f"waited {self._timeout_secs:g} s for {what}\n{places}")
        with selectors.DefaultSelector() as selector:
            for rank in self._alive - set(self._outcomes):
                selector.register(self._channels[rank], selectors.EVENT_READ, rank)
            for event, _ in selector.select(timeout=0.02):
                self._read(event.data)
        for rank in sorted(self._alive):
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                while self._read(rank):
                    pass
                self._alive.discard(rank)
                if rank not in self._outcomes:
                    self._settle(rank, _Outcome.of_status(rank, os.waitstatus_to_exitcode(status)))

    def _read(self, rank: int) -> bool:
        """Take in one read from a rank; False at the end."""
        os.set_blocking(self._channels[rank], False)
        try:
            data = os.read(self._channels[rank], 1 << 20)
        except BlockingIOError:
            return False
        buffer = self._received[rank]
        buffer += data
        while len(buffer) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(buffer)
            if len(buffer) < _FRAME.size + size:
                break
            body = bytes(buffer[_FRAME.size : _FRAME.size + size])
            del buffer[: _FRAME.size + size]
            if kind == _REACHED:
                self._reached[rank].add(body.decode())
            else:
                value, text = pickle.loads(body)  # noqa: S301 - from our own child
                outcome = _Outcome(value=value) if kind == _RESULT else _Outcome(text, error=value)
                self._settle(rank, outcome)
        return bool(data)

    def _settle(self, rank: int, outcome: _Outcome) -> None:
        self._outcomes[rank] = outcome
        if not outcome.ok(self._allow_death):
            self._deadline = min(self._deadline, knobs.monotonic() + _GRACE_SECS)

    def _tracebacks(self) -> str:
        """Where the ranks without a result are."""
        texts = []
        waiting = sorted(self._alive - set(self._outcomes))
        for rank in waiting:
            os.kill(self.pids[rank], signal.SIGUSR1)
        knobs.sleep(0.2)  # a stopped rank would never answer
        for rank in waiting:
            path = self.folder / f"traceback-{rank}"
            text = path.read_text() if path.exists() else ""
            texts.append(f"rank {rank} is at\n{text or '  (does not answer)'}")
        return "\n".join(texts)


@dataclass(frozen=True, slots=True)
class _Task:
    fn: Callable[..., Any]
    args: Sequence[object]
    rank: int
    n: int
    folder: Path | None  # of the file store; None: no group
    timeout_secs: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: str = ""
    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of_status(cls, rank: int, code: int) -> _Outcome:
        if code < 0:
            text = f"was ended by {signal.Signals(-code).name}"
            return cls(text, value=Died(rank=rank, signal=-code))
        return cls(f"left with exit code {code} and without a result")

    def ok(self, allow_death: bool) -> bool:
        return not self.text or (allow_death and isinstance(self.value, Died))


_up: int | None = None  # in a rank: where its messages go


def _be_rank(task: _Task, up: int, folder: Path) -> NoReturn:
    """The life of a forked child."""
    global _up
    _up = up
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: go when the test run goes
        gc.freeze()
        with open(folder / f"traceback-{task.rank}", "w") as file:
            faulthandler.register(signal.SIGUSR1, file=file)
            try:
                value = _work(task)
                kind, body = _RESULT, pickle.dumps((value, ""))
            except BaseException as error:  # noqa: BLE001 - it is raised in the parent
                kind, body = _ERROR, _pickle_error(error)
            sys.stdout.flush()
            sys.stderr.flush()
            _send(up, kind, body)
            while kind == _RESULT:
                # A socket that closes with bytes unread resets, and takes from a slower rank
                # what was already sent to it: so stay until the parent has all results.
                signal.pause()
    finally:
        os._exit(1)


def _work(task: _Task) -> Any:
    torch.set_num_threads(1)
    if task.folder is None:
        return task.fn(task.rank, *task.args)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(task.folder / "store"), task.n),
        rank=task.rank,
        world_size=task.n,
        timeout=timedelta(seconds=task.timeout_secs),
    )
    return task.fn(*task.args)


def _pickle_error(error: BaseException) -> bytes:
    text = f"raised\n{''.join(traceback.format_exception(error))}"
    try:
        body = pickle.dumps((error, text))
        pickle.loads(body)  # noqa: S301 - some errors only fail on the way back
    except Exception:  # noqa: BLE001 - the text says it all
        return pickle.dumps((None, text))
    return body


def _send(channel: int, kind: bytes, body: bytes) -> None:
    data = memoryview(_FRAME.pack(kind, len(body)) + body)
    while data:
        data = data[os.write(channel, data) :]
