"""Two timelines never mix: what an earlier attempt left behind is not what this one has made.

The attempts of a run learn different texts here, so that the same step has other values in each.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, wait_at
from tests.support.oracle import Files
from tests.support.orphans import helpers_of, wait_for_helpers
from tests.support.start import Start, alone

import moc
from moc.core.manifest import attempt_key, encode_json, manifest_key, receipt_key, step_dir
from moc.core.versions import AttemptRecord, Version
from moc.errors import MismatchError, NothingValid, RestoreError, RunBusy, StepNotFound
from moc.persist import messages as say
from moc.persist.agent import Agent
from moc.persist.commit import commit
from moc.persist.writer import shared_buffer
from moc.store.local import LocalStore
from moc.store.wrap import RecordingStore
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

MEMORY_FIRST = moc.Policy(snapshot_every=2, persist_every=100, timeout_secs=30, grace_secs=1)
"""Commits the first save; the others stay in memory."""
EACH = moc.Policy(snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=30)
EVERY = wait_at(*range(2, 20, 2))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another text of the same length: other values at the same steps."""
    path = tmp_path / "other.bin"
    path.write_bytes(bytes((i * i * 3 + i // 5 + 7) % 241 for i in range(40_000)))
    return path


def state(outcomes: Iterable[Outcome], step: int) -> dict[str, torch.Tensor]:
    return merged(o.states[step] for o in outcomes)


def restored(outcomes: Iterable[Outcome]) -> dict[str, torch.Tensor]:
    return merged(o.restored for o in outcomes)


def sealed(job: Spec) -> set[tuple[int, int]]:
    return set(Files(job.run_dir, job.memory).seals)


def lose_node(job: Spec, node: int) -> None:
    wait_for_helpers(job.memory)
    shutil.rmtree(job.memory[node])


def go(job: Spec, **changes: Any) -> list[Outcome]:
    """A start that ends as by a fault."""
    return run_ranks(run_job, 4, job.but(drain=False, **changes))


def test_a_step_that_survivors_sealed_is_not_joined_with_its_namesake(
    spec: Callable[..., Spec], other: Path, tmp_path: Path
) -> None:
    job = spec(policy=MEMORY_FIRST)
    first = go(job, steps=7, record=(2, 4), after_step=wait_at(2))
    lose_node(job, 1)
    assert {(4, 1), (6, 1)} <= sealed(job)
    survivors = tmp_path / "survivors"
    shutil.copytree(job.memory[0], survivors)

    second = go(job, text=other, steps=5, record=(4,))
    assert second[0].report.step == 2
    assert_equal(restored(second), state(first, 2))
    assert not {v for v in sealed(job) if v[1] == 1 and v[0] > 2}
    assert (4, 2) in sealed(job)
    with pytest.raises(AssertionError):
        assert_equal(state(first, 4), state(second, 4))  # the timelines do differ

    # The survivors' buffers as if nobody had cleared them: 4 is sealed on every rank again.
    wait_for_helpers(job.memory)
    shutil.rmtree(job.memory[0])
    shutil.copytree(survivors, job.memory[0])
    seals = [
        seals for (step, _), seals in Files(job.run_dir, job.memory).seals.items() if step == 4
    ]
    assert set().union(*seals) == {0, 1, 2, 3}

    third = go(job, text=other, steps=3)
    assert third[0].report.step == 2
    assert_equal(restored(third), state(first, 2))


def test_the_step_sealed_again_is_the_one_that_comes_back(
    spec: Callable[..., Spec], other: Path
) -> None:
    job = spec(policy=MEMORY_FIRST)
    go(job, steps=7, after_step=wait_at(2))
    lose_node(job, 1)
    second = go(job, text=other, steps=5, record=(4,))
    third = go(job, text=other, steps=5)
    assert (third[0].report.step, third[0].report.restored_attempt) == (4, 2)
    assert third[0].report.sources["memory"] > 0 == third[0].report.sources["storage"]
    assert_equal(restored(third), state(second, 4))


def test_a_rollback_writes_the_same_steps_anew(spec: Callable[..., Spec], other: Path) -> None:
    job = spec(policy=EACH)
    first = go(job, steps=7, record=(2,), after_step=EVERY)
    before = _tree(job.run_dir)
    second = go(job, text=other, asked=2, steps=5, record=(4,), after_step=EVERY)
    assert (second[0].report.step, second[0].report.restored_attempt) == (2, 1)
    assert_equal(restored(second), state(first, 2))
    after = _tree(job.run_dir)
    assert {key: after.get(key) for key in before if key != "latest"} == {
        key: data for key, data in before.items() if key != "latest"
    }  # nothing was written twice
    assert manifest_key(Version(4, 1)) in after
    assert manifest_key(Version(4, 2)) in after
    third = go(job, text=other, steps=5)
    assert (third[0].report.step, third[0].report.restored_attempt) == (4, 2)
    assert_equal(restored(third), state(second, 4))


def test_a_late_commit_of_a_dead_attempt_is_never_used(
    spec: Callable[..., Spec], other: Path, tmp_path: Path
) -> None:
    job = spec(policy=EACH)
    store, dead = LocalStore(job.run_dir), Version(4, 1)
    first = go(job, steps=5, record=(2,), after_step=EVERY)
    wait_for_helpers(job.memory)
    # As if the last receipt were still on its way.
    late = tmp_path / "late"
    store.path(receipt_key(dead, 3)).rename(late)
    store.delete(manifest_key(dead))
    for memory in job.memory:
        shutil.rmtree(memory)
    second = go(job, text=other, steps=3)
    assert second[0].report.step == 2
    assert_equal(restored(second), state(first, 2))

    late.rename(store.path(receipt_key(dead, 3)))
    assert commit(store, dead) is not None
    assert store.exists(manifest_key(dead))
    third = go(job, text=other, steps=5, record=(4,), after_step=_lists({2}))
    assert third[0].report.step == 2
    fourth = go(job, text=other, steps=4)
    assert (fourth[0].report.step, fourth[0].report.restored_attempt) == (4, 3)
    assert_equal(restored(fourth), state(third, 4))


def test_an_orphaned_helper_publishes_nothing_of_an_overwritten_buffer(
    spec: Callable[..., Spec], other: Path
) -> None:
    job = spec(policy=EACH)

    def freeze(rank: int, step: int, manager: Any) -> None:
        if step < 4:
            manager.wait()
        if step == 3 and rank == 2:
            os.kill(manager._saver._handover._helper.pid, signal.SIGSTOP)

    go(job, steps=5, after_step=freeze)
    orphans = helpers_of(job.memory[1])
    assert orphans  # stopped, with the order to persist step 4 unread
    taken = {
        path: seal
        for path, seal in _buffers(job.memory[1]).items()
        if path.name.startswith("00002")
    }
    go(job, text=other, asked=2, steps=13, after_step=EVERY)
    for pid in orphans:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    wait_for_helpers(job.memory)
    store = LocalStore(job.run_dir)
    assert not store.exists(receipt_key(Version(4, 1), 2))
    assert not store.exists(manifest_key(Version(4, 1)))

    # The same order to a helper that nobody has ended: its seal is not there any more.
    path = next(path for path, seal in taken.items() if seal == (4, 1))
    mine, theirs = socket.socketpair()
    hello = say.Hello(
        url=str(job.run_dir),
        rank=2,
        world_size=4,
        attempt=1,
        keep_latest_k=None,
        keep_every=None,
        timeout_secs=5,
        grace_secs=5,
    )
    with mine, theirs:
        agent = Agent(hello, store, say.Channel(theirs, say.ToHelper))
        order = say.Persist(Version(4, 1), str(path), [(f"{step_dir(Version(4, 1))}/x", [0])], [])
        agent._handle(order)
        (answer,) = say.Channel(mine, say.FromHelper).receive(5)
    assert isinstance(answer, say.Failed)
    assert not store.exists(f"{step_dir(Version(4, 1))}/x")


def test_a_buffer_that_an_orphan_reads_is_not_overwritten(
    spec: Callable[..., Spec], other: Path
) -> None:
    job = spec(policy=EACH)
    go(job, steps=5, after_step=EVERY)
    wait_for_helpers(job.memory)
    path = next(p for p, v in _buffers(job.memory[1]).items() if v == (4, 1))
    bytes_before = path.read_bytes()
    policy = moc.Policy(
        snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=30, grace_secs=0.2
    )
    with shared_buffer(str(path)) as held:
        go(job, policy=policy, text=other, asked=2, steps=15, after_step=EVERY)
        assert bytes(held) == bytes_before
    assert path.read_bytes() == bytes_before


# --------------------------------------------------------------------- one process, many starts


@pytest.fixture
def one(spec: Callable[..., Spec]) -> Spec:
    return spec(policy=EACH, nodes=1, ep=1, zero=False)


def test_an_older_step_comes_back_and_no_other_in_its_place(one: Spec) -> None:
    def work(job: Spec) -> None:
        with Start(job) as start:
            assert start.manager.restore() is None
            states = {step: start.train(step - 1, step) for step in (2, 4, 6)}
            assert start.manager.all_steps() == [2, 4, 6]
        for missing in (3, 8):
            with Start(job) as start, pytest.raises(StepNotFound, match=f"step {missing}"):
                start.manager.restore(missing)
        with Start(job) as start:
            assert start.manager.restore(4).step == 4
            assert_equal(start.job.snapshot(), states[4])
            assert start.manager.all_steps() == [2, 4]
            start.train(5)
        with Start(job) as start, pytest.raises(StepNotFound, match="step 6"):
            start.manager.restore(6)  # the history went on from 4: it is no part of it

    alone(work, one)


def test_a_step_that_is_damaged_is_not_replaced_by_another_when_asked_for(
    one: Spec,
) -> None:
    def work(job: Spec) -> None:
        with Start(job) as start:
            start.manager.restore()
            start.train(1, 2, 3, 4)
        shutil.rmtree(job.memory[0])
        for path in job.run_dir.glob("step-00000004-a0001/dense-*"):
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        with Start(job) as start:
            with pytest.raises(RestoreError, match="digest differs"):
                start.manager.restore(4)
            with pytest.raises(RestoreError, match="undefined"):
                start.manager.restore(2)  # half of 4 is in the model now
        with Start(job) as start:
            assert start.manager.restore().step == 2

    alone(work, one)


def test_a_forgotten_restore_and_a_fresh_start(one: Spec) -> None:
    def work(job: Spec) -> None:
        with Start(job) as start:
            start.train(1, 2)  # without restore(): there is nothing to lose
        with pytest.raises(RestoreError, match="restore"), Start(job) as start:
            start.train(1, 2)
        with Start(job, fresh=True) as start:
            assert start.manager.restore() is None
            assert start.manager.all_steps() == []
            again = start.train(1, 2, 3, 4)
            assert start.manager.all_steps() == [2, 4]
        with Start(job) as start:
            report = start.manager.restore()
            assert (report.step, report.restored_attempt) == (4, 2)
            assert_equal(start.job.snapshot(), again)

    alone(work, one)


def test_another_model_is_refused(one: Spec) -> None:
    def work(job: Spec) -> None:
        with Start(job) as start:
            start.train(1, 2)
        before = _tree(job.run_dir)
        other = torch.nn.Linear(3, 3)
        options = {"policy": job.policy, "memory_dir": job.memory[0]}
        with (
            moc.CheckpointManager(job.run_dir, model=other, **options) as manager,
            pytest.raises(MismatchError, match="another model"),
        ):
            manager.restore()
        assert _tree(job.run_dir) == before

    alone(work, one)


class Beaten(RecordingStore):
    """Another job is a moment faster, once, at the first key that starts so."""

    def __init__(self, inner: Any, prefix: str, data: bytes) -> None:
        super().__init__(inner)
        self._prefix, self._data = prefix, data

    def put_new(self, key: str, chunks: Any) -> int:
        if self._prefix and key.startswith(self._prefix):
            self._prefix = ""
            self.inner.put_new(key, [self._data])
        return super().put_new(key, chunks)


def test_of_two_starts_at_once_one_gets_the_run(one: Spec) -> None:
    def work(job: Spec) -> None:
        with Start(job) as start:
            state = start.train(1, 2)
        kept = _tree(job.run_dir)
        rival = AttemptRecord(
            attempt=2, parent=1, resumed_step=2, world_size=1, k_snapshot=8, k_persist=8
        )
        store = Beaten(LocalStore(job.run_dir), "attempts/", encode_json(rival))
        with Start(job, store) as start, pytest.raises(RunBusy, match="attempt 2"):
            start.manager.restore()
        assert _tree(job.run_dir) == {**kept, attempt_key(2): encode_json(rival)}
        with Start(job) as start:
            assert start.manager.restore().attempt == 3
            assert_equal(start.job.snapshot(), state)

    alone(work, one)


def test_two_first_starts_at_once_make_one_run(one: Spec, tmp_path: Path) -> None:
    def work(job: Spec) -> None:
        with Start(job.but(run_dir=tmp_path / "rival")) as start:
            start.manager.restore()
        run = (tmp_path / "rival" / "run.json").read_bytes()
        with Start(job, Beaten(LocalStore(job.run_dir), "run.json", run)) as start:
            start.manager.restore()
            start.train(1, 2)
        assert (job.run_dir / "run.json").read_bytes() == run

    alone(work, one)


def test_half_of_what_was_never_committed_is_nothing(spec: Callable[..., Spec]) -> None:
    job = spec(policy=moc.Policy(snapshot_every=2, persist_every=None, grace_secs=1))
    go(job, steps=3)
    lose_node(job, 1)
    with pytest.raises(Exception, match="ranks \\[2, 3\\] are lost") as caught:
        go(job, steps=3)  # memory only: all there was is lost, and somebody should know
    assert isinstance(caught.value.__cause__, NothingValid)
    again = go(job, policy=MEMORY_FIRST, steps=1)  # not persisted *yet*: the job begins again
    assert again[0].report is None
    assert any(e.kind == "warning" and "starting over" in e.text for e in again[0].events)


def _buffers(node: Path) -> dict[Path, tuple[int, int]]:
    """Sealed buffers of a node, and what they hold."""
    files = Files(node / "none", [node])
    folder = next(node.glob("moc-*"))
    return {
        folder / seal["file"]: version
        for version, seals in files.seals.items()
        for seal in seals.values()
    }


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _lists(steps: set[int]) -> Callable[[int, int, Any], None]:
    """For ``after_step``: committed steps on the live history; then wait for the next one."""

    def look(rank: int, step: int, manager: Any) -> None:
        if step == 3:
            assert set(manager.all_steps()) == steps
        EVERY(rank, step, manager)

    return look
