"""Nodes without a shared file system: four ranks on two nodes, each with a directory of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, wait_at
from tests.support.orphans import wait_for_helpers
from tests.support.tiny import adamw, dense

import moc
from moc.core.manifest import is_data_key
from moc.core.versions import Version
from moc.errors import ConfigError, NothingValid
from moc.persist.commit import load_manifest
from moc.store.local import LocalStore
from moc.testing.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.dist

EACH = moc.Policy(
    snapshot_every=2, persist_every=2, keep_latest_k=None, timeout_secs=30, grace_secs=2
)
EVERY = wait_at(*range(2, 20, 2))
COMMITTED = "step-00000004-a0001"


@pytest.fixture
def job(spec: Callable[..., Spec], tmp_path: Path) -> Spec:
    disks = (tmp_path / "disk0", tmp_path / "disk1")
    return spec(policy=EACH, disks=disks, after_step=EVERY, steps=4, drain=False)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, text: Path
) -> tuple[tuple[Path, Path], list[Outcome]]:
    """What all ranks left on their disks when they were killed after step 4, their memory gone."""

    def kill(rank: int, step: int, manager: Any) -> None:
        EVERY(rank, step, manager)
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    folder = tmp_path_factory.mktemp("killed")
    memory = tuple(folder / f"memory{n}" for n in range(2))
    disks = folder / "disk0", folder / "disk1"
    job = Spec(run_dir=folder, memory=memory, text=text, policy=EACH, disks=disks, after_step=kill)
    run_ranks(run_job, 4, job, allow_death=True)
    wait_for_helpers(memory)
    assert not [log.read_text() for log in folder.rglob("helper-*.log") if log.stat().st_size]
    undisturbed = job.but(policy=None, after_step=None, steps=6, record=(4, 6))
    return disks, run_ranks(run_job, 4, undisturbed)


@pytest.fixture
def left(job: Spec, killed: tuple[tuple[Path, Path], list[Outcome]]) -> Spec:
    """The next start on these disks."""
    for disk, there in zip(job.disks, killed[0], strict=True):
        shutil.copytree(there, disk)
    return job


@pytest.fixture
def undisturbed(killed: tuple[tuple[Path, Path], list[Outcome]]) -> list[Outcome]:
    return killed[1]


def go(job: Spec, **changes: Any) -> list[Outcome]:
    return run_ranks(run_job, 4, job.but(**changes))


def refused(job: Spec, kind: type[Exception], **changes: Any) -> str:
    with pytest.raises(RankFailed) as caught:
        go(job, **changes)
    assert isinstance(caught.value.__cause__, kind)
    return str(caught.value.__cause__)


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


def test_each_node_keeps_its_own_files_and_they_come_back(
    left: Spec, undisturbed: list[Outcome]
) -> None:
    assert writers(left.disks[0]) == {"00000", "00001"}
    assert writers(left.disks[1]) == {"00002", "00003"}
    again = go(left, steps=6, record=(6,))
    assert again[0].report.step == 4
    assert again[0].report.sources["memory"] == 0 < again[0].report.sources["storage"]
    assert_equal(restored(again), state(undisturbed, 4))
    assert_equal(state(again, 6), state(undisturbed, 6))


def test_a_rank_that_moved_gets_its_files_from_the_node_it_left(
    left: Spec, undisturbed: list[Outcome]
) -> None:
    kept = data_files(left.disks[1])
    moved = go(left, places=(0, 0, 1, 0), steps=6)
    assert moved[0].report.step == 4
    assert_equal(restored(moved), state(undisturbed, 4))
    assert writers(left.disks[0]) == {"00000", "00001", "00003"}
    assert kept <= data_files(left.disks[1])
    wipe_memory(left)
    back = go(left, steps=6)  # now the newest step has files of rank 3 on node 0
    assert back[0].report.step == 6
    assert_equal(restored(back), state(undisturbed, 6))


def test_a_lost_coordinator_costs_no_step_that_another_node_has_heard_of(
    left: Spec, undisturbed: list[Outcome]
) -> None:
    copies = {"run.json", "attempts/0001.json", f"{COMMITTED}/manifest.json"}
    assert copies <= set(LocalStore(left.disks[1]).list())
    for key in copies:  # of the old coordinator's disk, only data files are left
        LocalStore(left.disks[0]).delete(key)
    again = go(left)
    assert again[0].report.step == 4
    assert_equal(restored(again), state(undisturbed, 4))
    assert copies <= set(LocalStore(left.disks[0]).list())


def test_a_lost_disk_is_named_with_rank_file_and_node(left: Spec, killed: Any) -> None:
    shutil.rmtree(left.disks[1])
    said = refused(left, NothingValid)
    wrote = rf"{COMMITTED}/dense-0000[23]\.safetensors, which rank [23] wrote on \S+:{killed[0][1]}"
    assert re.search(wrote, said), said
    assert re.search(rf"none of the nodes here: \S+:{left.disks[0]}, \S+:{left.disks[1]}", said)


def test_an_expert_lost_with_a_file_comes_back_older_and_is_written_anew(job: Spec) -> None:
    job = job.but(policy=replace(EACH, k_snapshot=2, k_persist=2))
    first = go(job, record=(4,))
    wipe_memory(job)
    lost = [k for k in data_files(job.disks[1]) if k.startswith(f"{COMMITTED}/experts-")]
    assert lost
    for key in lost:
        LocalStore(job.disks[1]).delete(key)
    second = go(job, drain=True)  # what it starts from is written whole
    report = second[0].report
    assert report.step == 4
    assert report.by_class["experts"]["storage_older"] > 0
    plain = [name for name in restored(second) if ".experts." not in name]
    assert_equal(*({n: s[n] for n in plain} for s in (restored(second), state(first, 4))))
    named = load_manifest(LocalStore(job.disks[0]), Version(4, 2)).files
    assert not {file.key for file in named} & set(lost)
    wipe_memory(job)
    third = go(job)
    assert third[0].report.restored_attempt == 2
    assert_equal(restored(third), restored(second))


def test_a_new_helper_of_rank_0_serves_the_same_address(job: Spec) -> None:
    def kill(rank: int, step: int, manager: Any) -> None:
        EVERY(rank, step, manager)
        if step == 2 and rank == 0:
            os.kill(manager._saver._handover._helper.pid, signal.SIGKILL)

    outcomes = go(job, after_step=kill)
    assert [o.stats["helper_restarts"] for o in outcomes] == [1, 0, 0, 0]
    assert {2, 4} == set(outcomes[0].stats["committed_bytes"])
    assert not [e for o in outcomes for e in o.events if e.kind == "failed"]


def test_each_node_deletes_its_own_files_that_no_kept_step_names(job: Spec) -> None:
    outcomes = go(job, policy=replace(EACH, keep_latest_k=1), steps=6, drain=True)
    folders = [{key.partition("/")[0] for key in LocalStore(disk).list()} for disk in job.disks]
    assert not [event for o in outcomes for event in o.events if event.kind == "warning"]
    newest = "step-00000006-a0001"
    assert folders[0] - {"attempts", "run.json", "latest"} == {newest}
    # The coordinator retires a step first; the others follow with the next commit at the latest.
    assert newest in folders[1]
    assert folders[1] - {"attempts", "run.json"} <= {COMMITTED, newest}


def test_directories_of_two_runs_are_refused(left: Spec, tmp_path: Path) -> None:
    other = tmp_path / "other"
    start_tiny((other, tmp_path / "more"), node_local=[True, True])
    said = refused(left, ConfigError, disks=(left.disks[0], other))
    assert "another run" in said
    assert str(other) in said


def test_a_run_on_disks_of_its_own_is_not_taken_for_a_shared_one(left: Spec) -> None:
    assert "node_local=True" in refused(left, ConfigError, node_local=False)


def start_tiny(disks: tuple[Path, Path], **options: Any) -> None:
    """Two ranks on two nodes begin to train and save."""

    def one() -> None:
        rank, model = dist.get_rank(), dense()
        with moc.CheckpointManager(
            disks[rank],
            model=model,
            optimizer=adamw(model),
            policy=replace(EACH, timeout_secs=8),
            memory_dir=disks[rank].parent / f"memory-{disks[rank].name}",
            **{name: value[rank] for name, value in options.items()},
        ) as manager:
            manager.restore()

    run_ranks(one, 2)


def test_directories_that_are_not_shared_are_refused_without_the_setting(tmp_path: Path) -> None:
    disks = tmp_path / "disk0", tmp_path / "disk1"
    for _ in range(2):  # nothing is left that a second try would trip over
        with pytest.raises(RankFailed) as caught:
            start_tiny(disks, node_local=[False, False])
        assert isinstance(caught.value.__cause__, ConfigError)
        for part in (str(disks[0]), str(disks[1]), "node_local=True"):
            assert part in str(caught.value.__cause__)
        assert not [file for disk in disks for file in disk.rglob("*")]


def test_ranks_must_agree_on_the_setting(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        start_tiny((tmp_path / "disk0", tmp_path / "disk1"), node_local=[True, False])
    assert "node_local=True on rank 0, False on rank 1" in str(caught.value.__cause__)
