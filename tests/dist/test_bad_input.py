"""The rows of docs/errors.md that need ranks: the error on every rank, and nothing touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moc
from moc.core.topology import Topology
from moc.errors import ConfigError
from moc.testing.ranks import run_ranks
from tests.support.bad_input import Bench, Cases, Row, error_of, read_rows
from tests.support.tiny import DIM, Managers, dense, moe

pytestmark = pytest.mark.dist

ROWS = read_rows(ranks=True)
CASES = Cases()


@pytest.fixture
def bench(managers: Managers, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(managers, dense(), monkeypatch)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_is_refused_on_every_rank(bench: Bench, row: Row) -> None:
    CASES[row.what](bench, row)


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    CASES.match(ROWS)


def on_two(what: str) -> Callable[[Callable[[Bench], Any]], Callable[[Bench], Any]]:
    """The decorated function runs on both ranks, and returns the act that the row is about.

    An act that gives None is not judged there: the error is the other rank's alone.
    """

    def add(prepare: Callable[[Bench], Any]) -> Callable[[Bench], Any]:
        def case(bench: Bench, row: Row) -> None:
            def rank() -> tuple[str, str] | None:
                act = prepare(bench)
                if act is None:
                    return None
                dist.barrier()
                before = bench.state()
                dist.barrier()
                told = error_of(act)
                dist.barrier()
                assert not bench.touched(before), f"touched before {told}"
                return told

            told = run_ranks(rank, 2, timeout_secs=40)
            assert any(told)
            for name, text in filter(None, told):
                row.fits(name, text)

        CASES.of(what)(case)
        return prepare

    return add


@CASES.of("Layout.from_groups() without torch.distributed")
def no_job(bench: Bench, row: Row) -> None:
    bench.refuses(row, moc.Layout.from_groups)


@CASES.of("RANK=x")
def rank_variable(bench: Bench, row: Row) -> None:
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("RANK", "x")):
        bench.monkeypatch.setenv(name, value)
    bench.refuses(row, moc.init_process_group)


@on_two("layout of another world size")
def other_world(bench: Bench) -> Any:
    ranks = (0, 1, 2)
    layout = moc.Layout(Topology(rank=dist.get_rank(), world_size=3, dp=ranks, ep=(dist.get_rank(),), edp=ranks))
    return lambda: bench.make(layout=layout)


@on_two("group without this rank")
def foreign_group(_: Bench) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    return lambda: moc.Layout.from_groups(dp=groups[1 - dist.get_rank()])


@on_two("ep without edp")
def no_edp(_: Bench) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    return lambda: moc.Layout.from_groups(ep=groups[dist.get_rank()])


@on_two("the same group as ep and edp")
def same_group(_: Bench) -> Any:
    return lambda: moc.Layout.from_groups(ep=dist.group.WORLD, edp=dist.group.WORLD)


@on_two("experts that do not divide by ranks")
def uneven(bench: Bench) -> Any:
    """Five experts over two ranks: two and three."""
    model = moe(stacked=False)
    model[1].experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2 + dist.get_rank()))
    bench.use(model)
    layout = moc.Layout.from_groups(ep=dist.group.WORLD)
    return lambda: bench.make(layout=layout)


@on_two("other values on a replica, at the first save")
def drifted(bench: Bench) -> Any:
    bench.use(dense(dist.get_rank()))
    manager = bench.make(layout=moc.Layout.from_groups())
    manager.restore()
    return lambda: manager.save(1)


@on_two("an argument that is bad on one rank")
def one_rank(bench: Bench) -> Any:
    extras = {"config": {"lr": 1}} if dist.get_rank() else {}
    return lambda: bench.make(extras=extras)


def test_the_error_of_the_rank_itself_is_the_cause(bench: Bench) -> None:
    def rank() -> str:
        extras = {"config": {"lr": 1}} if dist.get_rank() else {}
        with pytest.raises(ConfigError) as caught:
            bench.make(extras=extras)
        return str(caught.value.__cause__)

    first, second = run_ranks(rank, 2, timeout_secs=40)
    assert first == "None"
    assert second.startswith("extras['config'] (dict)")
