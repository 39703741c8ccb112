"""Groups of one rank and of threads; layouts as plain numbers."""

from __future__ import annotations

from typing import Any

import pytest

from moc.comm.group import Group, SingleGroup, agree, gather_values
from moc.comm.layout import Layout
from moc.comm.local_group import LocalGroup
from moc.comm.torch_group import default_group, init_process_group
from moc.core.topology import Topology
from moc.errors import ConfigError, DeadlineError, LayoutError, RanksDisagree, StoreError
from moc.testing.group_suite import GroupSuite
from moc.testing.ranks import run_threads


class TestSingleGroup(GroupSuite):
    @pytest.fixture
    def run(self):
        def run(fn: Any, *, timeout_secs: float = 10) -> list[Any]:
            del timeout_secs  # nobody to wait for
            return [fn(SingleGroup())]

        return run


class TestLocalGroup(GroupSuite):
    @pytest.fixture(params=[1, 2, 5])
    def run(self, request):
        def run(fn: Any, *, timeout_secs: float = 10) -> list[Any]:
            return run_threads(fn, request.param, timeout_secs=timeout_secs)

        return run


def test_many_ranks_are_cheap():
    got = run_threads(lambda group: gather_values(group, group.rank, int), 64)
    assert got == [list(range(64))] * 64


def test_different_calls_at_the_same_place_are_an_error_on_all_ranks():
    def meet(group: Group) -> str:
        with pytest.raises(RanksDisagree) as caught:
            group.gather(b"") if group.rank else group.broadcast(b"")
        return str(caught.value)

    for text in run_threads(meet, 3):
        assert "gather" in text
        assert "broadcast" in text


def test_a_rank_that_left_is_not_waited_for():
    def meet(group: Group) -> None:
        if group.rank:
            with pytest.raises(RuntimeError, match=r"gather, call 1.*rank 0 left"):
                group.gather(b"")

    run_threads(meet, 3, timeout_secs=60)


def test_what_was_sent_before_leaving_still_arrives():
    def meet(group: Group) -> list[int]:
        pending = group.post_sum([1])
        if group.rank == 0:
            group.close()
            return [2]
        return pending.wait(10)

    assert run_threads(meet, 2) == [[2], [2]]


def test_agree_says_once_what_many_ranks_met():
    def meet(group: Group) -> str:
        def fails() -> None:
            if group.rank == 1:
                raise StoreError("disk full")
            if group.rank > 3:
                raise LayoutError("odd")

        with pytest.raises(StoreError) as caught:
            agree(group, fails)
        return str(caught.value)

    expected = (
        "rank 1: StoreError: disk full; ranks 4, 5, 6, 7, 8, 9, 10, 11 and 4 more: LayoutError: odd"
    )
    assert run_threads(meet, 16) == [expected] * 16


def test_agree_lets_an_interrupt_through():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree(SingleGroup(), interrupted)


def test_a_deadline_is_a_timeout_for_everybody():
    group, _ = LocalGroup.make(2, timeout_secs=0.01)
    with pytest.raises(TimeoutError):
        group.gather(b"")
    with pytest.raises(DeadlineError):
        group.post_min([1]).wait(0)


def test_without_torch_distributed_there_is_one_rank():
    group = default_group(1)
    assert isinstance(group, SingleGroup)


def test_init_without_torchrun_says_what_to_do(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"torchrun.*Layout\.single\(\)"):
        init_process_group()


def test_layout_of_groups_needs_torch_distributed():
    with pytest.raises(ConfigError, match=r"init_process_group.*Layout\.single\(\)"):
        Layout.from_groups()


def test_a_single_layout_is_one_rank():
    layout = Layout.single()
    assert layout.topology == Topology()
    assert repr(layout) == "Layout(rank=0 of 1, dp=(0,), ep=(0,), edp=(0,))"


@pytest.mark.parametrize(
    ("dp", "ep", "edp"),
    [
        ((0, 1, 2, 3), (0, 1), (0, 2)),  # EP within DP
        ((0, 1, 2, 3), (0,), (0, 1, 2, 3)),  # no EP
        ((0, 1, 2, 3), (0, 1, 2, 3), (0,)),  # EP over all of DP
        ((0, 2), (0, 1), (0, 2)),  # attention is split in two where experts are not
        ((0, 1, 2, 3), (0, 1), (0,)),  # experts are split in two where attention is not
    ],
)
def test_groups_that_fit(dp, ep, edp):
    assert Layout(Topology(rank=0, world_size=4, dp=dp, ep=ep, edp=edp)).topology.ep == ep


@pytest.mark.parametrize(
    ("dp", "ep", "edp", "text"),
    [
        ((0, 1, 2, 3), (0, 1), (0, 1), r"rank 1 is in ep \(0, 1\) and in edp \(0, 1\)"),
        ((0, 1, 2, 3), (0, 1, 2), (0,), "neither divides dp of 4"),
        ((0, 1, 2, 3), (0, 1, 2), (0, 3), "ep of 3 x edp of 2 ranks is more than the world of 4"),
        ((1, 2), (0,), (0,), "rank 0 is not in its own dp group"),
    ],
)
def test_groups_that_do_not_fit(dp, ep, edp, text):
    with pytest.raises(LayoutError, match=text):
        Layout(Topology(rank=0, world_size=4, dp=dp, ep=ep, edp=edp))
