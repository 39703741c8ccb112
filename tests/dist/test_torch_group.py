"""Groups and layouts over gloo, on forked ranks; the rendezvous under torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from moc.comm.layout import Layout
from moc.comm.torch_group import TorchGroup, default_group, init_process_group
from moc.errors import DeadlineError, LayoutError
from moc.testing.group_suite import GroupSuite
from moc.testing.ranks import Died, reach, run_ranks, start_ranks

pytestmark = pytest.mark.dist


class TestTorchGroup(GroupSuite):
    @pytest.fixture
    def run(self):
        def run(fn: Any, *, timeout_secs: float = 10) -> list[Any]:
            return run_ranks(lambda: fn(TorchGroup(timeout_secs)), 3)

        return run


def test_the_default_group_is_all_ranks():
    def look() -> tuple[str, list[bytes]]:
        group = default_group(10)
        return type(group).__name__, group.gather(b"%d" % dist.get_rank())

    assert run_ranks(look, 2) == [("TorchGroup", [b"0", b"1"])] * 2
    assert run_ranks(look, 1) == [("SingleGroup", [b"0"])]


def test_groups_of_some_ranks_are_made_by_these_alone():
    def exchange() -> tuple[int, list[bytes], list[bytes]]:
        rank = dist.get_rank()
        if rank == 3:
            return -1, [], []
        pair = [0, 2] if rank != 1 else [1]
        group = TorchGroup(10, ranks=pair)
        again = TorchGroup(10, ranks=pair)  # the same ranks once more do not meet the first
        word = b"%d" % rank
        return group.rank, group.gather(word), [again.broadcast(word, src=len(pair) - 1)]

    assert run_ranks(exchange, 4) == [
        (0, [b"0", b"2"], [b"2"]),
        (0, [b"1"], [b"1"]),
        (1, [b"0", b"2"], [b"2"]),
        (-1, [], []),
    ]


def test_errors_name_global_ranks():
    def meet() -> str:
        if dist.get_rank() == 0:
            return ""
        group = TorchGroup(0.3, ranks=[1, 2])
        if dist.get_rank() == 2:
            return ""  # it stays alive until all have returned
        with pytest.raises(DeadlineError) as caught:
            group.gather(b"")
        return str(caught.value)

    assert "0.3 s on rank 1; missing: rank 2 of 2" in run_ranks(meet, 3)[1]


def test_a_dead_rank_ends_waits_at_once_and_is_no_deadline():
    def meet() -> tuple[str, str, float]:
        group = TorchGroup(30)
        group.gather(b"")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pending = group.post_min([1])
        started = time.perf_counter()
        with pytest.raises(RuntimeError) as posted:
            pending.wait(30)
        with pytest.raises(RuntimeError) as called:
            group.gather(b"")
        assert not isinstance(posted.value, DeadlineError)
        return str(posted.value), str(called.value), time.perf_counter() - started

    first, died, last = run_ranks(meet, 3, allow_death=True)
    assert died == Died(rank=1, signal=signal.SIGKILL)
    for posted, called, secs in (first, last):
        assert "reduction, call 2" in posted
        assert "gather, call 3" in called
        assert "missing: rank 1 of 3" in posted or "missing: ranks" in posted
        assert secs < 20


def test_closing_with_a_post_under_way_waits_for_nobody():
    def leave() -> float:
        group = TorchGroup(30)
        group.gather(b"")
        started = time.perf_counter()
        if dist.get_rank() == 0:
            group.post_min([1])
            group.close()
        return time.perf_counter() - started

    assert max(run_ranks(leave, 2)) < 15


LEAVE_ON_AN_ERROR = """
import datetime, sys, time
import torch.distributed as dist
from moc.comm.torch_group import TorchGroup

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
group = TorchGroup(90)
group.gather(b"")
if rank == 1:
    sys.stdin.read()  # alive, and not coming
group.post_min([1])
print("posted at", time.time(), flush=True)
raise KeyError("training failed")
"""


def test_python_ends_on_an_error_with_a_post_under_way(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVE_ON_AN_ERROR)
    command, store = [sys.executable, str(script)], str(tmp_path / "store")
    stays = subprocess.Popen([*command, "1", store], stdin=subprocess.PIPE)
    try:
        left = subprocess.run(
            [*command, "0", store], capture_output=True, text=True, timeout=110, check=False
        )
        ended = time.time()
    finally:
        stays.kill()
        stays.communicate()
    assert "training failed" in left.stderr
    assert left.returncode == 1, left.stderr
    assert ended - float(left.stdout.split()[-1]) < 60  # gloo alone would wait its 90 s


# ----------------------------------------------------------------------------------------- layouts


def _groups(*lists: list[int]) -> dist.ProcessGroup:
    """The one of these groups that this rank is in."""
    mine, _ = dist.new_subgroups_by_enumeration(list(lists))
    return mine


def test_layouts_from_groups():
    def layouts() -> list[tuple[Any, ...]]:
        ep, edp = _groups([0, 1], [2, 3]), _groups([0, 2], [1, 3])
        made = [
            Layout.from_groups(),
            Layout.from_groups(ep=ep, edp=edp),
            Layout.from_groups(dp=edp),
            Layout.from_groups(ep=dist.group.WORLD),
        ]
        with pytest.raises(LayoutError, match=r"ep has 2 ranks and dp 4: pass edp="):
            Layout.from_groups(ep=ep)
        with pytest.raises(LayoutError, match="cannot hold other experts"):
            Layout.from_groups(ep=ep, edp=ep)
        return [(t.rank, t.dp, t.ep, t.edp) for t in (layout.topology for layout in made)]

    got = run_ranks(layouts, 4)
    everybody = (0, 1, 2, 3)
    assert got[3] == [
        (3, everybody, (3,), everybody),
        (3, everybody, (2, 3), (1, 3)),
        (3, (1, 3), (3,), (1, 3)),
        (3, everybody, everybody, (3,)),
    ]
    assert got[0][1] == (0, everybody, (0, 1), (0, 2))


def test_layouts_from_a_mesh():
    def layouts() -> list[tuple[Any, ...]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        made = [
            Layout.from_mesh(mesh, dp=("edp", "ep"), ep="ep", edp="edp"),
            Layout.from_mesh(mesh, dp="edp"),
        ]
        with pytest.raises(LayoutError, match=r"no axis 'pp'; its axes are \['edp', 'ep'\]"):
            Layout.from_mesh(mesh, dp="pp")
        return [(t.dp, t.ep, t.edp) for t in (layout.topology for layout in made)]

    got = run_ranks(layouts, 4)
    assert got[2] == [((0, 1, 2, 3), (2, 3), (0, 2)), ((0, 2), (2,), (0, 2))]


# ---------------------------------------------------------------------------------------- torchrun


def test_a_restart_meets_in_the_store_that_the_dead_left_their_addresses_in(tmp_path):
    """As under torchrun, whose agent hosts one store for all starts of the ranks."""
    port_file = tmp_path / "port"

    def host(_rank: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.write_text(str(store.port))
        reach("listening")
        signal.pause()

    def work(rank: int, attempt: int) -> int:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port_file.read_text(),
            RANK=str(rank),
            WORLD_SIZE="2",
            TORCHELASTIC_RESTART_COUNT=str(attempt),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        torch.set_num_threads(1)
        init_process_group("gloo", timeout_secs=20)
        word = torch.tensor([rank + 10 * attempt])
        dist.all_reduce(word)
        if rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(word)

    with start_ranks(host, 1, init=False) as agent:
        agent.wait_reached(0, "listening")
        first = run_ranks(work, 2, 0, init=False, allow_death=True)
        assert first == [1, Died(rank=1, signal=signal.SIGKILL)]
        assert run_ranks(work, 2, 1, init=False) == [21, 21]


def test_without_an_agent_rank_0_hosts_the_store():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> int:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2"
        )
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        init_process_group(timeout_secs=20)
        return dist.get_world_size()

    assert run_ranks(work, 2, init=False) == [2, 2]


def test_a_store_that_does_not_answer_is_named():
    def work(rank: int) -> str:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(rank), WORLD_SIZE="2")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with pytest.raises(DeadlineError) as caught:
            init_process_group(timeout_secs=1)
        return str(caught.value)

    assert "store at 127.0.0.1:1 and 2 ranks" in run_ranks(work, 1, init=False)[0]
