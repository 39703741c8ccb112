"""What is saved is what was there, for any model and any optimizer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it: here once, not in every forked rank
from hypothesis import example, given, settings
from tests.support.any_model import (
    FROZEN,
    LAYOUTS,
    AnyModel,
    Shape,
    everything,
    optimizers_of,
    shapes,
    train_any,
)
from tests.support.tiny import EACH

import moc
from moc.testing.ranks import run_ranks

EVERY_KIND = Shape(
    trained=((torch.float32, "plain"), (torch.bfloat16, "channels_last"), (torch.float64, "one")),
    frozen=tuple((dtype, "plain") for dtype in FROZEN),
    buffers=tuple(
        (torch.float32, layout, persistent, inside)
        for layout in LAYOUTS
        for persistent in (True, False)
        for inside in (True, False)
    ),
    name="a|b \u2603/",
    stacked=True,
    allowed=(0, 2),
    tied=True,
    optimizer="schedule_free",
    several=True,
    groups=True,
)


def _save(_rank: int, shape: Shape, run: Path, memory: Path) -> list[dict[str, Any]]:
    model = AnyModel(shape, 1)
    optimizers = optimizers_of(shape, model)
    with moc.CheckpointManager(
        run, model=model, optimizer=optimizers, policy=EACH, memory_dir=memory
    ) as manager:
        for step in (1, 2, 3):
            train_any(model, optimizers)
            manager.step(step)
    return _go_on(model, optimizers)


def _resume(rank: int, shape: Shape, runs: list[Path], memory: list[Path]) -> Any:
    model = AnyModel(shape, 2)
    optimizers = optimizers_of(shape, model)
    manager = moc.CheckpointManager(
        runs[rank], model=model, optimizer=optimizers, policy=EACH, memory_dir=memory[rank]
    )
    report = manager.restore()
    assert report is not None
    assert report.step == 3
    if rank == 1:
        assert report.sources["storage"] == sum(report.sources.values()) > 0
    states = _go_on(model, optimizers)
    manager._close(drain=False)
    return states


def _go_on(model: AnyModel, optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """State now, and after each of two more steps."""
    states = [everything(model, optimizers)]
    for _ in range(2):
        train_any(model, optimizers)
        states.append(everything(model, optimizers))
    return states


@settings(max_examples=8)
@example(shape=EVERY_KIND)
@given(shape=shapes())
def test_what_is_saved_is_what_was_there(shape: Shape) -> None:
    """In processes that share nothing but files: from both tiers, then from storage alone."""
    folder = Path(tempfile.mkdtemp(prefix="moc-test-", dir="/dev/shm"))
    try:
        run, memory = folder / "run", folder / "memory"
        memory.mkdir()
        (folder / "other").mkdir()
        (then,) = run_ranks(_save, 1, shape, run, memory, init=False)
        shutil.copytree(run, folder / "copy")
        places = [run, folder / "copy"], [memory, folder / "other"]
        for now in run_ranks(_resume, 2, shape, *places, init=False):
            for number, (expected, found) in enumerate(zip(then, now, strict=True)):
                wrong = [
                    k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k)
                ]
                assert not wrong, f"{number} steps after the restore: {sorted(wrong)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
