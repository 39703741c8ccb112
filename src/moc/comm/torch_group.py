"""Ranks over torch.distributed: gloo, tensors of bytes and integers, no pickle.

The group is our own, so that training's collectives and ours cannot meet, and always gloo: the
values live on the host. It needs no thread of Python's: gloo's own carry a posted reduction on.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from moc import knobs
from moc.comm.group import Group, Pending, SingleGroup, name_ranks
from moc.errors import ConfigError, DeadlineError

__all__ = ["TorchGroup", "default_group", "init_process_group"]


def init_process_group(backend: str | None = None, *, timeout_secs: float = 120) -> None:
    """Set up torch.distributed under torchrun, in a way that outlives its restarts.

    After a restart torchrun hands the new ranks the store that the dead ones left their
    addresses in, and a plain ``init_process_group`` then waits for the dead (pytorch#135712,
    pytorch#167288). Here each start of the ranks has a prefix of its own in that store.

    Args:
        backend: as in torch; by default ``nccl`` where there is CUDA, else ``gloo``.
        timeout_secs: how long to wait for the other ranks, now and in every collective.

    Raises:
        ConfigError: torchrun's variables are not set.
        DeadlineError: the store or some rank did not answer in time.
    """
    host, port = knobs.master_addr(), knobs.master_port()
    if host is None or port is None:
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set: start the program with torchrun, or, for "
            "one process, leave this call out and pass layout=Layout.single()"
        )
    rank, world_size, timeout = knobs.rank(), knobs.world_size(), timedelta(seconds=timeout_secs)
    with _errors(f"store at {host}:{port} and {world_size} ranks"):
        # Without torchrun's own store (some rendezvous, other launchers) rank 0 hosts one.
        is_master = rank == 0 and not knobs.has_agent_store()
        store = TCPStore(host, port, is_master=is_master, timeout=timeout)
        dist.init_process_group(
            backend or ("nccl" if torch.cuda.is_available() else "gloo"),
            store=PrefixStore(f"attempt-{knobs.restart_count()}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


def default_group(timeout_secs: float) -> Group:
    """A group of all ranks of the job, however it was set up. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleGroup()
    return TorchGroup(timeout_secs)


class TorchGroup:
    """Ranks of an initialised torch.distributed job, over a gloo group of their own. Collective.

    Before each call a rank leaves its count of calls in the job's store (some 50 us, and nobody
    waits for it): so the message of a wait that runs out can name who is missing.

    Args:
        timeout_secs: how long a call waits for the other ranks.
        ranks: global ranks that take part; only these call this. By default all.
    """

    def __init__(self, timeout_secs: float, ranks: Sequence[int] | None = None) -> None:
        self._timeout_secs = timeout_secs
        with _errors("new gloo group"):
            process_group = dist.new_group(
                ranks=None if ranks is None else list(ranks),
                backend="gloo",
                timeout=timedelta(seconds=timeout_secs),
                use_local_synchronization=ranks is not None,
            )
        assert isinstance(process_group, dist.ProcessGroup), "this rank is not among `ranks`"
        self._process_group = process_group
        self._ranks = dist.get_process_group_ranks(process_group)  # global, by number in here
        self.rank = dist.get_rank(process_group)
        self.world_size = len(self._ranks)
        self._calls = 0
        self._posted: list[dist.Work] = []
        self._closed = False
        store = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"moc/{process_group.group_name}", store)
        atexit.register(self._abandon)

    def gather(self, value: bytes) -> list[bytes]:
        """See `Group.gather`."""
        with self._call("gather"):
            sizes = torch.zeros(self.world_size, dtype=torch.int64)
            self._all_gather(sizes, torch.tensor([len(value)]))
            longest = int(sizes.max())
            if not longest:
                return [b""] * self.world_size
            padded = torch.frombuffer(bytearray(value.ljust(longest, b"\0")), dtype=torch.uint8)
            table = torch.empty(self.world_size * longest, dtype=torch.uint8)
            self._all_gather(table, padded)
        rows = table.numpy().reshape(self.world_size, longest)
        return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def broadcast(self, value: bytes | None, src: int = 0) -> bytes:
        """See `Group.broadcast`."""
        is_source = self.rank == src
        assert value is not None or not is_source
        with self._call("broadcast"):
            size = torch.tensor([len(value) if is_source and value else 0])
            dist.broadcast(size, self._ranks[src], group=self._process_group)
            if not int(size):
                return b""
            if is_source and value:
                data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            else:
                data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, self._ranks[src], group=self._process_group)
        return data.numpy().tobytes()

    def post_min(self, values: Sequence[int]) -> Pending:
        """See `Group.post_min`."""
        return self._post(values, dist.ReduceOp.MIN)

    def post_sum(self, values: Sequence[int]) -> Pending:
        """See `Group.post_sum`."""
        return self._post(values, dist.ReduceOp.SUM)

    def close(self) -> None:
        """See `Group.close`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._abandon)
        if self._abandon() or not dist.is_initialized():
            return
        dist.destroy_process_group(self._process_group)

    def _post(self, values: Sequence[int], op: dist.ReduceOp.RedOpType) -> Pending:
        words = torch.tensor(list(values), dtype=torch.int64)
        with self._call("reduction"):
            work = dist.all_reduce(words, op=op, group=self._process_group, async_op=True)
        assert work is not None
        self._posted = [w for w in self._posted if not w.is_completed()] + [work]
        return _Reduction(self, words, work, self._calls)

    def _all_gather(self, output: torch.Tensor, value: torch.Tensor) -> None:
        dist.all_gather(list(output.chunk(self.world_size)), value, group=self._process_group)

    def _abandon(self) -> bool:
        """Whether posted reductions are under way; these then stay in memory for good.

        Gloo's destructor waits for them up to the timeout, at the latest when Python exits: a
        rank that left on an error would wait for ranks that are still at work.
        """
        under_way = [work for work in self._posted if not work.is_completed()]
        if not under_way:
            return False
        for kept in (self._process_group, *under_way):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return True

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        self._calls += 1
        with self._naming(f"{what}, call {self._calls} of this group", self._calls):
            self._store.set(str(self.rank), str(self._calls))
            yield

    @contextmanager
    def _naming(self, what: str, call: int, secs: float | None = None) -> Iterator[None]:
        try:
            with _errors(what):
                yield
        except DeadlineError as error:
            limit = self._timeout_secs if secs is None else secs
            waited = f"{what}: waited {limit:g} s on rank {self._ranks[self.rank]}"
            raise DeadlineError(f"{waited}; {self._missing(call)}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {self._missing(call)}") from error.__cause__

    def _missing(self, call: int) -> str:
        """Which ranks did not come to a call, for people."""
        missing = []
        try:
            for number, rank in enumerate(self._ranks):
                key = str(number)
                if not self._store.check([key]) or int(self._store.get(key)) < call:
                    missing.append(rank)
        except RuntimeError as error:
            return f"who is missing is unknown, as the job's store is gone ({error})"
        if not missing:
            return f"all {self.world_size} ranks came to it, but it did not end"
        return f"missing: {name_ranks(missing)} of {self.world_size}"


class _Reduction:
    """A reduction that gloo carries on."""

    def __init__(self, group: TorchGroup, words: torch.Tensor, work: dist.Work, call: int) -> None:
        self._group = group
        self._words = words
        self._work = work
        self._call = call

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_secs: float) -> list[int]:
        what = f"reduction, call {self._call} of this group"
        with self._group._naming(what, self._call, timeout_secs):
            self._work.wait(timedelta(seconds=timeout_secs))
        return [int(word) for word in self._words.tolist()]


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Sort c10d's errors, which are all RuntimeError, into waits that ran out and the rest."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise DeadlineError(f"{what}: {error}") from error
        raise RuntimeError(f"{what}: {error}") from error
