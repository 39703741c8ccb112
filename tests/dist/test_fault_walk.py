"""Every operation of the store fails once, one after the other: in a save, and in a restore.

The walk goes on until an operation number that is not reached any more: so each one that is
reached must have told the caller that it failed.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.job import Spec, assert_equal, merged, run_job
from tests.support.oracle import Files
from tests.support.start import Start, alone

import moc
from moc import knobs
from moc.core.faults import FaultScript
from moc.errors import MocError, SaveError
from moc.store.local import LocalStore
from moc.store.wrap import FaultyStore, RetryingStore
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

PATIENT = moc.Policy(snapshot_every=2, persist_every=2, keep_latest_k=1, timeout_secs=60)
SHORT = moc.Policy(snapshot_every=2, persist_every=2, keep_latest_k=1, timeout_secs=1, grace_secs=1)
KEPT = moc.Policy(snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=60)
MOST = 60  # more operations than any save or restore here makes


class Walk:
    """Copies of one run with step 2 committed, and what it has at steps 2 and 4."""

    def __init__(self, job: Spec, committed: int) -> None:
        self._job = job
        self._number = 0
        with Start(job.but(policy=KEPT)) as start:
            start.manager.restore()
            self.states = {2: start.train(1, 2)}
            if committed > 2:
                self.states[4] = start.train(3, 4)
            start.manager.close()
        if committed == 2:
            with Start(self.copy().but(policy=KEPT)) as start:
                start.manager.restore()
                self.states[4] = start.train(3, 4)

    def copy(self, *, memory: bool = True) -> Spec:
        """A run of its own to be spoilt."""
        self._number += 1
        home = self._job.run_dir.parent / f"case-{self._number}"
        spec = self._job.but(run_dir=home / "run", memory=(self._job.memory[0].parent / home.name,))
        shutil.copytree(self._job.run_dir, spec.run_dir)
        if memory:
            shutil.copytree(self._job.memory[0], spec.memory[0])
        return spec

    def check(self, job: Spec, *, least: int, go_on: bool = True) -> int:
        """From storage alone: a whole step, the newest; training and saving go on."""
        shutil.rmtree(job.memory[0])
        best = Files(job.run_dir, []).best()
        with Start(job.but(policy=PATIENT)) as start:
            report = start.manager.restore()
            assert report is not None
            assert best is not None
            assert (report.step, report.restored_attempt) == best.version
            assert report.step >= least
            assert_equal(start.job.snapshot(), self.states[report.step])
            if go_on:
                start.train(report.step + 1, report.step + 2)
                assert start.manager.latest_step() == report.step + 2
            start.manager.close()
        shutil.rmtree(job.memory[0])
        return report.step


def save_with(job: Spec, script: FaultScript) -> tuple[Start, str]:
    """One more commit with a helper whose store fails; what was raised, if anything."""
    start, raised = Start(job, faults=script), ""
    assert start.manager.restore().step == 2
    try:
        start.train(3, 4)
    except SaveError as error:
        raised = str(error)
    with suppress(SaveError):  # the same, told again at the end
        start.manager.close()
    return start, raised


# After a read an answer that is lost is a read that failed before: only writes are walked twice.
@pytest.mark.parametrize(
    ("when", "verb"), [("before", ""), ("after", "put_new"), ("after", "put"), ("after", "delete")]
)
def test_each_operation_of_a_save_fails_once(
    spec: Callable[..., Spec], when: Any, verb: str
) -> None:
    def work(job: Spec) -> None:
        walk, told = Walk(job, committed=2), []
        for nth in range(1, MOST):
            case = walk.copy().but(policy=PATIENT)
            script = FaultScript(nth=nth, verb=verb, when=when)
            start, raised = save_with(case, script)
            faults = [e.text for e in start.events if "scripted fault" in e.text]
            assert not raised, (nth, raised)  # once is put right, and told
            if not faults:
                break
            told.append(faults[0])
            assert walk.check(case, least=4, go_on=nth % 4 == 1) == 4
            shutil.rmtree(case.run_dir)
        if verb:
            assert len(told) == {"put_new": 4, "put": 1, "delete": 4}[verb]
        else:
            _assert_all_kinds(told)

    alone(work, spec(nodes=1, ep=1, zero=False))


def test_from_each_operation_of_a_save_on_the_store_is_dead(spec: Callable[..., Spec]) -> None:
    def work(job: Spec) -> None:
        walk, told, steps = Walk(job, committed=2), [], []
        for nth in range(1, MOST):
            case = walk.copy().but(policy=SHORT)
            start, raised = save_with(case, FaultScript(nth=nth, times=0))
            texts = [e.text for e in start.events if "scripted fault" in e.text]
            if not texts and not raised:
                break
            told += texts[:1]
            committed = any(e.kind == "committed" for e in start.events)
            assert committed != bool(raised), (nth, raised, start.events)
            if raised:
                assert "step 4" in raised
                assert texts  # events have told the cause, whoever gave up first
            least = 4 if committed else 2
            steps.append(walk.check(case, least=least, go_on=nth % 4 == 1))
            shutil.rmtree(case.run_dir)
        _assert_all_kinds(told)
        assert steps == sorted(steps)
        assert set(steps) == {2, 4}

    alone(work, spec(nodes=1, ep=1, zero=False))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_helper_killed_in_retention_leaves_no_step_without_its_files(
    spec: Callable[..., Spec], when: Any
) -> None:
    def work(job: Spec) -> None:
        walk = Walk(job, committed=2)
        for nth in range(1, MOST):
            case = walk.copy().but(policy=PATIENT)
            script = FaultScript(nth=nth, verb="delete", error="kill", when=when)
            _, raised = save_with(case, script)
            assert not raised
            if not (case.run_dir / "step-00000002-a0001").exists():
                break  # nothing is left to delete
            shutil.rmtree(case.memory[0])
            with Start(case.but(policy=KEPT)) as start:
                assert start.manager.restore().step == 4
                steps = start.manager.all_steps()
            for step in sorted(steps, reverse=True):
                with Start(case.but(policy=KEPT)) as start:
                    assert start.manager.restore(step).step == step
                    assert_equal(start.job.snapshot(), walk.states[step])
        assert nth >= 4

    alone(work, spec(nodes=1, ep=1, zero=False))


def _assert_all_kinds(told: list[str]) -> None:
    """The walk has met every file of a save, its commit, and retention."""
    text = "\n".join(told)
    print(f"{len(told)} operations\n{text}")
    for part in ("dense-", "experts-", "receipt", "put_new", "manifest.json", "latest", "attempts"):
        assert part in text
    assert "delete" in text
    assert len(told) < MOST - 1


def test_a_failed_save_raises_at_a_later_call_where_the_policy_says_so(
    spec: Callable[..., Spec],
) -> None:
    def work(job: Spec) -> None:
        walk = Walk(job, committed=2)
        case = walk.copy().but(
            policy=moc.Policy(snapshot_every=2, persist_every=2, on_error="raise")
        )
        start = Start(case, faults=FaultScript(nth=1, times=0))
        start.manager.restore()
        error = _first_error(start, 60)
        assert "step 4" in str(error)
        assert (error.step, error.rank) == (4, 0)
        # The base's manifest where there was one to compare with, else the first file to write.
        assert error.path.startswith("step-0000000")
        assert error.path in str(error)
        with suppress(SaveError):
            start.manager.close()
        walk.check(case, least=2)

    alone(work, spec(nodes=1, ep=1, zero=False))


def _first_error(start: Start, within_secs: float) -> SaveError:
    """Train until `manager.step` raises."""
    end = knobs.monotonic() + within_secs
    for step in itertools.count(3):
        start.job.step()
        try:
            start.manager.step(step)
        except SaveError as error:
            return error
        assert knobs.monotonic() < end, "no call has raised what the helper told"
    raise AssertionError


# ------------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("nth", "times"), [(2, 1), (3, 1), (1, 0), (3, 0)])
def test_one_rank_of_four(
    spec: Callable[..., Spec], tmp_path: Path, rank: int, nth: int, times: int
) -> None:
    job = spec(policy=KEPT)

    def wait(me: int, _step: int, manager: Any) -> None:
        try:
            manager.wait()
        except SaveError as error:
            (tmp_path / f"error-{me}").write_text(str(error))

    run_ranks(run_job, 4, job.but(steps=3, after_step=wait))
    script = FaultScript(nth=nth, times=times)
    second = job.but(steps=4, after_step=wait, faults=script, faulty_rank=rank, record=(2, 4))
    policy = moc.Policy(snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=30)
    saved = run_ranks(run_job, 4, second.but(policy=policy, drain=False), timeout_secs=100)
    errors = {r: _read(tmp_path / f"error-{r}") for r in range(4)}
    events = [e for e in saved[rank].events if "scripted fault" in e.text]
    assert events
    if times:
        assert set(errors.values()) == {""}
        expected = 4
    else:
        assert all(f"rank {rank}" in text for text in errors.values()), errors
        expected = 2
    for memory in job.memory:
        shutil.rmtree(memory)
    again = run_ranks(run_job, 4, job.but(steps=6, after_step=wait))
    assert again[0].report.step == expected
    if expected == 4:
        whole = merged(o.states[4] for o in saved)
        assert_equal(merged(o.restored for o in again), whole)
    else:
        assert_equal(merged(o.restored for o in again), merged(o.restored for o in saved))
    assert LocalStore(job.run_dir).exists(
        f"step-00000006-a{again[0].report.attempt:04d}/manifest.json"
    )


# ------------------------------------------------------------------------------------ restores


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "storage"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_operation_of_a_restore_fails_once(
    spec: Callable[..., Spec], when: Any, memory: bool
) -> None:
    def work(job: Spec) -> None:
        walk = Walk(job, committed=4)
        outcomes: Counter[str] = Counter()
        for nth in _some(memory):
            case = walk.copy(memory=memory).but(policy=KEPT)
            before = _keys(case.run_dir)
            store = FaultyStore(LocalStore(case.run_dir), FaultScript(nth=nth, when=when))
            with Start(case, store) as start:
                untouched = start.job.snapshot()
                error, report = _restore(start)
                new = _keys(case.run_dir) - before
                if report is None:
                    outcomes["raised"] += 1
                    assert "scripted fault" in error
                    assert not new or (when == "after" and new == {"attempts/0002.json"})
                    if "attempts/0002" not in error:  # else all is loaded already
                        assert_equal(start.job.snapshot(), untouched)
                else:
                    assert new >= {"attempts/0002.json"}
                    assert_equal(start.job.snapshot(), walk.states[report.step])
                    if any("leftovers stay" in event.text for event in start.events):
                        outcomes["leftovers"] += 1
                        assert report.step == 4
                    elif store.count >= nth:
                        # A piece that could not be read: an older whole step, and the reason.
                        assert report.step == 2
                        (reason,) = [r for r in report.reasons if "scripted fault" in r]
                        assert len(reason) < 1000
                        outcomes["step 2"] += 1
                    else:
                        outcomes[f"step {report.step}"] += 1
            if report is None:
                with Start(case) as start:
                    assert start.manager.restore().step == 4
                    assert_equal(start.job.snapshot(), walk.states[4])
            shutil.rmtree(case.run_dir)
            shutil.rmtree(case.memory[0])
            if store.count < nth:
                break
        print(outcomes)
        assert outcomes["raised"] > 5
        assert outcomes["step 4"] == 1 or not memory
        assert outcomes["step 2"] > 0 or memory

    alone(work, spec(nodes=1, ep=1, zero=False))


def _restore(start: Start) -> tuple[str, moc.RestoreReport | None]:
    try:
        return "", start.manager.restore()
    except MocError as error:
        return str(error), None


def _some(memory: bool) -> range | list[int]:
    """Operation numbers: all of an inventory, and of the many reads of pieces a few."""
    return range(1, 1000) if memory else [*range(1, 12), 30, 100]


def test_a_store_that_is_tried_again_costs_no_step(spec: Callable[..., Spec]) -> None:
    def work(job: Spec) -> None:
        walk = Walk(job, committed=4)
        for nth in (1, 5, 9, 14, 30, 100):
            case = walk.copy(memory=False).but(policy=KEPT)
            faulty = FaultyStore(LocalStore(case.run_dir), FaultScript(nth=nth, when="after"))
            with Start(case, RetryingStore(faulty, backoff_secs=0.001)) as start:
                assert start.manager.restore().step == 4
                assert_equal(start.job.snapshot(), walk.states[4])
                assert faulty.count > nth

    alone(work, spec(nodes=1, ep=1, zero=False))


@pytest.mark.parametrize("nth", [1, 4, 8])
def test_all_ranks_hear_that_the_store_of_one_failed(spec: Callable[..., Spec], nth: int) -> None:
    job = spec(policy=KEPT)
    first = run_ranks(
        run_job, 4, job.but(steps=3, record=(2,), after_step=lambda _r, _s, m: m.wait())
    )
    faulty = FaultyStore(LocalStore(job.run_dir), FaultScript(nth=nth, times=0))

    def restore() -> str:
        try:
            run_job(job.but(run_dir=faulty))
        except MocError as error:
            return str(error)
        return ""

    told = run_ranks(restore, 4)
    assert all(t.startswith("rank 0: ") and "scripted fault" in t for t in told), told
    again = run_ranks(run_job, 4, job.but(steps=2))
    assert again[0].report.step == 2
    assert_equal(merged(o.restored for o in again), merged(o.states[2] for o in first))


def _keys(run_dir: Path) -> set[str]:
    return set(LocalStore(run_dir).list())


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
