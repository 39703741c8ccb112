"""A step that some ranks skip, an optimizer's or the manager's: the same error on every rank."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import same_bytes
from tests.support.tiny import Managers, adamw, dense, state_of, stored, train, whole
from torch import nn

import moc
from moc.errors import MocError
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def skip_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What GradScaler does where it finds an inf: everything but the optimizer step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    loss = scaler.scale(model(torch.full((2, 6), float("inf"))).sum())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


def life(
    managers: Managers,
    policy: moc.Policy,
    skipped: Sequence[int],
    *,
    steps: int = 8,
    who: Callable[[int], bool] = lambda rank: rank == 1,
    between: Callable[[Any, int], None] = lambda manager, step: None,
    **options: Any,
) -> tuple[str, str]:
    """Train, skip these steps on some ranks, and close; the error that came, if any."""
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer, policy=policy, layout=moc.Layout.from_groups(), **options)

    def go_on() -> None:
        manager.restore()
        for step in range(1, steps + 1):
            if step in skipped and who(dist.get_rank()):
                skip_step(model, optimizer)
            else:
                train(model, optimizer, step)
            manager.step(step)
            between(manager, step)
        manager.close()

    return ended(manager, managers, go_on)


def ended(
    manager: moc.CheckpointManager, managers: Managers, go_on: Callable[[], None]
) -> tuple[str, str]:
    """Type and text of the error that came, if any; the ranks leave together."""
    told = "", ""
    try:
        go_on()
    except (MocError, RuntimeError) as error:
        told = type(error).__name__, str(error)
    dist.barrier()  # whoever failed first has not broken the connections of the others
    managers.vanish(manager)
    return told


def committed(run: Path) -> set[int]:
    return {int(p.parent.name.split("-")[1]) for p in run.glob("step-*/manifest.json")}


def every(n: int, *, timeout_secs: float = 10, **options: Any) -> moc.Policy:
    return moc.Policy(
        snapshot_every=n,
        persist_every=n,
        timeout_secs=timeout_secs,
        keep_latest_k=None,
        **options,
    )


@pytest.mark.parametrize(
    ("n", "snapshot_every", "skipped"),
    [(2, 3, [3]), (4, 3, [3]), (4, 3, [6]), (2, 1, [1]), (4, 1, [4]), (2, 1, [4, 5])],
    ids=["first-due", "first-due-4", "due-4", "each-first", "each-4", "each-two"],
)
def test_a_due_step_that_one_rank_skips_is_an_error_on_all(
    managers: Managers, n: int, snapshot_every: int, skipped: list[int]
) -> None:
    told = run_ranks(life, n, managers, every(snapshot_every), skipped, timeout_secs=60)
    for name, text in told:
        assert name == "RanksDisagree", told
        assert f"step {skipped[0]}" in text
        assert "rank 1" in text
    assert max(committed(managers.run), default=0) < skipped[0], "nothing mixed is committed"


@pytest.mark.parametrize("skipped", [[4], [5], [4, 5]], ids=["nothing", "ahead", "both"])
def test_a_step_at_which_nothing_is_due_numbers_no_save_wrongly(
    managers: Managers, skipped: list[int]
) -> None:
    """Where a ticket would have been posted ahead, it is posted when it is read."""
    told = run_ranks(life, 2, managers, every(3), skipped, timeout_secs=60)
    assert told == [("", "")] * 2
    assert committed(managers.run) == {3, 6}


def test_replicas_that_a_skipped_step_drove_apart_are_found_at_the_first_save(
    managers: Managers,
) -> None:
    for name, text in run_ranks(life, 4, managers, every(3), [2], timeout_secs=60):
        assert name == "LayoutError"
        assert "differs between ranks 0 and 1" in text
    assert committed(managers.run) == set()


@pytest.mark.parametrize(
    ("snapshot_every", "skipped", "expected"),
    [
        (3, [3], {6}),
        (3, [2, 5], {3, 6}),
        (3, [6], {3}),
        (1, [1, 2, 5], {3, 4, 6, 7, 8}),
        (1, [8], {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_where_all_ranks_skip_the_save_is_made_at_the_next_due_step(
    managers: Managers, snapshot_every: int, skipped: list[int], expected: set[int]
) -> None:
    """And every committed step holds the state after the step that it is named by."""

    def everybody() -> tuple[str, str]:
        return life(
            managers,
            every(snapshot_every),
            skipped,
            who=lambda rank: True,
            between=lambda manager, step: manager.wait() if step % 2 else None,
        )

    assert run_ranks(everybody, 2, timeout_secs=60) == [("", "")] * 2
    found = committed(managers.run)
    assert found <= expected
    assert max(found) == max(expected), "close waits for the newest"
    for step in found:
        model = dense()
        optimizer = adamw(model)
        for number in range(1, step + 1):
            if number not in skipped:
                train(model, optimizer, number)
        kept = stored(managers.run, step)
        for name, value in state_of(model, optimizer).items():
            fqn, _, part = name.partition("/")
            assert same_bytes(whole(kept, fqn, part or "weight"), value), (step, name)


@pytest.mark.parametrize("ends", [True, False], ids=["close", "wait"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_rank_that_ends_while_others_make_their_first_save(
    managers: Managers, first: int, ends: bool
) -> None:
    """With and without a ticket posted for it."""

    def work() -> tuple[str, str]:
        model = dense()
        optimizer = adamw(model)
        policy = every(first, timeout_secs=1)
        manager = managers(model, optimizer, policy=policy, layout=moc.Layout.from_groups())

        def go_on() -> None:
            manager.restore()
            leaves = dist.get_rank() == 1
            for step in range(1, first + (0 if leaves else 3)):
                train(model, optimizer, step)
                manager.step(step)
            if leaves and not ends:
                manager.wait()
            if leaves and ends:
                manager.close()

        return ended(manager, managers, go_on)

    saver, leaver = run_ranks(work, 2, timeout_secs=60)
    if first == 3 and ends:  # the ticket was posted: there is something to disagree on
        assert saver[0] == leaver[0] == "RanksDisagree"
        assert "rank 1: wait or close" in saver[1]
    else:
        assert leaver == ("", "")
        assert saver[0] in ("DeadlineError", "RuntimeError")
        assert "missing: rank 1" in saver[1]
    assert committed(managers.run) == set()


@pytest.mark.parametrize(
    ("n", "step"), [(2, 4), (4, 5), (2, 6)], ids=["nothing", "posted-4", "due"]
)
def test_a_rank_that_waits_where_the_others_go_on(managers: Managers, n: int, step: int) -> None:
    def between(manager: Any, now: int) -> None:
        if now == step and dist.get_rank() == n - 1:
            manager.wait()

    def work() -> tuple[str, str]:
        return life(managers, every(3), [], between=between, steps=12)

    for name, text in run_ranks(work, n, timeout_secs=60):
        assert name == "RanksDisagree", (name, text)
        assert f"rank {n - 1}: wait" in text
        assert "step 6" in text or "step 9" in text


def test_after_a_disagreement_the_manager_stays_with_its_error(managers: Managers) -> None:
    def work() -> list[tuple[str, str]]:
        model = dense()
        optimizer = adamw(model)
        manager = managers(model, optimizer, policy=every(1), layout=moc.Layout.from_groups())
        manager.restore()
        told = []
        for step in range(1, 6):
            try:
                if step != 3 or dist.get_rank() == 0:
                    train(model, optimizer, step)  # it waits for the copy, and may say so too
                manager.step(step)
            except MocError as error:
                told.append((type(error).__name__, str(error)))
        with pytest.raises(MocError):
            manager.close()
        dist.barrier()
        managers.vanish(manager)
        return told

    for told in run_ranks(work, 2, timeout_secs=60):
        assert len(told) >= 2
        assert {name for name, _ in told} == {"RanksDisagree"}
    assert committed(managers.run) <= {1, 2}


@pytest.mark.parametrize(
    ("n", "skipped"), [(2, 2), (4, 3), (2, 6)], ids=["ahead", "due-4", "later"]
)
def test_a_look_that_one_rank_skips(managers: Managers, n: int, skipped: int) -> None:
    """With signals listened for, ranks look at steps of their own choosing; here at every one."""

    def work() -> tuple[str, str]:
        policy = every(3, preempt_grace_secs=1e-3)
        return life(managers, policy, [skipped], preempt_signals=[signal.SIGUSR1], steps=12)

    for name, text in run_ranks(work, n, timeout_secs=60):
        assert name == "RanksDisagree", (name, text)
        assert "rank 1: " in text
        assert f"step {skipped}" in text
    assert max(committed(managers.run), default=0) < max(skipped, 4)


def test_a_save_by_time_that_one_rank_skips(managers: Managers) -> None:
    def work() -> tuple[str, str]:
        policy = moc.Policy(snapshot_every=timedelta(microseconds=1), timeout_secs=5)
        return life(managers, policy, [5], steps=12)

    for name, text in run_ranks(work, 2, timeout_secs=60):
        assert name == "RanksDisagree", (name, text)
        assert "step 5" in text
