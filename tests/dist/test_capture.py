"""What is captured, and what is read of it, on several ranks; and in loops of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import Job, Outcome, Spec, assert_equal, make_manager, run_job, same_bytes
from tests.support.tiny import (
    Managers,
    Recording,
    adamw,
    batch,
    dense,
    moe,
    run_steps,
    state_of,
    stored,
    train,
    version_of,
    whole,
)
from torch import Tensor, nn

import moc
from moc.demo.trainer import make_groups
from moc.errors import MismatchError, MocError
from moc.persist.commit import load_manifest
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

WORLD = 4
WHOLE = moc.Policy(snapshot_every=2, persist_every=2)


def saved_job(spec: Callable[..., Spec], **options: Any) -> tuple[Spec, list[dict[str, Tensor]]]:
    """Four ranks of a MoE job that ran to step 4; each one's state then."""
    made = spec(steps=4, policy=WHOLE, record=(4,), **options)
    return made, [outcome.states[4] for outcome in run_ranks(run_job, WORLD, made)]


def part_of(name: str) -> str:
    return name.split("|")[1] if "|" in name else ""


@pytest.mark.parametrize("zero", [True, False], ids=["zero", "replicas"])
def test_a19_weights_alone_open_no_optimizer_piece_on_any_rank(
    spec: Callable[..., Spec], zero: bool
) -> None:
    saved, then = saved_job(spec, zero=zero)
    manifest = load_manifest(LocalStore(saved.run_dir), version_of(saved.run_dir, 4))
    private = [
        (manifest.files[r.file].key, r.offset, r.offset + r.piece.nbytes)
        for r in (*manifest.dense, *manifest.experts)
        if r.piece.part not in ("weight", "buffer") and r.piece.nbytes
    ]
    assert len(private) > 50

    def evaluate() -> tuple[dict[str, Tensor], list[tuple[str, int, int]], list[int]]:
        ranks = make_groups(saved.ep, torch.device("cpu"))
        job = Job(saved, ranks)
        with torch.no_grad():
            for param in job.model.parameters():
                param.zero_()
        store = Recording(saved.run_dir)
        manager = make_manager(saved.but(run_dir=store), job, Outcome())
        report = manager.restore(weights_only=True)
        assert report is not None
        assert report.step == 4
        manager.close()
        entries = [len(optimizer.state) for optimizer in job.optimizers]
        return job.snapshot(), store.ranges, entries

    found = run_ranks(evaluate, WORLD)
    for before, (now, ranges, entries) in zip(then, found, strict=True):
        weights = {n: v for n, v in before.items() if part_of(n) in ("weight", "buffer")}
        assert_equal({n: now[n] for n in weights}, weights)
        assert entries == [0, 0]
        for key, offset, nbytes in ranges:
            touched = [p for p in private if p[0] == key and p[1] < offset + nbytes and offset < p[2]]
            assert not touched
    assert any(ranges for _, ranges, _ in found)


def test_a_cast_on_four_ranks(spec: Callable[..., Spec]) -> None:
    saved, then = saved_job(spec, zero=False)

    def convert() -> tuple[dict[str, Tensor], str, list[str]]:
        job = Job(saved, make_groups(saved.ep, torch.device("cpu")))
        job.model.bfloat16()
        outcome = Outcome()
        manager = make_manager(saved, job, outcome)
        with pytest.raises(MismatchError) as caught:
            manager.restore()
        assert manager.restore(cast=True) is not None
        state = job.snapshot()
        manager.__exit__(RuntimeError, RuntimeError("gone"), None)
        told = [e.text for e in outcome.events if e.kind == "warning" and "cast" in e.text]
        return state, str(caught.value), told

    found = run_ranks(convert, WORLD)
    for before, (now, refused, _) in zip(then, found, strict=True):
        assert "cast=True" in refused
        expected = {
            name: value.bfloat16()
            if part_of(name) in ("weight", "exp_avg", "exp_avg_sq")
            else value
            for name, value in before.items()
        }
        assert_equal(now, expected)
    assert [len(told) for *_, told in found] == [1, 0, 0, 0], "it is said once"


@pytest.mark.parametrize("world", [1, 4])
def test_a21_frozen_parameters_on_four_ranks(managers: Managers, world: int) -> None:
    def build(seed: int) -> nn.Module:
        model = moe(seed)
        for part in (model[0], model[1].experts):
            part.requires_grad_(False)
        return model

    def save() -> dict[str, Tensor]:
        model = build(0)
        optimizer = adamw(model)
        with managers(model, optimizer, exclude_frozen=True) as manager:
            run_steps(manager, model, optimizer, [1, 2])
        return state_of(model, optimizer)

    def load() -> dict[str, Tensor]:
        model = build(5)
        optimizer = adamw(model)
        place = managers.memory_dir / "another"
        manager = managers(model, optimizer, exclude_frozen=True, memory_dir=place)
        assert manager.restore() is not None
        managers.vanish(manager)
        return state_of(model, optimizer)

    then = run_ranks(save, WORLD)[0]
    frozen = ["0.bias", "0.weight", "1.experts.w1"]
    head = load_manifest(LocalStore(managers.run), version_of(managers.run, 2)).head
    assert head.frozen == frozen
    assert not {name.split("|")[0] for name in stored(managers.run, 2)} & set(frozen)
    own = build(5).state_dict()
    for now in run_ranks(load, world):
        assert_equal(now, then | {name: own[name] for name in frozen})


def test_a_module_that_one_rank_replaces_is_refused_on_all(managers: Managers) -> None:
    def work() -> tuple[str, str]:
        model = dense()
        optimizer = adamw(model)
        manager = managers(model, optimizer)
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
        if dist.get_rank() == 2:
            model[2] = nn.Linear(*reversed(model[2].weight.shape))
        told = "", ""
        try:
            run_steps(manager, model, optimizer, [3, 4])
            manager.close()
        except MocError as error:
            told = type(error).__name__, str(error)
        dist.barrier()
        managers.vanish(manager)
        return told

    for name, text in run_ranks(work, WORLD):
        assert name == "StateError"
        assert "2.weight" in text
        assert "2.bias" in text
    assert {p.parent.name.split("-")[1] for p in managers.run.glob("step-*/manifest.json")} == {
        "00000001",
        "00000002",
    }


def test_writes_beside_the_optimizer_are_captured_as_step_found_them(managers: Managers) -> None:
    """Clipped gradients, and weights scaled before and after `manager.step`."""
    model = dense()
    optimizer = adamw(model)
    then = {}
    with managers(model, optimizer) as manager:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model[0].weight.data.mul_(0.9)
            manager.step(step)
            then[step] = state_of(model, optimizer)
            model[2].weight.data.mul_(0.9)  # leaves no trace in `_version`
            manager.wait()
    for step, expected in then.items():
        holds(managers, step, expected)


@pytest.mark.parametrize("snapshot_every", [1, 2])
def test_step_in_every_micro_batch_of_an_accumulation(
    managers: Managers, snapshot_every: int
) -> None:
    """The step made last is named each time; only the call after it was made counts."""
    policy = moc.Policy(
        snapshot_every=snapshot_every, persist_every=snapshot_every, keep_latest_k=None
    )

    def work() -> tuple[dict[int, dict[str, Tensor]], list[str]]:
        model = dense()
        optimizer = adamw(model)
        then, step, events = {}, 0, []
        with managers(
            model, optimizer, policy=policy, layout=moc.Layout.from_groups(), on_event=events.append
        ) as manager:
            manager.restore()
            for number in range(1, 17):
                (model(batch(number)).square().mean() / 4).backward()
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    then[step] = state_of(model, optimizer)
                manager.step(step)
                if number % 4 == 3:
                    manager.wait()
        return then, [e.text for e in events if "without an optimizer step" in e.text]

    for then, warned in run_ranks(work, 2):
        assert len(warned) == 1
        due = [step for step in then if step % snapshot_every == 0]
        for step in due:
            holds(managers, step, then[step])
    made = {int(p.parent.name.split("-")[1]) for p in managers.run.glob("step-*/manifest.json")}
    assert made == set(due)


def holds(managers: Managers, step: int, expected: dict[str, Tensor]) -> None:
    """The committed step has these bytes."""
    pieces = stored(managers.run, step)
    for name, value in expected.items():
        fqn, _, part = name.partition("/")
        assert same_bytes(whole(pieces, fqn, part or "weight"), value), (step, name)
