"""A37: a signal to one rank; all save after the same step, and the exit code tells."""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal
from tests.support.orphans import lose_helpers
from tests.support.tiny import Managers, adamw, moe, state_of, train

import moc
from moc.testing.ranks import Died, RankFailed, reach, run_ranks, start_ranks

pytestmark = pytest.mark.dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
RARELY = moc.Policy(
    snapshot_every=4, persist_every=1000, k_snapshot=2, k_persist=1, preempt_grace_secs=20
)
State = dict[str, torch.Tensor]


def life(
    managers: Managers,
    policy: moc.Policy = RARELY,
    after: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> tuple[int, int, bool, State, list[moc.Event]]:
    """Train until told to stop: code, step, whether it is saved, state, events."""
    model = moe()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    options = {"on_event": events.append, "preempt_signals": SIGNALS, **options}
    try:
        with managers(
            model, optimizer, policy=policy, layout=moc.Layout.from_groups(), **options
        ) as manager:
            report = manager.restore()
            for step in itertools.count(report.step + 1 if report else 1):
                train(model, optimizer, step)
                manager.step(step)
                if after is not None:
                    after(step, manager)
                if step == 6:
                    reach("going")
    except moc.Preempted as end:
        return int(end.code or 0), end.step, end.saved, state_of(model, optimizer), events
    raise AssertionError("training does not end by itself")


def comes_back(managers: Managers, n: int, step: int, state: State) -> None:
    """From storage alone the step and its state come back, and the next step is the right one."""

    def resume() -> None:
        model, other = moe(), moe()
        optimizer, reference = adamw(model), adamw(other)
        manager = managers(
            model,
            optimizer,
            policy=RARELY,
            layout=moc.Layout.from_groups(),
            memory_dir=managers.memory_dir / "another",
        )
        report = manager.restore()
        assert report is not None
        assert (report.step, report.stale_experts) == (step, 0)
        assert_equal(state_of(model, optimizer), state)
        for number in range(1, step + 2):
            train(other, reference, number)
        train(model, optimizer, step + 1)
        assert_equal(state_of(model, optimizer), state_of(other, reference))
        managers.vanish(manager)

    run_ranks(resume, n, timeout_secs=60)


@pytest.mark.parametrize(
    ("n", "victim", "signals"),
    [(2, 1, [15]), (4, 1, [15]), (2, 0, [signal.SIGUSR1]), (2, 1, [15, 15])],
    ids=["two", "four", "usr1", "passed-on-twice"],
)
def test_a37_one_rank_is_told_and_all_save_the_same_step(
    managers: Managers, n: int, victim: int, signals: list[int]
) -> None:
    with start_ranks(life, n, managers, timeout_secs=60) as ranks:
        ranks.wait_reached(victim, "going")
        for signum in signals:
            ranks.kill(victim, signum)
        ends = ranks.join()
    assert {(code, saved) for code, _, saved, _, _ in ends} == {(75, True)}
    assert len({step for _, step, *_ in ends}) == 1
    assert all("preempted" in [e.kind for e in events] for *_, events in ends)
    comes_back(managers, n, ends[0][1], ends[0][3])


@pytest.mark.parametrize("finishes", [True, False], ids=["completed", "abandoned"])
def test_a37_during_a_persist(managers: Managers, finishes: bool) -> None:
    """Rank 0's helper is stopped in a persist; it goes on when the end comes, or never."""
    policy = moc.Policy(snapshot_every=4, persist_every=4, preempt_grace_secs=60 if finishes else 8)
    pids: list[int] = []

    def after(step: int, manager: Any) -> None:
        if step == 3 and dist.get_rank() == 0:
            pids.append(manager._saver._handover._helper.pid)
            manager._saver.wait()
            os.kill(pids[0], signal.SIGSTOP)

    def on_event(event: moc.Event) -> None:
        if event.kind == "preempted" and finishes and pids:
            os.kill(pids[0], signal.SIGCONT)

    def work() -> Any:
        return life(managers, policy, after, on_event=on_event)

    with start_ranks(work, 2, timeout_secs=60) as ranks:
        ranks.wait_reached(1, "going")
        ranks.kill(1, signal.SIGTERM)
        ends = ranks.join()
    assert {(code, saved) for code, _, saved, _, _ in ends} == {(75, True)}
    committed = {int(p.parent.name.split("-")[1]) for p in managers.run.glob("step-*/manifest.json")}
    assert (4 in committed) == finishes
    comes_back(managers, 2, ends[0][1], ends[0][3])


def test_a37_no_save_within_the_grace_is_another_exit_code(managers: Managers) -> None:
    """Rank 1's helper is stopped for good when the last save begins."""
    policy = moc.Policy(snapshot_every=4, persist_every=1000, preempt_grace_secs=1)
    pids: list[int] = []

    def after(step: int, manager: Any) -> None:
        if step == 4:
            manager.wait()
            pids.append(manager._saver._handover._helper.pid)

    def on_event(event: moc.Event) -> None:
        if event.kind == "preempted" and event.rank == 1:
            os.kill(pids[0], signal.SIGSTOP)

    def work() -> None:
        life(managers, policy, after, on_event=on_event)

    with (
        pytest.raises(RankFailed, match="exit code 143"),
        start_ranks(work, 2, timeout_secs=40) as ranks,
    ):
        ranks.wait_reached(1, "going")
        ranks.kill(1, signal.SIGTERM)
        ranks.join()
    lose_helpers(managers.memory_dir)
    model = moe()
    optimizer = adamw(model)
    for step in range(1, 5):
        train(model, optimizer, step)
    comes_back(managers, 2, 4, state_of(model, optimizer))


def stuck(managers: Managers, way: str, grace: float) -> None:
    """Rank 0 waits for rank 1, which never comes: in C++, or where nobody notices a death."""
    model = moe()
    policy = moc.Policy(preempt_grace_secs=grace)
    manager = managers(
        model,
        adamw(model),
        policy=policy,
        layout=moc.Layout.from_groups(),
        preempt_signals=SIGNALS,
    )
    manager.restore()
    read, _write = os.pipe()
    reach("stuck")
    if way == "collective" and dist.get_rank() == 0:
        dist.barrier()
    os.read(read, 1)


def test_a37_the_main_thread_waits_in_a_collective(managers: Managers) -> None:
    with (
        pytest.raises(RankFailed, match="rank 0 left with exit code 143"),
        start_ranks(stuck, 2, managers, "collective", 1.0, timeout_secs=40) as ranks,
    ):
        ranks.wait_reached(0, "stuck")
        ranks.wait_reached(1, "stuck")
        ranks.kill(0, signal.SIGTERM)
        ranks.join()


def test_a37_a_survivor_of_a_dead_rank_leaves_at_once(managers: Managers) -> None:
    with (
        pytest.raises(RankFailed, match="rank 0 left with exit code 143"),
        start_ranks(
            stuck, 2, managers, "nowhere", 600.0, timeout_secs=40, allow_death=True
        ) as ranks,
    ):
        ranks.wait_reached(0, "stuck")
        ranks.wait_reached(1, "stuck")
        ranks.kill(1)
        ranks.kill(0, signal.SIGTERM)
        ranks.join()


def test_a37_a_second_signal_does_what_it_always_did(managers: Managers) -> None:
    """Those within a second are the same one, passed on; a later one ends the process."""
    with start_ranks(
        stuck, 2, managers, "collective", 600.0, timeout_secs=40, allow_death=True
    ) as ranks:
        ranks.wait_reached(0, "stuck")
        ranks.wait_reached(1, "stuck")
        end = os.pidfd_open(ranks.pids[0])
        told = 0
        while not select.select([end], [], [], 0.1)[0]:
            ranks.kill(0, signal.SIGTERM)
            told += 1
        os.close(end)
        ranks.kill(1)
        assert told > 2
        assert ranks.join() == [Died(rank=0, signal=15), Died(rank=1, signal=9)]


def test_a37_during_a_restore(managers: Managers) -> None:
    class Told:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, _state: dict[str, int]) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def first() -> State:
        model = moe()
        optimizer = adamw(model)
        with managers(
            model, optimizer, layout=moc.Layout.from_groups(), extras={"told": Told()}
        ) as manager:
            for step in (1, 2):
                train(model, optimizer, step)
                manager.step(step)
                manager.wait()
        return state_of(model, optimizer)

    state = run_ranks(first, 2, timeout_secs=40)[0]
    ends = run_ranks(lambda: life(managers, extras={"told": Told()}), 2, timeout_secs=40)
    assert [(code, step, saved) for code, step, saved, _, _ in ends] == [(75, 2, True)] * 2
    assert_equal(ends[0][3], state)


def test_time_based_intervals_are_agreed_on(managers: Managers) -> None:
    policy = moc.Policy(
        snapshot_every=timedelta(seconds=0.02),
        persist_every=timedelta(seconds=0.05),
        keep_latest_k=None,
    )

    def work() -> list[int]:
        model = moe()
        optimizer = adamw(model)
        steps = []
        with managers(
            model, optimizer, policy=policy, layout=moc.Layout.from_groups()
        ) as manager:
            for step in itertools.count(1):
                train(model, optimizer, step)
                before = manager.stats()["marked"]
                manager.step(step)
                if manager.stats()["marked"] > before:
                    steps.append(step)
                    manager.wait()
                if len(steps) == 3:
                    break
        return steps

    one, other = run_ranks(work, 2, timeout_secs=60)
    assert one == other
    assert len(list(managers.run.glob("step-*/manifest.json"))) >= 3
