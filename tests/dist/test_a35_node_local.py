"""Nodes without a shared file system: four ranks on two nodes, each with a directory of its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, wait_at
from tests.support.orphans import helpers_of, wait_for_helpers

import moc
from moc.core.manifest import is_data_key
from moc.errors import ConfigError, NothingValid
from moc.store.local import LocalStore
from moc.testing.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.dist

EACH = moc.Policy(
    snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=30, grace_secs=2
)
EVERY = wait_at(*range(2, 20, 2))


@pytest.fixture
def job(spec: Callable[..., Spec], tmp_path: Path) -> Spec:
    disks = (tmp_path / "disk0", tmp_path / "disk1")
    return spec(policy=EACH, disks=disks, after_step=EVERY, steps=4, record=(4,), drain=False)


def go(job: Spec, **changes: Any) -> list[Outcome]:
    return run_ranks(run_job, 4, job.but(**changes))


def state(outcomes: Iterable[Outcome], step: int) -> dict[str, torch.Tensor]:
    return merged(o.states[step] for o in outcomes)


def restored(outcomes: Iterable[Outcome]) -> dict[str, torch.Tensor]:
    return merged(o.restored for o in outcomes)


def wipe_memory(job: Spec) -> None:
    wait_for_helpers(job.memory)
    for node in job.memory:
        shutil.rmtree(node)


def data_files(disk: Path) -> set[str]:
    return {key for key in LocalStore(disk).list() if is_data_key(key)}


def writers(disk: Path) -> set[str]:
    return {key.rpartition("/")[2].split("-")[1][:5] for key in data_files(disk)}


def test_each_node_keeps_its_own_files_and_they_come_back(job: Spec) -> None:
    first = go(job)
    assert writers(job.disks[0]) == {"00000", "00001"}
    assert writers(job.disks[1]) == {"00002", "00003"}
    wipe_memory(job)
    second = go(job, steps=6, record=(6,))
    assert second[0].report.step == 4
    assert second[0].report.sources["memory"] == 0 < second[0].report.sources["storage"]
    assert_equal(restored(second), state(first, 4))
    undisturbed = run_ranks(run_job, 4, job.but(policy=None, disks=(), steps=6, record=(6,)))
    assert_equal(state(second, 6), state(undisturbed, 6))
