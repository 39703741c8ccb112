"""What a save does to the disk, in order: the system calls of both ranks' helpers, recorded.

A module that every fresh interpreter imports, the helpers' too, notes each call that makes
something durable, visible or gone, in one file that both append to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.tiny import Managers, adamw, moe, train

import moc
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

RECORDER = """
import os
def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)
def recorded(name):
    real = getattr(os, name)
    def call(first, *rest, **more):
        path = os.readlink(f"/proc/self/fd/{{first}}") if name == "fsync" else first
        result = real(first, *rest, **more)
        note(name, path, *rest)  # once it has taken place
        return result
    setattr(os, name, call)
for name in ("fsync", "link", "rename", "replace", "unlink"):
    recorded(name)
"""
Call = tuple[str, str, str]  # verb, path, new path


@pytest.fixture
def calls(managers: Managers, tmp_path: Path) -> list[Call]:
    """Calls below the run directory while two ranks save steps 1 and 2, and keep one."""
    log, folder = tmp_path / "calls", tmp_path / "recorder"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RECORDER.format(log=str(log)))
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=1, timeout_secs=30)

    def work() -> None:
        sys.path.insert(0, str(folder))  # a helper finds what its trainer finds
        model = moe()
        optimizer = adamw(model)
        manager = managers(model, optimizer, layout=moc.Layout.from_groups(), policy=policy)
        manager.restore()
        for step in (1, 2):
            train(model, optimizer, step)
            manager.step(step)
            manager.wait()
        manager.close()  # after retention
        dist.barrier()

    run_ranks(work, 2)
    lines = [line.split(" ") for line in log.read_text().splitlines()]
    return [(line[0], line[1], line[2] if len(line) > 2 else "") for line in lines]


def test_data_is_durable_before_the_manifest_and_that_before_latest(
    managers: Managers, calls: list[Call]
) -> None:
    for step in (1, 2):
        folder = managers.run / f"step-{step:08d}-a0001"
        manifest = named(calls, folder / "manifest.json")
        data = {to for _, _, to in calls if to.startswith(f"{folder}/")}
        data.discard(f"{folder}/manifest.json")
        names = {Path(path).name for path in data}
        assert {"rank-00000.receipt", "rank-00001.receipt"} <= names
        assert any(name.startswith("dense-00001") for name in names)
        assert any(name.startswith("experts-") for name in names)
        for path in sorted(data):
            assert durable(calls, Path(path)) < manifest, path
        for rank in range(2):
            receipt = named(calls, folder / f"rank-{rank:05d}.receipt")
            own = [path for path in data if path.endswith(f"-{rank:05d}.safetensors")]
            assert own
            for path in own:
                assert durable(calls, Path(path)) < receipt, path
        # Of the puts of `latest`, the one after this manifest and before the next.
        hint = next(
            i
            for i, call in enumerate(calls)
            if i > manifest and call[0] == "replace" and call[2] == str(managers.run / "latest")
        )
        assert durable(calls, folder / "manifest.json") < hint
        # The name of the folder itself: in the run directory, before the step exists.
        first = min(named(calls, Path(path)) for path in data)
        assert ("fsync", str(managers.run), "") in calls[first:manifest]


def test_what_is_deleted_goes_after_the_next_step_is_announced(
    managers: Managers, calls: list[Call]
) -> None:
    old = managers.run / "step-00000001-a0001"
    gone = [
        i
        for i, (verb, path, _) in enumerate(calls)
        if verb == "unlink" and path.startswith(f"{old}/") and not path.endswith(".tmp")
    ]
    manifest = durable(calls, managers.run / "step-00000002-a0001" / "manifest.json")
    hints = [i for i, call in enumerate(calls) if call[2] == str(managers.run / "latest")]
    assert len(hints) == 2
    assert gone
    assert manifest < hints[1] < min(gone)
    assert calls[gone[0]][1] == str(old / "manifest.json")  # first: no step without its files


def named(calls: list[Call], path: Path) -> int:
    """Index of the one call that gave a file its name, after its bytes were synced."""
    (index,) = [
        i for i, (verb, _, to) in enumerate(calls) if to == str(path) and verb in ("link", "rename")
    ]
    temporary = calls[index][1]
    assert ("fsync", temporary, "") in calls[:index], f"{path} had a name before its bytes"
    return index


def durable(calls: list[Call], path: Path) -> int:
    """Index of the first sync of a file's folder after the file got its name."""
    return calls.index(("fsync", str(path.parent), ""), named(calls, path))
