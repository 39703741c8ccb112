"""One rank's save fails, or one rank dies in a save: all learn the same, and nobody waits long."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch.distributed as dist
from tests.support.job import assert_equal
from tests.support.orphans import wait_for_helpers
from tests.support.tiny import Managers, adamw, dense, kinds, state_of, train

import moc
from moc import knobs
from moc.core.faults import FaultScript
from moc.errors import MocError, SaveError
from moc.testing.ranks import Died, run_ranks

pytestmark = pytest.mark.dist

TIMEOUT_SECS = 6.0
ON_RANK_1 = FaultScript(nth=1, verb="put_new", times=0)
Told = tuple[str, str, int, int, str]


def told_by(call: Callable[[], Any]) -> Told:
    """Type, text, step, rank and path of what a call raises."""
    try:
        call()
    except (MocError, RuntimeError) as error:
        fields = (getattr(error, name, None) for name in ("step", "rank", "path"))
        return (type(error).__name__, str(error), *fields)
    return ("", "", -1, -1, "")


def policy(on_error: Literal["warn", "raise"]) -> moc.Policy:
    return moc.Policy(
        snapshot_every=1,
        persist_every=1,
        keep_latest_k=None,
        timeout_secs=TIMEOUT_SECS,
        grace_secs=2,
        on_error=on_error,
    )


@pytest.mark.parametrize("verb", ["wait", "step", "close"])
def test_a11_a_save_that_fails_on_one_rank_raises_the_same_on_all(
    managers: Managers, verb: str
) -> None:
    def work() -> Told:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        manager = managers(
            model,
            optimizer,
            layout=moc.Layout.from_groups(),
            policy=policy("raise"),
            faults=ON_RANK_1 if rank == 1 else None,
        )
        manager.restore()
        train(model, optimizer, 1)
        manager.step(1)

        def go_on() -> None:
            step = 1
            while verb == "step":  # the training's own collectives keep the ranks in step
                step += 1
                dist.barrier()
                train(model, optimizer, step)
                manager.step(step)
            getattr(manager, verb)()

        told = told_by(go_on)
        managers.vanish(manager)
        return told

    told = run_ranks(work, 3, timeout_secs=40)
    assert told[0] == told[1] == told[2]
    name, text, step, rank, path = told[0]
    assert (name, step, rank) == ("SaveError", 1, 1)
    assert path.startswith("step-00000001-a0001/")
    assert "rank 1" in text
    assert path in text
    assert "scripted fault" in text
    assert not list(managers.run.glob("step-*/manifest.json"))


def test_a11_or_all_go_on_and_the_next_save_is_good(managers: Managers) -> None:
    """The store of rank 1 comes back after the first save is lost."""

    def work() -> tuple[dict[str, Any], list[moc.Event], Any]:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        events: list[moc.Event] = []
        manager = managers(
            model,
            optimizer,
            layout=moc.Layout.from_groups(),
            policy=policy("warn"),
            # The tries of one operation, and no more.
            faults=FaultScript(nth=1, verb="put_new", times=5) if rank == 1 else None,
            on_event=events.append,
        )
        manager.restore()
        step = 0
        last = 0
        while not last:
            step += 1
            dist.barrier()
            train(model, optimizer, step)
            manager.step(step)
            last = dist_max(len(manager.all_steps()))
        manager.wait()
        state = state_of(model, optimizer)
        manager.close()
        return manager.stats(), events, (step, state)

    def resume() -> Any:
        model = dense(1)
        optimizer = adamw(model)
        manager = managers(
            model, optimizer, layout=moc.Layout.from_groups(), policy=policy("warn")
        )
        report = manager.restore()
        managers.vanish(manager)
        assert report is not None
        return report.step, state_of(model, optimizer)

    told = run_ranks(work, 3, timeout_secs=50)
    for rank, (stats, events, _) in enumerate(told):
        failed = [e for e in events if e.kind == "failed"]
        assert stats["failed"] == len(failed) == (rank == 1)
        for event in failed:
            assert (event.step, event.rank) == (1, 1)
            assert "step-00000001-a0001/" in event.text
    assert "abandoned" in kinds(told[0][1], 1)
    assert not list(managers.run.glob("step-00000001-*/manifest.json"))
    for (_, _, (step, state)), (resumed, again) in zip(
        told, run_ranks(resume, 3, timeout_secs=40), strict=True
    ):
        assert resumed == step
        assert_equal(again, state)


def dist_max(number: int) -> int:
    """The largest over all ranks: what each sees of a directory is its own."""
    told: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(told, number)
    return max(told)


@pytest.mark.parametrize("when", ["before its snapshot", "before its receipt", "after its receipt"])
def test_a11_a_rank_that_is_killed_in_a_save(managers: Managers, when: str) -> None:
    """The others learn it within the timeout of the saves, which is far below the job's own."""
    script = {
        "before its receipt": FaultScript(nth=2, verb="put_new", error="kill"),
        "after its receipt": FaultScript(nth=2, verb="put_new", error="kill", when="after"),
    }

    def work() -> Told:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        manager = managers(
            model,
            optimizer,
            layout=moc.Layout.from_groups(),
            policy=policy("raise"),
            faults=script.get(when) if rank == 2 else None,
        )
        manager.restore()
        train(model, optimizer, 1)
        if rank == 2 and when == "before its snapshot":
            os.kill(os.getpid(), signal.SIGKILL)

        def save() -> None:
            manager.step(1)
            if rank == 2:
                helper = manager._saver._handover._helper
                assert helper is not None
                os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
                os.kill(os.getpid(), signal.SIGKILL)
            manager.wait()

        told = told_by(save)
        managers.vanish(manager)
        return told

    def resume() -> tuple[int, list[int], Any, Any]:
        model = dense(1)
        optimizer = adamw(model)
        manager = managers(
            model, optimizer, layout=moc.Layout.from_groups(), policy=policy("raise")
        )
        report = manager.restore()
        restored = state_of(model, optimizer)
        train(model, optimizer, 2)
        manager.step(2)
        manager.close()
        return report.step if report else 0, manager.all_steps(), restored, None

    *told, died = run_ranks(work, 3, timeout_secs=60, allow_death=True)
    assert died == Died(rank=2, signal=signal.SIGKILL)
    wait_for_helpers([managers.memory_dir])
    print(told)
    for name, text, *_ in told:
        assert name in ("DeadlineError", "RuntimeError"), (name, text)
        assert "missing: rank 2 of 3" in text
    model = dense()
    optimizer = adamw(model)
    untouched = state_of(dense(1))
    train(model, optimizer, 1)
    for step, steps, restored, _ in run_ranks(resume, 3, timeout_secs=40):
        if when == "before its snapshot":
            assert (step, steps) == (0, [2])
            assert_equal(restored, untouched)
        else:  # sealed on every rank before it died, and committed or not it is whole
            assert (step, steps) == (1, [1, 2])
            assert_equal(restored, state_of(model, optimizer))
