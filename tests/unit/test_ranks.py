"""The runner of ranks itself: results, errors, deaths, deadlines."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from moc.errors import DeadlineError, StoreError
from moc.testing.ranks import Died, RankFailed, reach, run_ranks, run_threads, start_ranks

pytestmark = pytest.mark.dist


def _total(start: int) -> tuple[int, int, int]:
    word = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(word)
    return dist.get_rank(), int(word), torch.get_num_threads()


def test_four_ranks_exchange_and_return_in_order_soon():
    started = time.perf_counter()
    assert run_ranks(_total, 4, 10) == [(rank, 46, 1) for rank in range(4)]
    assert run_ranks(_total, 2, 0) == [(rank, 1, 1) for rank in range(2)]
    assert time.perf_counter() - started < 30  # half a second each; this machine may be busy


def test_large_results_and_tensors_come_back():
    sizes = run_ranks(lambda rank: torch.full((1 << 20,), rank), 2, init=False)
    assert [(int(t[0]), t.numel()) for t in sizes] == [(0, 1 << 20), (1, 1 << 20)]


def test_an_error_has_rank_text_and_cause_and_ends_the_others():
    def fails() -> None:
        if dist.get_rank() == 1:
            raise StoreError("disk of rank one", key="k")
        dist.barrier()

    with pytest.raises(RankFailed, match=r"rank 1 raised(.|\n)*disk of rank one") as caught:
        run_ranks(fails, 3)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, StoreError)


def test_ranks_that_hang_after_anothers_error_are_killed_soon(monkeypatch):
    monkeypatch.setattr("moc.testing.ranks._GRACE_SECS", 0.2)

    def fails(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")
        signal.pause()

    with pytest.raises(RankFailed, match=r"the reason(.|\n)*rank 0 is at(.|\n)*in fails"):
        run_ranks(fails, 2, init=False)


def test_an_error_that_cannot_be_pickled_still_has_its_text():
    def fails(_rank: int) -> None:
        class Local(Exception):
            pass

        raise Local("only here")

    with pytest.raises(RankFailed, match="only here"):
        run_ranks(fails, 1, init=False)


def test_leaving_without_a_result_is_an_error():
    with pytest.raises(RankFailed, match="exit code 7"):
        run_ranks(lambda _rank: os._exit(7), 1, init=False)


def test_death_by_signal_is_an_error_unless_allowed():
    def dies(rank: int) -> int:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with pytest.raises(RankFailed, match="rank 0 was ended by SIGKILL"):
        run_ranks(dies, 2, init=False)
    got = run_ranks(dies, 2, init=False, allow_death=True)
    assert got == [Died(rank=0, signal=signal.SIGKILL), 1]


def test_the_deadline_kills_all_and_shows_where_they_are():
    def hangs_in_here(_rank: int) -> None:
        signal.pause()

    pids: list[int] = []
    with pytest.raises(DeadlineError, match=r"results of ranks \[0, 1\](.|\n)*hangs_in_here"):
        run_ranks(
            hangs_in_here, 2, init=False, timeout_secs=0.5, on_start=lambda r: pids.extend(r.pids)
        )
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_can_be_killed_at_a_point_they_reached():
    def works(rank: int) -> str:
        reach("ready")
        if rank == 1:
            signal.pause()
        return "done"

    with start_ranks(works, 2, init=False, allow_death=True) as ranks:
        ranks.wait_reached(1, "ready")
        ranks.kill(1)
        assert ranks.join() == ["done", Died(rank=1, signal=signal.SIGKILL)]
        assert not ranks.folder.exists()
        with pytest.raises(RankFailed, match="never"):
            ranks.wait_reached(1, "never")


def test_leaving_the_block_kills_what_is_alive():
    with start_ranks(lambda _rank: signal.pause(), 2, init=False) as ranks:
        pass
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_fork_beside_a_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="busy")
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="busy"):
            run_ranks(_total, 2, 0)
    finally:
        stop.set()
        thread.join()


def test_threads_return_in_order_and_raise_the_error_that_came_first():
    assert run_threads(lambda group, x: (group.rank, group.world_size, x), 3, "x") == [
        (0, 3, "x"),
        (1, 3, "x"),
        (2, 3, "x"),
    ]

    def fails(group):
        if group.rank == 1:
            raise KeyError("mine")
        group.gather(b"")

    with pytest.raises(KeyError, match="mine"):
        run_threads(fails, 3)
