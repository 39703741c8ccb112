"""Ranks that do not do the same: an error on every rank, with names, and no mixed checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import EACH, Managers, adamw, dense, moe, state_of, stored, train
from torch import nn

import moc
from moc.errors import MocError
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def manager_of(
    managers: Managers, model: nn.Module, optimizer: Any = (), **options: Any
) -> moc.CheckpointManager:
    """A manager of plain data-parallel ranks."""
    options = {"layout": moc.Layout.from_groups(), **options}
    return managers(model, optimizer, **options)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what a call raises."""
    try:
        call()
    except (MocError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def nothing_mixed(run: Path, allowed: set[int]) -> None:
    committed = {int(p.parent.name.split("-")[1]) for p in run.glob("step-*/manifest.json")}
    assert committed <= allowed


@pytest.mark.parametrize("before", [0, 2, 9], ids=["first", "dropped", "posted"])
def test_a10_ranks_that_save_other_steps(managers: Managers, before: int) -> None:
    """After step 9 the ticket for step 10 is posted; after step 2 one that both drop."""
    policy = moc.Policy(snapshot_every=1, persist_every=1, timeout_secs=5, keep_latest_k=None)

    def work() -> tuple[str, str]:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        manager = manager_of(managers, model, optimizer, policy=policy)
        for step in range(1, before + 1):
            train(model, optimizer, step)
            manager.step(step)
            manager.wait()

        def go_on() -> None:
            for step in range(10 + rank, 20):
                train(model, optimizer, step)
                manager.step(step)

        told = error_of(go_on)
        managers.vanish(manager)
        return told

    for name, text in run_ranks(work, 2, timeout_secs=40):
        assert name == "RanksDisagree", (name, text)
        assert "rank 0: step 10" in text
        assert "rank 1: step 11" in text
    nothing_mixed(managers.run, set(range(1, before + 1)))


@pytest.mark.parametrize("before", [0, 2], ids=["first", "later"])
def test_a10_a_rank_that_does_not_save(managers: Managers, before: int) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, timeout_secs=2, keep_latest_k=None)

    def work() -> tuple[str, str]:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        manager = manager_of(managers, model, optimizer, policy=policy)
        manager.restore()
        for step in range(1, before + 1):
            train(model, optimizer, step)
            manager.step(step)
            manager.wait()
        told = "", ""
        if rank == 0:

            def go_on() -> None:
                for step in range(before + 1, before + 5):
                    train(model, optimizer, step)
                    manager.step(step)

            told = error_of(go_on)
        dist.barrier()  # rank 1 is there, and does something else
        managers.vanish(manager)
        return told

    told, _ = run_ranks(work, 2, timeout_secs=40)
    assert told[0] == "DeadlineError", told
    assert "missing: rank 1" in told[1]
    assert "2 s" in told[1]
    nothing_mixed(managers.run, set(range(1, before + 1)))


def test_a_wrong_layout_is_found_at_the_first_save(managers: Managers) -> None:
    """Expert-parallel ranks that say they hold the same experts."""

    def work() -> tuple[str, str]:
        model = moe()
        with torch.no_grad():
            model[1].experts.w1.add_(dist.get_rank())  # really other experts
        manager = manager_of(managers, model, policy=EACH)
        told = error_of(lambda: manager.step(1))
        managers.vanish(manager)
        return told

    for name, text in run_ranks(work, 2, timeout_secs=40):
        assert name == "LayoutError"
        assert "1.experts.w1 differs between ranks 0 and 1" in text
        assert "edp" in text
    nothing_mixed(managers.run, set())


def test_replicas_that_have_drifted_apart_are_found(managers: Managers) -> None:
    def work() -> tuple[str, str]:
        model = dense(seed=dist.get_rank())
        manager = manager_of(managers, model, policy=EACH)
        told = error_of(lambda: manager.step(1))
        managers.vanish(manager)
        return told

    for name, text in run_ranks(work, 3, timeout_secs=40):
        assert name == "LayoutError"
        assert "0.weight differs between ranks 0 and 1" in text
        assert "dp" in text


class Counted(nn.Module):
    """A buffer that every rank has for itself, and one that is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = dense()
        self.register_buffer("mine", torch.zeros(3))
        self.register_buffer("ours", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "storage"])
def test_a_buffer_that_differs_is_saved_and_restored_per_rank(
    managers: Managers, memory: bool
) -> None:
    def work() -> tuple[list[str], dict[str, torch.Tensor]]:
        rank = dist.get_rank()
        model = Counted()
        optimizer = adamw(model)
        events: list[moc.Event] = []
        manager = manager_of(managers, model, optimizer, policy=EACH, on_event=events.append)
        for step in (1, 2):
            train(model, optimizer, step)
            model.mine.fill_(10 * step + rank)
            model.ours.fill_(step)
            manager.step(step)
            manager.wait()
        manager.close()
        return [e.text for e in events if e.kind == "warning"], state_of(model, optimizer)

    def resume() -> dict[str, torch.Tensor]:
        model = Counted()
        optimizer = adamw(model)
        where = managers.memory_dir if memory else managers.memory_dir / "another"
        manager = manager_of(managers, model, optimizer, policy=EACH, memory_dir=where)
        report = manager.restore()
        assert report is not None
        assert report.step == 2
        managers.vanish(manager)
        return state_of(model, optimizer)

    saved = run_ranks(work, 2, timeout_secs=40)
    warned = [text for texts, _ in saved for text in texts]
    assert len(warned) == 1
    assert "mine" in warned[0]
    assert sorted(n for n in stored(managers.run, 2) if n.startswith("mine|")) == [
        "mine|buffer@rank0|0:3",
        "mine|buffer@rank1|0:3",
    ]
    for (_, then), now in zip(saved, run_ranks(resume, 2, timeout_secs=40), strict=True):
        assert_equal(now, then)
    assert not same_bytes(saved[0][1]["mine"], saved[1][1]["mine"])
