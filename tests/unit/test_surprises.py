"""What an attack on the library found: each lost or mixed state, or said what was false."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import EACH, Managers, adamw, dense, moe, run_steps, state_of, train
from torch import nn

import moc
import moc.engine.structure as structure
from moc.core.faults import FaultScript
from moc.errors import RestoreError, SaveError

BROKEN = FaultScript(nth=1, verb="put_new", times=0)
MEMORY_ONLY = moc.Policy(snapshot_every=1, persist_every=None)


class _Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_an_optimizer_that_loaded_a_state_is_saved_as_it_is(managers: Managers) -> None:
    model = dense(0)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run_steps(manager, model, optimizer, [3, 4])
    then = state_of(model, optimizer)
    again = dense(1)
    fresh = adamw(again)
    report = managers(again, fresh).restore()
    assert report is not None
    assert report.step == 4
    now = state_of(again, fresh)
    assert all(torch.equal(now[name], then[name]) for name in then)


def test_a_step_that_is_saved_twice_comes_back_as_it_was_saved_last(managers: Managers) -> None:
    model, position = dense(0), _Position()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=100)
    manager = managers(model, optimizer, policy=policy, extras={"at": position})
    run_steps(manager, model, optimizer, [1, 2, 3])
    manager.wait()
    position.at = 5
    manager.save(3)
    manager.wait()
    managers.vanish(manager)
    again, here = dense(1), _Position()
    report = managers(again, adamw(again), policy=policy, extras={"at": here}).restore()
    assert report is not None
    assert (report.step, here.at) == (3, 5)


def test_the_step_resumed_from_is_not_taken_for_a_commit_of_this_attempt(
    managers: Managers,
) -> None:
    model = dense(0)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    again = dense(1)
    manager = managers(again, adamw(again), faults=BROKEN)
    report = manager.restore()
    assert report is not None
    manager.save(report.step)
    with pytest.raises(SaveError):
        manager.wait()


def test_a_commit_of_an_attempt_that_was_overtaken_is_not_announced(managers: Managers) -> None:
    model = dense(0)
    optimizer = adamw(model)
    seen: list[moc.Event] = []
    first = managers(model, optimizer, on_event=seen.append)
    run_steps(first, model, optimizer, [1, 2], lambda _: first.wait())
    other = dense(1)
    assert managers(other, adamw(other)).restore() is not None
    train(model, optimizer, 3)
    first.step(3)
    with pytest.raises(SaveError, match="taken this run over"):
        first.wait()
    assert [e.step for e in seen if e.kind == "committed"] == [1, 2]


def test_snapshots_in_memory_are_not_overlooked_without_restore(managers: Managers) -> None:
    model = dense(0)
    optimizer = adamw(model)
    with managers(model, optimizer, policy=MEMORY_ONLY) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    again = dense(1)
    fresh = adamw(again)
    manager = managers(again, fresh, policy=MEMORY_ONLY)
    with pytest.raises(RestoreError, match=r"call manager\.restore"):
        run_steps(manager, again, fresh, [1])


def test_a_restart_has_the_memory_that_its_own_buffers_take(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(folder: Path) -> int:
        return 900_000 - sum(p.stat().st_size for p in folder.glob("*/*.safetensors"))

    monkeypatch.setattr(structure, "usable_bytes", free)
    for step in (1, 2, 3):
        model = dense(0)
        optimizer = adamw(model)
        with managers(model, optimizer) as manager:
            manager.restore()
            run_steps(manager, model, optimizer, [step])


def test_a_wiped_folder_and_a_dead_helper_do_not_end_training(managers: Managers) -> None:
    model = dense(0)
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    run_steps(manager, model, optimizer, [1], lambda _: manager.wait())
    helper: Any = manager._saver._handover._helper
    shutil.rmtree(helper.memory_dir)
    os.kill(helper.pid, signal.SIGKILL)
    helper._process.wait(30)
    run_steps(manager, model, optimizer, [2, 3])
    manager.wait()


def test_a_forked_child_leaves_the_helper_alone(managers: Managers) -> None:
    model = dense(0)
    manager = managers(model, adamw(model))
    said: list[object] = []
    manager._close = lambda **_: said.append(1)  # type: ignore[method-assign]
    manager._pid += 1  # as a child sees it
    manager._at_exit()
    assert not said


def test_a_relative_memory_dir(
    managers: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near").mkdir()
    model = dense(0)
    optimizer = adamw(model)
    with managers(model, optimizer, memory_dir="near", policy=EACH) as manager:
        run_steps(manager, model, optimizer, [1])
    assert manager.latest_step() == 1


SCRIPT = """
import sys, torch, moc
from tests.support.tiny import adamw, dense, train
model = dense(0); optimizer = adamw(model)
manager = moc.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer,
    memory_dir=sys.argv[2], policy=moc.Policy(snapshot_every=2, persist_every=2))
for step in (1, 2, 3, 4):
    train(model, optimizer, step)
    if step == 4:
        manager._saver._pass_over(4)
        import moc.engine.save as save
        decide = save.decide
        import msgspec
        save.decide = lambda *a, **k: (setattr(save, "decide", decide),
            msgspec.structs.replace(decide(*a, **k), marked=False))[1]
    manager.step(step)
"""


def test_a_script_without_close_makes_its_last_save_up(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "memory")]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/step-00000004-a0001/manifest.json").exists(), done.stderr


class _Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # bound anew, every time
        return x


def test_a_buffer_bound_anew_within_a_compiled_part_is_saved_as_it_is(managers: Managers) -> None:
    def make(seed: int) -> nn.Module:
        model = dense(seed)
        model.insert(0, torch.compile(_Averaging(), backend="eager"))  # type: ignore[attr-defined]
        return model

    model = make(0)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3])
    again = make(1)
    managers(again, adamw(again)).restore()
    assert torch.equal(again[0]._orig_mod.mean, model[0]._orig_mod.mean)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_base_that_vanishes_costs_one_save_and_no_more(managers: Managers, damage: str) -> None:
    model = moe(0)
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=1, k_snapshot=2, k_persist=1)
    manager = managers(model, optimizer, policy=policy)
    run_steps(manager, model, optimizer, [1, 2], lambda _: manager.wait())
    manifest = managers.run / "step-00000002-a0001/manifest.json"
    if damage == "gone":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-9])
    run_steps(manager, model, optimizer, [3])
    with pytest.raises(SaveError, match=r"builds on step 2 .*the next save is full"):
        manager.wait()
    run_steps(manager, model, optimizer, [4, 5], lambda _: manager.wait())
    then = state_of(model, optimizer)
    manager.close()
    again = moe(1)
    fresh = adamw(again)
    elsewhere = managers.memory_dir / "another"
    report = managers(again, fresh, policy=policy, memory_dir=elsewhere).restore()
    assert report is not None
    assert (report.step, report.oldest_expert_age) == (5, 1)
    assert then.keys() == state_of(again, fresh).keys()


def test_steps_that_are_kept_for_ever_outlive_a_rollback_and_a_fresh_start(
    managers: Managers,
) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=1, keep_every=3)
    for asked, fresh, steps in ((None, False, range(1, 5)), (3, False, [4, 5]), (None, True, [1])):
        model = dense(0)
        optimizer = adamw(model)
        with managers(model, optimizer, policy=policy, fresh=fresh) as manager:
            manager.restore(asked)
            run_steps(manager, model, optimizer, list(steps), lambda _: manager.wait())
    kept = sorted(p.parent.name for p in managers.run.glob("step-*/manifest.json"))
    assert kept == ["step-00000001-a0003", "step-00000003-a0001"]
    files = json.loads((managers.run / "step-00000003-a0001/manifest.json").read_bytes())["files"]
    assert files
    assert all((managers.run / file["key"]).exists() for file in files)
