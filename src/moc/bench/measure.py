"""The rounds: every measurement once per round, so that a busy machine is busy for all alike."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from moc.bench import peers
from moc.bench.limits import Mapping, write_streamed, write_synced
from moc.bench.ours import Ours
from moc.bench.state import Shape, State
from moc.errors import ConfigError
from moc.snapshot.room import available_ram, usable_bytes

__all__ = ["MEASURES", "Result", "Spread", "measure", "need"]

MEASURES = {
    "memcpy": "memcpy to tmpfs, one thread",
    "snapshot": "moc: snapshot, trainer idle",
    "stall": "moc: stall of a step, overlapped",
    "dcp_async_blocked": "dcp.async_save: blocked",
    "write": "one write + fsync",
    "write_streamed": "the same, written out early",
    "persist": "moc: snapshot done to committed",
    "torch_save": "torch.save + fsync: blocked",
    "dcp_save": "dcp.save: blocked",
    "dcp_async": "dcp.async_save: until durable",
}
"""What is measured, by name in the results: a line for people."""

_FEWEST_FOR_MEMORY = 5  # state, mapping, three buffers
_STEPS = (
    "ours",
    "write",
    "write_streamed",
    "memcpy",
    "stall",
    "torch_save",
    "dcp_save",
    "dcp_async",
)
_OVERLAP = 3.0  # forward and backward in memcpys: long enough for the copy to end


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Result:
    """What came out; seconds and bytes by name, one per round.

    Attributes:
        state_bytes: parameters and moments.
        tensors: how many.
        secs: seconds of each round.
        nbytes: bytes of each round.
        loads: load average (1 minute) before each round and at the end.
        notes: what could not be measured, and why.
    """

    state_bytes: int
    tensors: int
    secs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nbytes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    loads: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, secs: float, nbytes: int) -> None:
        """Note one measurement."""
        self.secs[name].append(secs)
        self.nbytes[name].append(nbytes)

    def rates(self, name: str) -> list[float]:
        """Bytes per second, one per round."""
        return [n / s for n, s in zip(self.nbytes[name], self.secs[name], strict=True)]

    def speed(self, name: str, limit: str) -> Spread:
        """Speed as a share of a limit's, round by round."""
        pairs = zip(self.rates(name), self.rates(limit), strict=True)
        return Spread.of([mine / most for mine, most in pairs])

    def times(self, name: str, limit: str) -> Spread:
        """Duration in multiples of a limit's, round by round."""
        pairs = zip(self.secs[name], self.secs[limit], strict=True)
        return Spread.of([mine / least for mine, least in pairs])


def need(nbytes: int, *, with_peers: bool) -> tuple[int, int]:
    """Bytes of memory and of storage that a state of this size takes at most."""
    return nbytes * (_FEWEST_FOR_MEMORY + with_peers), nbytes * 4


def measure(
    shape: Shape,
    *,
    rounds: int,
    directory: Path,
    memory_dir: Path,
    k_snapshot: int | None = None,
    k_persist: int | None = None,
    with_peers: bool = True,
    tell: Callable[[int, int, str], None] = lambda _done, _all, _what: None,
) -> Result:
    """Measure; everything is written below a new folder, which is gone afterwards.

    Args:
        shape: of the state.
        rounds: how often.
        directory: where on storage; it must exist.
        memory_dir: the memory tier.
        k_snapshot: experts per MoE layer in a snapshot; None for all.
        k_persist: experts per MoE layer that are persisted; None for all.
        with_peers: measure torch's own ways, too.
        tell: hears how many measurements are done, of how many, and what comes next.

    Raises:
        ConfigError: there is not enough room in memory or on storage.
    """
    _check_room(shape.nbytes, directory, memory_dir, with_peers=with_peers)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="moc-bench-", dir=directory))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bench = _Bench(shape, folder, memory_dir, stack, with_peers=with_peers)
        names = [n for n in _STEPS if with_peers or not n.startswith(("torch", "dcp"))]
        total = len(names) * rounds + 1
        tell(0, total, "first saves")
        ours = Ours(bench.state, folder, memory_dir, k_snapshot=k_snapshot, k_persist=k_persist)
        stack.callback(ours.close)
        bench.warm_up(ours)
        for number in range(rounds):
            bench.result.loads.append(os.getloadavg()[0])
            turn = number % len(names)  # whoever comes first or last, does so by turns
            for index, name in enumerate(names[turn:] + names[:turn]):
                tell(number * len(names) + index + 1, total, name)
                os.sync()
                bench.run(name, ours)
        bench.result.loads.append(os.getloadavg()[0])
        tell(total, total, "")
    return bench.result


class _Bench:
    """One measurement of each kind at a time."""

    def __init__(
        self, shape: Shape, folder: Path, memory_dir: Path, stack: ExitStack, *, with_peers: bool
    ) -> None:
        self.state = State(shape)
        self.result = Result(self.state.nbytes, len(self.state.tensors()))
        self._folder = folder
        self._mapping = Mapping(memory_dir, self.state.nbytes)
        self._dcp_async: peers.DcpAsync | None = None
        if with_peers:
            try:
                self._dcp_async = peers.DcpAsync()
                stack.callback(self._dcp_async.close)
            except ImportError as error:
                self.result.notes.append(f"dcp.async_save: torch {torch.__version__}: {error}")

    def warm_up(self, ours: Ours) -> None:
        """First uses, which are not counted."""
        ours.warm_up()
        self._memcpy_secs = 0.0
        self._memcpy()
        if self._dcp_async is not None:
            self._async()
        self.result.secs.clear()
        self.result.nbytes.clear()

    def run(self, name: str, ours: Ours) -> None:
        match name:
            case "ours":
                save = ours.save()
                self.result.add("snapshot", save.snapshot_secs, save.snapshot_bytes)
                self.result.add("persist", save.persist_secs, save.persist_bytes)
            case "stall":
                secs = ours.stall(_OVERLAP * self._memcpy_secs)
                self.result.add("stall", secs, self.state.nbytes)
            case "memcpy":
                self._memcpy()
            case "write":
                memory = self._mapping.memory
                self._timed(name, lambda path: write_synced(path, memory))
            case "write_streamed":
                memory = self._mapping.memory
                self._timed(name, lambda path: write_streamed(path, memory))
            case "torch_save":
                self._timed(name, lambda path: peers.torch_save(self.state.dicts(), path))
            case "dcp_save":
                self._timed(name, lambda path: peers.dcp_save(self.state.dicts(), path))
            case "dcp_async" if self._dcp_async is not None:
                self._async()

    def _memcpy(self) -> None:
        start = perf_counter()
        self._mapping.fill(self.state.tensors())
        self._memcpy_secs = perf_counter() - start
        self.result.add("memcpy", self._memcpy_secs, self.state.nbytes)

    def _async(self) -> None:
        assert self._dcp_async is not None
        path = self._folder / "dcp_async"
        blocked, durable = self._dcp_async.save(self.state.dicts(), path)
        self.result.add("dcp_async_blocked", blocked, self.state.nbytes)
        self.result.add("dcp_async", durable, self.state.nbytes)
        _remove(path)

    def _timed(self, name: str, write: Callable[[Path], None]) -> None:
        path = self._folder / name
        start = perf_counter()
        write(path)
        self.result.add(name, perf_counter() - start, self.state.nbytes)
        _remove(path)


def _check_room(nbytes: int, directory: Path, memory_dir: Path, *, with_peers: bool) -> None:
    if not directory.is_dir() or not memory_dir.is_dir():
        missing = memory_dir if directory.is_dir() else directory
        raise ConfigError(f"{missing} is no directory; make it first")
    memory, storage = need(nbytes, with_peers=with_peers)
    free_ram, tmpfs = available_ram(), usable_bytes(memory_dir)
    for what, needed, free in (
        (str(directory), storage, usable_bytes(directory)),
        (str(memory_dir), 4 * nbytes, tmpfs),
        ("memory", memory, memory if free_ram is None else free_ram),
    ):
        if needed > free:
            raise ConfigError(
                f"a state of {nbytes / 1e6:.0f} MB takes up to {needed / 1e6:.0f} MB of {what}, "
                f"where {free / 1e6:.0f} MB are free; use a smaller --mb"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
