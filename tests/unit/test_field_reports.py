"""What users report of other checkpoint libraries, tried here: A01 to A07 of the field reports.

Each test is the trial of its report, through the public interface, on real files and processes.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.job import assert_equal
from tests.support.tiny import EACH, Managers, adamw, dense, state_of, stored, train, whole
from torch import nn

import moc
from moc.core.faults import FaultScript
from moc.core.manifest import step_dir
from moc.core.versions import Version
from moc.errors import ConfigError, SaveError, StepNotFound
from moc.persist.client import orphans, stop
from moc.persist.verify import verify
from moc.store.local import LocalStore
from moc.testing.ranks import reach, start_ranks

ON_REQUEST = moc.Policy(snapshot_every=1000, persist_every=1000, on_error="raise")
"""Nothing is saved but by `manager.save`."""


def helper_of(manager: moc.CheckpointManager) -> int:
    """Process id of a manager's helper, whose command line may not be set yet."""
    helper = manager._saver._handover._helper
    assert helper is not None
    return helper.pid


def helpers(memory_dir: Path) -> list[int]:
    """Process ids of the helpers of the runs in a memory directory."""
    return [pid for folder in memory_dir.glob("moc-*") for pid in orphans(str(folder))]


# ------------------------------------------------------------------------------------------- A01


def push(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, gradient)
    optimizer.step()


def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Everything 0, but for the optimizer's step, which is 1."""
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            state = optimizer.state[param]
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            state["step"].fill_(1)


class Containers:
    """Python lists and scalars that change in place."""

    def __init__(self) -> None:
        self.state = {"list": [0, 0], "done": False}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "at once"])
def test_a01_what_happens_after_the_call_is_not_in_the_file(
    managers: Managers, overlap: bool
) -> None:
    policy = moc.Policy(snapshot_every=1000, persist_every=1000, overlap=overlap)
    # 80 kB each: large enough to be copied while training goes on
    model = nn.ParameterList(nn.Parameter(torch.zeros(20_000)) for _ in range(20))
    optimizer, extra = torch.optim.AdamW(model.parameters(), lr=0.1), Containers()
    push(model, optimizer, 1.0)
    manager = managers(model, optimizer, policy=policy, extras={"mine": extra})
    manager.restore()
    helper = helper_of(manager)
    for number in range(1, 6):
        zero(model, optimizer)
        extra.state = {"list": [0, 0], "done": False}
        os.kill(helper, signal.SIGSTOP)  # no writer is slower
        manager.save(number)
        extra.state["list"][0], extra.state["done"] = 1, True
        if number % 2 or not overlap:
            manager.gate()  # for what is not an optimizer's step: the call that makes it safe
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(1)
        for _ in range(5):
            push(model, optimizer, 1.0)
        os.kill(helper, signal.SIGCONT)
        manager.wait()
        assert manager.stats()["torn"] == 0
        pieces = stored(managers.run, number)
        for i in range(20):
            for part in ("weight", "exp_avg", "exp_avg_sq"):
                assert not whole(pieces, str(i), part).any(), (number, i, part)
            assert whole(pieces, str(i), "step") == 1, (number, i)
    managers.vanish(manager)
    told = Containers()
    told.state = {"list": [5, 5], "done": None}
    assert managers(model, optimizer, policy=policy, extras={"mine": told}).restore()
    assert told.state == {"list": [0, 0], "done": False}
    assert not any(param.any() for param in model.parameters())


# ------------------------------------------------------------------------------------------- A02


class Disk:
    """Storage that can be full: a tmpfs of 1 MB, or without the right to mount, a file limit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "moc-test", str(path)]
        self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self, helper: int) -> None:
        if self.mounted:
            (self.path / "ballast").write_bytes(bytes(600_000))
        else:
            resource.prlimit(helper, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    def free(self, helper: int) -> None:
        if self.mounted:
            (self.path / "ballast").unlink()
        else:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(helper, resource.RLIMIT_FSIZE, unlimited)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    yield made
    made.close()


def test_a02_a_failed_background_save_is_reported(disk: Disk, managers: Managers) -> None:
    torch.manual_seed(0)
    model = nn.Linear(150, 150)  # with moments 272 kB
    optimizer, run = adamw(model), disk.path / "run"
    events: list[moc.Event] = []
    manager = managers(model, optimizer, directory=run, policy=ON_REQUEST, on_event=events.append)
    push(model, optimizer, 1.0)
    manager.save(1)
    manager.wait()
    helper = helper_of(manager)
    disk.fill(helper)
    push(model, optimizer, 1.0)
    manager.save(2)
    for _ in range(3):  # training goes on
        push(model, optimizer, 1.0)
    with pytest.raises(SaveError, match=r"step 2 .*dense-00000\.safetensors") as caught:
        manager.save(5)
    assert caught.value.step == 2
    assert str(run) in str(caught.value)
    assert ("No space left" in str(caught.value)) is disk.mounted
    assert manager.stats()["failed"] == 1
    assert [e.step for e in events if e.kind == "failed"] == [2]
    assert manager.all_steps() == [1]
    assert verify(LocalStore(run)).ok
    assert not list(run.glob("**/.*"))  # no half file is left to fill the disk for good

    disk.free(helper)
    push(model, optimizer, 1.0)
    manager.save(6)
    then = state_of(model, optimizer)
    manager.close()
    assert manager.all_steps() == [1, 6]
    push(model, optimizer, 1.0)
    elsewhere = managers.memory_dir / "another"
    report = managers(model, optimizer, directory=run, memory_dir=elsewhere).restore()
    assert report is not None
    assert report.step == 6
    assert_equal(state_of(model, optimizer), then)


# ------------------------------------------------------------------------------------------- A03

SCRIPT = """
import sys, torch, moc
model = torch.nn.Linear(4, 4)
manager = moc.CheckpointManager(sys.argv[1], model=model, memory_dir=sys.argv[2]{options})
manager.save(10)
{end}
"""


def run_script(managers: Managers, options: str = "", end: str = "") -> tuple[int, str]:
    """Exit code and standard error of a script that neither waits nor closes."""
    script = managers.run.parent / "script.py"
    script.write_text(SCRIPT.format(options=options, end=end))
    command = [sys.executable, str(script), str(managers.run), str(managers.memory_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stderr


def test_a03_the_last_save_outlives_the_end_of_the_script(managers: Managers) -> None:
    assert run_script(managers) == (0, "")
    assert managers(nn.Linear(4, 4)).latest_step() == 10
    assert not helpers(managers.memory_dir)


def test_a03_a_last_save_that_fails_is_no_success(managers: Managers) -> None:
    fault = ', faults=moc.core.faults.FaultScript(nth=1, verb="put_new", times=0)'
    code, told = run_script(managers, options=fault)
    assert code != 0
    assert "step 10 was not committed" in told
    assert "dense-00000.safetensors" in told


def test_a03_a_script_that_dies_of_an_error_waits_for_nobody(managers: Managers) -> None:
    """The helper is stopped; who waited for it would take two minutes and tell another error."""
    end = "manager.gate()\nmanager._saver._handover._helper._process.send_signal(19)\n1 / 0"
    code, told = run_script(managers, end=end)
    assert code == 1
    assert told.rstrip().endswith("ZeroDivisionError: division by zero")
    stop(helpers(managers.memory_dir), 30)


# ------------------------------------------------------------------------------------------- A04


def test_a04_nothing_is_announced_before_it_is_durable(managers: Managers) -> None:
    """Kill the trainer at random moments, and every second time the helper; look all the time."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    model = dense()
    optimizer = adamw(model)
    reference = [state_of(model, optimizer)]
    for step in range(1, 200):
        train(model, optimizer, step)
        reference.append(state_of(model, optimizer))

    def life(_rank: int) -> None:
        model = dense(1)
        optimizer = adamw(model)
        words: list[moc.Event] = []
        manager = managers(model, optimizer, on_event=words.append)
        report = manager.restore()
        if report is not None:
            assert_equal(state_of(model, optimizer), reference[report.step])
        else:
            model.load_state_dict(reference[0])
        reach("restored")
        first = report.step + 1 if report else 1
        for step in range(first, len(reference)):
            train(model, optimizer, step)
            manager.step(step)
            told = {e.step for e in words if e.kind == "committed"}
            assert told <= set(manager.all_steps())  # the word "committed" comes after the fact
            if step % 3 == 0:
                manager.wait()
            reach(f"made {step - first + 1}")
        signal.pause()

    observer, verified = managers(dense()), set()

    def look() -> None:
        hint = managers.run / "latest"
        announced = {int(hint.read_text())} if hint.exists() else set()
        listed = set(observer.all_steps())
        assert announced <= listed
        for step in sorted(listed - verified):
            report = verify(LocalStore(managers.run), [step])
            assert report.ok, report.damaged
            verified.add(step)

    for number in range(6):
        with start_ranks(life, 1, init=False) as ranks:
            for made in range(1, chance.randint(4, 12)):
                ranks.wait_reached(0, f"made {made}")
                look()
            ranks.kill(0)
        before = observer.latest_step() or 0
        if number % 2:
            stop(helpers(managers.memory_dir), 30)
        look()
        assert (observer.latest_step() or 0) >= before
    stop(helpers(managers.memory_dir), 30)
    look()
    assert len(verified) >= 6  # one commit in every life, at least
    elsewhere = managers.memory_dir / "another"
    manager = managers(model, optimizer, memory_dir=elsewhere)
    report = manager.restore()
    assert report is not None
    assert report.step == max(verified)
    assert_equal(state_of(model, optimizer), reference[report.step])


# ------------------------------------------------------------------------------------------- A05


def delete_a_file(folder: Path) -> None:
    (folder / "dense-00000.safetensors").unlink()


def cut_a_file(folder: Path) -> None:
    path = folder / "dense-00000.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def drop_the_manifest(folder: Path) -> None:
    """As it is before the last receipt has come; with all of them it would be made again."""
    (folder / "manifest.json").unlink()
    (folder / "rank-00000.receipt").unlink()


def leave_temporary_names(folder: Path) -> None:
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f".4711-{number:016x}.tmp")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (delete_a_file, r"dense-00000\.safetensors.*No such file"),
        (cut_a_file, r"dense-00000\.safetensors.*(bytes instead of|digest)"),
        (drop_the_manifest, "never committed"),
        (leave_temporary_names, "never committed"),
    ],
)
def test_a05_a_half_written_newest_step_is_passed_over(
    managers: Managers, damage: Callable[[Path], None], why: str
) -> None:
    model = dense()
    optimizer = adamw(model)
    states = {}
    with managers(model, optimizer, policy=EACH) as manager:
        for step in (200, 300):
            train(model, optimizer, step)
            states[step] = state_of(model, optimizer)
            manager.save(step)
    good = managers.run.rename(managers.run.with_name("good"))  # and a moved tree is no other run

    def resume(number: int) -> moc.CheckpointManager:
        """A new process on a node without memory of the run."""
        return managers(model, optimizer, memory_dir=managers.memory_dir / str(number))

    shutil.copytree(good, managers.run)
    whole_report = resume(1).restore()
    assert whole_report is not None
    assert whole_report.step == 300
    assert whole_report.reasons == []
    shutil.rmtree(managers.run)

    shutil.copytree(good, managers.run)
    damage(managers.run / step_dir(Version(300, 1)))
    with pytest.raises(StepNotFound, match=f"step 300 .*{why}"):
        resume(2).restore(300)
    manager = resume(3)
    report = manager.restore()
    assert report is not None
    assert report.step == 200
    assert_equal(state_of(model, optimizer), states[200])
    (reason,) = report.reasons
    assert "step 300 (attempt 1)" in reason
    assert re.search(why, reason), reason

    train(model, optimizer, 300)  # the same step once more
    assert_equal(state_of(model, optimizer), states[300])
    manager.save(300)
    manager.close()
    again = resume(4).restore()
    assert again is not None
    assert (again.step, again.restored_attempt) == (300, 2)


# -------------------------------------------------------------------------------------- A06, A07


def test_a06_a_disk_that_fills_up_in_a_save(disk: Disk, managers: Managers) -> None:
    torch.manual_seed(0)
    model = nn.Linear(150, 150)
    optimizer, run = adamw(model), disk.path / "run"
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=2)
    manager = managers(model, optimizer, directory=run, policy=policy)
    push(model, optimizer, 1.0)
    manager.save(1)
    manager.wait()
    first = state_of(model, optimizer)
    helper = helper_of(manager)
    disk.fill(helper)
    push(model, optimizer, 1.0)
    manager.save(2)
    with pytest.raises(SaveError, match=r"step-00000002-a0001/dense-00000\.safetensors"):
        manager.wait()
    assert manager.all_steps() == [1]
    assert not list(run.glob("**/.*"))
    push(model, optimizer, 1.0)
    elsewhere = managers.memory_dir / "another"
    weights = managers(model, optimizer, directory=run, memory_dir=elsewhere)
    report = weights.restore(weights_only=True)
    assert report is not None
    assert report.step == 1
    assert torch.equal(model.weight, first["weight"])
    disk.free(helper)
    push(model, optimizer, 1.0)
    manager.save(3)
    manager.wait()
    assert manager.all_steps() == [1, 3]


@pytest.mark.parametrize("keep", [0, -1])
def test_a07_limits_that_keep_nothing_are_refused(keep: int) -> None:
    with pytest.raises(ConfigError, match="keep_latest_k"):
        moc.Policy(keep_latest_k=keep)


def test_a07_a_failed_save_never_costs_the_only_good_step(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=1)
    faults = FaultScript(nth=5, verb="put_new", times=0)  # the receipt of step 2
    manager = managers(model, optimizer, policy=policy, faults=faults)
    train(model, optimizer, 1)
    manager.step(1)
    manager.wait()
    first = state_of(model, optimizer)
    train(model, optimizer, 2)
    manager.step(2)
    with pytest.raises(SaveError):
        manager.wait()
    managers.vanish(manager)
    again = managers(model, optimizer, policy=policy, memory_dir=managers.memory_dir / "another")
    report = again.restore()
    assert report is not None
    assert report.step == 1
    assert_equal(state_of(model, optimizer), first)
    train(model, optimizer, 2)
    again.step(2)
    again.close()
    assert again.all_steps() == [2]
