"""Two jobs in one run directory, and what becomes of helpers when somebody dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.orphans import helpers_of, wait_for_helpers
from tests.support.tiny import EACH, Managers, adamw, dense, run_steps

import moc
from moc.errors import RunBusy, SaveError
from moc.persist.client import orphans

pytestmark = pytest.mark.dist

FIRST = """
import sys, moc
from tests.support.tiny import EACH, adamw, dense, train
model = dense(0); optimizer = adamw(model)
manager = moc.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer,
    memory_dir=sys.argv[2], policy=EACH)
manager.restore()
for line in sys.stdin:
    step = int(line)
    train(model, optimizer, step)
    try:
        manager.step(step)
        manager.wait()
    except moc.MocError as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("saved", step, flush=True)
"""


class First:
    """A job in a process of its own, which trains a step whenever it is told."""

    def __init__(self, run: Path, memory_dir: Path) -> None:
        words = [sys.executable, "-c", FIRST, str(run), str(memory_dir)]
        paths = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def step(self, number: int) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def first(managers: Managers) -> Iterator[First]:
    job = First(managers.run, managers.memory_dir)
    yield job
    job.kill()


def test_a_second_job_is_refused_and_the_first_goes_on(
    managers: Managers, first: First, tmp_path: Path
) -> None:
    assert first.step(1) == "saved 1"
    helpers = helpers_of(managers.memory_dir)
    assert len(helpers) == 1
    model = dense(1)
    for fresh, memory in ((False, managers.memory_dir), (True, tmp_path / "elsewhere")):
        second = managers(model, adamw(model), fresh=fresh, memory_dir=memory)
        with pytest.raises(RunBusy, match=rf"process {first.process.pid} on .* since 20\d\d-"):
            second.restore()
    forgetful = managers(model)
    with pytest.raises(RunBusy):
        forgetful.save(7)
    assert helpers_of(managers.memory_dir) == helpers
    assert first.step(2) == "saved 2"
    assert len(list((managers.run / "attempts").iterdir())) == 1


def test_weights_are_read_beside_a_live_run(managers: Managers, first: First) -> None:
    assert first.step(1) == "saved 1"
    report = managers(dense(1)).restore(weights_only=True)
    assert report is not None
    assert first.step(2) == "saved 2"


def test_a_job_that_is_taken_over_saves_nothing_more(managers: Managers, first: First) -> None:
    assert first.step(1) == "saved 1"
    model = dense(1)
    optimizer = adamw(model)
    second = managers(model, optimizer, take_over=True)
    report = second.restore()
    assert report is not None
    assert report.step == 1
    assert first.step(2).startswith("SaveError")
    run_steps(second, model, optimizer, [2, 3], lambda _: second.wait())
    assert first.step(3).startswith("SaveError")
    assert second.all_steps() == [1, 2, 3]


def test_the_run_of_a_killed_job_is_free(managers: Managers, first: First) -> None:
    assert first.step(1) == "saved 1"
    helpers = helpers_of(managers.memory_dir)
    strangers = managers.memory_dir / ("moc-" + "a" * 16)
    strangers.mkdir()
    first.kill()
    wait_for_helpers([managers.memory_dir])
    assert not helpers_of(managers.memory_dir)
    model = dense(1)
    report = managers(model, adamw(model)).restore()
    assert report is not None
    assert not set(helpers) & set(helpers_of(managers.memory_dir))
    assert strangers.exists()
