"""The memory tier bounded and observable: what is printed, what is taken, what is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.job import assert_equal
from tests.support.tiny import EACH, Managers, adamw, dense, run_steps, state_of
from torch import nn

import moc
import moc.engine.structure as structure
from moc.errors import SaveError
from moc.snapshot.room import available_ram


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmpfs of 256 kB; without the right to mount, a folder that says it has as much."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "moc-test", str(folder)]
    mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    if not mounted:
        monkeypatch.setattr(structure, "usable_bytes", lambda _: 256 << 10)
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_what_is_taken_is_said_before_it_is_taken(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    files: list[list[Path]] = []
    said: list[moc.Event] = []

    def on_event(event: moc.Event) -> None:
        if event.kind == "memory":
            said.append(event)
            files.append(list(managers.memory_dir.glob("moc-*/*.safetensors")))

    with managers(model, optimizer, on_event=on_event) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3, 4, 5])
    assert files == [[]]
    assert "MB on this node; free: " in said[0].text
    taken = managers.memory_dir.glob("moc-*/*.safetensors")
    assert sum(p.stat().st_blocks * 512 for p in taken) <= said[0].nbytes * 1.1


def test_a_small_tmpfs_falls_back_to_private_memory(managers: Managers, small: Path) -> None:
    model = nn.Linear(100, 100)  # 121 kB with moments

    def step(number: int) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, number)
        optimizer.step()

    optimizer, seen = adamw(model), list[moc.Event]()
    manager = managers(model, optimizer, memory_dir=small, policy=EACH, on_event=seen.append)
    for number in (1, 2, 3, 4, 5):
        step(number)
        manager.step(number)
        manager.wait()
    (warning,) = [e.text for e in seen if e.kind == "warning"]
    for word in ("lost", "only commits survive", "remount", "--shm-size", "memory_dir="):
        assert word in warning
    buffers = sorted(small.glob("moc-*/*.safetensors"))
    assert len(buffers) >= 3
    assert all(b.is_symlink() for b in buffers)
    then = state_of(model, optimizer)
    managers.vanish(manager)
    manager._saver._snapshots.worker.wait(30, "copy")
    step(6)
    report = managers(model, optimizer, memory_dir=small).restore()
    assert report is not None
    assert report.step == 5
    assert_equal(state_of(model, optimizer), then)


def test_private_memory_of_a_dead_trainer_is_passed_over(managers: Managers, small: Path) -> None:
    script = """
import sys, os, signal, torch, moc
model = torch.nn.Linear(200, 200)
manager = moc.CheckpointManager(sys.argv[1], model=model, memory_dir=sys.argv[2],
    policy=moc.Policy(snapshot_every=1, persist_every=2))
for step in (1, 2, 3):
    with torch.no_grad(): model.weight.fill_(step)
    manager.step(step)
    if step != 3: manager.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [sys.executable, "-c", script, str(managers.run), str(small)]
    assert subprocess.run(words, timeout=100, check=False).returncode == -9
    model = nn.Linear(200, 200)
    policy = moc.Policy(snapshot_every=1, persist_every=2)
    manager = managers(model, memory_dir=small, policy=policy)
    report = manager.restore()
    assert report is not None
    assert report.step == 2
    assert bool((model.weight == 2).all())
    manager.step(3)
    manager.wait()


def test_neither_tmpfs_nor_ram_is_an_error(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "available_ram", lambda: 10_000)
    with pytest.raises(SaveError, match=r"on tmpfs, 0\.0 MB of RAM.*enlarge the tmpfs"):
        managers(dense()).save(1)
    assert not list(managers.memory_dir.glob("moc-*/*.safetensors"))


def test_ram_is_what_the_machine_and_the_cgroup_leave(tmp_path: Path) -> None:
    info, groups = tmp_path / "meminfo", tmp_path / "groups"
    groups.mkdir()
    assert available_ram(info, groups) is None
    info.write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert available_ram(info, groups) == 500 * 1024
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("5\n")
    (groups / "memory.stat").write_text("anon 1\ninactive_file 3000\n")
    assert available_ram(info, groups) == 500 * 1024
    (groups / "memory.max").write_text("20000\n")
    assert available_ram(info, groups) == 22_995
    (groups / "memory.max").unlink()
    (groups / "memory").mkdir()
    (groups / "memory/memory.limit_in_bytes").write_text("8000\n")
    (groups / "memory/memory.usage_in_bytes").write_text("7000\n")
    (groups / "memory/memory.stat").write_text("total_inactive_file 24\n")
    assert available_ram(info, groups) == 1024


PEAKS = """
import re, sys, torch, moc
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
count, width = (16, 1024) if "one piece" not in sys.argv else (1, 4096)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
state = sum(param.nbytes for param in model.parameters())  # 64 MB
policy = moc.Policy(snapshot_every=1, persist_every=50, keep_latest_k=2, buffers=3)
manager = moc.CheckpointManager(sys.argv[1], model=model, memory_dir=sys.argv[2], policy=policy)
before = status("RssAnon")
if sys.argv[3] == "save":
    for step in range(1, 201):
        manager.step(step)
        if step == 20: early = status("RssAnon")
    manager.close()
    print((status("RssAnon") - early) / state)
else:
    torch.ones(1).add_(1)
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM from here on
    start = status("VmRSS")
    assert manager.restore() is not None
    print((status("VmHWM") - start) / state)
    manager.close()
"""


def test_a32_host_memory_is_bounded(managers: Managers) -> None:
    def share(verb: str, memory: str, shape: str = "") -> float:
        place = managers.memory_dir / f"{memory}{shape[:3]}"
        words = [sys.executable, "-c", PEAKS, f"{managers.run}{shape[:3]}", place, verb, shape]
        done = subprocess.run(
            [str(w) for w in words], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert share("save", "one") < 1  # private memory, in states, from save 20 to save 200
    assert share("restore", "one") <= 1.05  # mapped, beside the live state
    assert share("restore", "none") <= 0.5  # beside the live state
    share("save", "one", "one piece")
    assert share("restore", "none", "one piece") <= 1.5
