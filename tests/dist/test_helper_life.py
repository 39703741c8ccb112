"""The helper's life and death: whoever is killed, no save is lost unsaid, nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.job import assert_equal
from tests.support.orphans import helpers_of, wait_for_helpers
from tests.support.tiny import Managers, adamw, dense, run_steps, state_of, train

import moc
from moc.core.faults import FaultScript
from moc.errors import SaveError
from moc.persist.residents import residents

pytestmark = pytest.mark.dist

POLICY = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=None, timeout_secs=30)


def helper_of(manager: moc.CheckpointManager) -> int:
    helper = manager._saver._handover._helper
    assert helper is not None
    return helper.pid


def children_of(pid: int) -> dict[int, str]:
    """Child processes and their states, zombies ("Z") among them, as /proc has them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parent) == pid:
            found[int(path.parent.name)] = state
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps_of(run: Path) -> dict[str, bytes]:
    """Files of the steps; `latest` may be put after the news of a commit."""
    return {name: data for name, data in tree(run).items() if name.startswith("step-")}


# ------------------------------------------------------------------------------ the helper dies


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_helper_killed_in_a_persist_costs_that_save_alone(
    managers: Managers, on_error: str
) -> None:
    """It is noticed at the very next step, whose save is persisted by the next helper."""
    events: list[moc.Event] = []
    model = dense()
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, keep_latest_k=None, timeout_secs=30, on_error=on_error
    )
    manager = managers(model, optimizer, policy=policy, on_event=events.append)
    manager.restore()
    mine = set(children_of(os.getpid()))
    run_steps(manager, model, optimizer, [1])
    manager.wait()
    first = helper_of(manager)
    os.kill(first, signal.SIGSTOP)  # so that the persist of step 2 is in flight
    run_steps(manager, model, optimizer, [2])
    manager.gate()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)

    train(model, optimizer, 3)
    if on_error == "raise":
        with pytest.raises(SaveError, match="step 2") as caught:
            manager.step(3)
        assert (caught.value.step, caught.value.rank) == (2, 0)
    else:
        manager.step(3)
    (failed,) = [e for e in events if e.kind == "failed"]
    assert (failed.step, failed.rank) == (2, 0)
    assert f"pid {first}) is gone, killed by signal 9" in failed.text
    second = helper_of(manager)
    assert second != first
    assert set(children_of(os.getpid())) - mine == {second}  # no zombie of the first
    assert manager.stats()["failed"] == manager.stats()["helper_restarts"] == 1

    run_steps(manager, model, optimizer, [4])
    manager.wait()
    state = state_of(model, optimizer)
    assert manager.latest_step() == 4
    assert 2 not in manager.all_steps()
    manager.close()
    assert not set(children_of(os.getpid())) - mine
    assert not helpers_of(managers.memory_dir)

    other = dense(1)
    second_optimizer = adamw(other)
    again = managers(other, second_optimizer, memory_dir=managers.memory_dir / "another")
    report = again.restore()
    assert report is not None
    assert report.step == 4
    assert_equal(state_of(other, second_optimizer), state)


def test_an_idle_helper_that_is_killed_costs_nothing(managers: Managers) -> None:
    events: list[moc.Event] = []
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer, policy=POLICY, on_event=events.append)
    run_steps(manager, model, optimizer, [1], lambda _: manager.wait())
    first = helper_of(manager)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    run_steps(manager, model, optimizer, [2], lambda _: manager.wait())
    assert manager.all_steps() == [1, 2]
    assert not [e for e in events if e.kind == "failed"]
    assert [e for e in events if e.kind == "warning" and "started again" in e.text]
    assert first not in children_of(os.getpid())


def test_a_failed_save_is_told_at_the_next_call_and_training_goes_on(managers: Managers) -> None:
    """Step, rank, path and cause; counted; and the save after it is good."""
    events: list[moc.Event] = []
    model = dense()
    optimizer = adamw(model)
    script = FaultScript(nth=1, verb="put_new", times=5)  # the tries of one operation
    manager = managers(model, optimizer, policy=POLICY, faults=script, on_event=events.append)
    manager.restore()
    run_steps(manager, model, optimizer, [1])
    handover = manager._saver._handover
    while handover.failed < 1:
        handover.listen(30)
    assert not any(e.kind == "failed" for e in events)  # callbacks run within calls alone
    run_steps(manager, model, optimizer, [2])
    (failed,) = [e for e in events if e.kind == "failed"]
    assert (failed.step, failed.rank) == (1, 0)
    key = "step-00000001-a0001/dense-00000.safetensors"
    assert key in failed.text
    assert "scripted fault" in failed.text
    assert manager.stats()["failed"] == 1
    run_steps(manager, model, optimizer, [3, 4], lambda _: manager.wait())
    assert manager.all_steps()[-2:] == [3, 4]
    assert 1 not in manager.all_steps()


# ----------------------------------------------------------------------------- the trainer dies

TRAINER = """
import os, signal, sys, moc
from moc.core.faults import FaultScript
from tests.support.tiny import adamw, dense, train
model = dense(); optimizer = adamw(model)
policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=None, timeout_secs=60,
    grace_secs=float(sys.argv[3]))
faults = FaultScript(nth=int(sys.argv[4]), verb="put_new", times=0) if sys.argv[4] != "0" else None
manager = moc.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, policy=policy,
    memory_dir=sys.argv[2], faults=faults)
manager.restore()
helper = manager._saver._handover._helper.pid
if faults is None:
    os.kill(helper, signal.SIGSTOP)  # it has done nothing yet when this process ends
train(model, optimizer, 1)
manager.step(1)
manager.gate()
print(helper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_trainer(run: Path, memory: Path, *, grace_secs: float, nth: int = 0) -> int:
    """A trainer that ends by SIGKILL with a persist in flight; its helper's process id."""
    words = [sys.executable, "-c", TRAINER, str(run), str(memory), str(grace_secs), str(nth)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout)


def test_a_killed_trainers_helper_finishes_and_leaves(managers: Managers) -> None:
    pid = killed_trainer(managers.run, managers.memory_dir, grace_secs=30)
    assert helpers_of(managers.memory_dir) == [pid]
    assert not list(managers.run.glob("step-*/manifest.json"))
    os.kill(pid, signal.SIGCONT)
    wait_for_helpers([managers.memory_dir])
    (manifest,) = managers.run.glob("step-*/manifest.json")
    assert manifest.parent.name == "step-00000001-a0001"
    model = dense()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    other = dense(1)
    fresh = adamw(other)
    report = managers(other, fresh, memory_dir=managers.memory_dir / "another").restore()
    assert report is not None
    assert_equal(state_of(other, fresh), state_of(model, optimizer))


def test_a_killed_trainers_helper_that_cannot_finish_leaves_all_the_same(
    managers: Managers,
) -> None:
    """The timeout of a live trainer is a minute; the grace of a dead one is short."""
    pid = killed_trainer(managers.run, managers.memory_dir, grace_secs=1, nth=1)
    wait_for_helpers([managers.memory_dir], timeout_secs=30)
    assert pid not in {r.pid for r in residents()}
    assert not list(managers.run.glob("step-*/manifest.json"))
    assert not list(managers.run.rglob("*.tmp"))


# --------------------------------------------------------------------- two runs, one memory_dir


@pytest.fixture
def neighbour(tmp_path: Path, memory_dir: Path) -> Iterator[Managers]:
    made = Managers(tmp_path / "neighbour", memory_dir)
    yield made
    made.close()


def test_two_runs_in_one_memory_dir_never_touch_one_another(
    managers: Managers, neighbour: Managers
) -> None:
    """One saves, dies, is settled and starts again; the other's helper and bytes stay."""
    model = dense(7)
    optimizer = adamw(model)
    ours = neighbour(model, optimizer, policy=POLICY)
    ours.restore()
    run_steps(ours, model, optimizer, [1, 2], lambda _: ours.wait())
    (folder,) = managers.memory_dir.glob("moc-*")
    helper, before = helper_of(ours), tree(folder)
    run_before = steps_of(neighbour.run)

    pid = killed_trainer(managers.run, managers.memory_dir, grace_secs=30)
    os.kill(pid, signal.SIGCONT)
    other = dense(1)
    fresh = adamw(other)
    events: list[moc.Event] = []
    theirs = managers(other, fresh, policy=POLICY, on_event=events.append)
    report = theirs.restore()  # ends the orphan, unseals, sweeps
    assert report is not None
    assert report.step == 1
    run_steps(theirs, other, fresh, [2, 3], lambda _: theirs.wait())
    theirs.close()

    assert helper_of(ours) == helper
    assert children_of(os.getpid())[helper] != "Z"
    assert tree(folder) == before
    assert steps_of(neighbour.run) == run_before
    run_steps(ours, model, optimizer, [3], lambda _: ours.wait())
    assert ours.all_steps() == [1, 2, 3]


def test_memory_of_dead_runs_does_not_pile_up(managers: Managers, neighbour: Managers) -> None:
    """A restart uses its own buffers again, and a run that is long dead is swept by any start."""
    first = neighbour(dense(7), policy=POLICY)
    first.step(1)
    first.close()
    (folder,) = managers.memory_dir.glob("moc-*")
    dead_since = 1_000_000_000
    for path in (*folder.iterdir(), folder):
        os.utime(path, (dead_since, dead_since))

    def start(step: int) -> set[str]:
        manager = managers(dense(1), policy=POLICY)
        manager.restore()
        for later in (step, step + 1):
            manager.step(later)
            manager.wait()
        managers.vanish(manager)
        (mine,) = managers.memory_dir.glob("moc-*")
        return {p.name for p in mine.iterdir() if p.suffix == ".safetensors"}

    once = start(1)
    assert not folder.exists()
    assert start(3) == start(5) == once
