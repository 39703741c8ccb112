"""``moc prune`` and ``moc clean``: what they say, and that they do exactly that."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import Managers, adamw, moe, run_steps

import moc
from moc.cli.main import main
from moc.persist.verify import verify
from moc.store import LocalStore

Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def call(*words: object) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def run_dir(managers: Managers) -> Path:
    """Six steps; each saves one of four experts, the first all."""
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, range(1, 7), lambda _: manager.wait())
    return managers.run


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_dry_run_says_what_the_run_then_does(run_dir: Path, ask: Ask) -> None:
    before = files(run_dir)
    code, told = ask("prune", run_dir, "--keep-latest-k", 1, "--keep-every", 4, "--dry-run")
    assert code == 0
    assert files(run_dir) == before
    assert list(told["keep"]) == ["step-00000004-a0001", "step-00000006-a0001"]
    assert told["keep"]["step-00000004-a0001"] == "a multiple of 4"
    assert told["bytes"] > 0
    named = told["needed"]["step-00000005-a0001/experts-00000.safetensors"]
    assert named == ["step-00000006-a0001"]

    code, done = ask("prune", run_dir, "--keep-latest-k", 1, "--keep-every", 4)
    assert (code, done["delete"]) == (0, told["delete"])
    gone = {f"{folder}/manifest.json" for folder in told["retire"]} | set(told["delete"])
    assert files(run_dir) == before - gone
    assert verify(LocalStore(run_dir)).ok


def test_the_base_of_a_save_in_flight_stays(run_dir: Path, ask: Ask) -> None:
    (run_dir / "step-00000006-a0001/manifest.json").unlink()  # as if not committed yet
    (run_dir / "step-00000005-a0001/manifest.json").rename(run_dir / "aside")
    code, told = ask("prune", run_dir, "--keep-latest-k", 1)
    assert code == 0
    assert not [key for key in told["delete"] if key.startswith("step-00000006")]
    assert list(told["keep"]) == ["step-00000004-a0001"]


@pytest.mark.parametrize("words", [["--keep-latest-k", "0"], ["--keep-every", "-1"]])
def test_a_number_that_makes_no_sense_is_wrong_usage(
    run_dir: Path, ask: Ask, words: list[str]
) -> None:
    before = files(run_dir)
    code, told = ask("prune", run_dir, *words)
    assert code == 2
    assert words[0] in told["error"]
    assert files(run_dir) == before


def test_clean_removes_what_nobody_uses(managers: Managers, ask: Ask) -> None:
    model = moe()
    manager = managers(model, adamw(model))
    manager.save(1)
    manager.wait()
    dead = managers.memory_dir / ("moc-" + "a" * 16)
    young = managers.memory_dir / ("moc-" + "b" * 16)
    other = managers.memory_dir / "moc-notes"
    for folder in (dead, young, other):
        folder.mkdir()
        (folder / "00000-0.safetensors").write_bytes(bytes(5000))
    for path in (dead / "00000-0.safetensors", dead, *managers.memory_dir.glob("moc-*/0*")):
        if young not in path.parents:
            os.utime(path, (0, 0))
    words = ("clean", "--memory-dir", managers.memory_dir)
    code, told = ask(*words, "--dry-run")
    what = {r["run_id"]: r["what"] for r in told["runs"]}
    live = manager._session.run_id
    assert what == {
        "a" * 16: "would be removed",
        "b" * 16: "kept: younger than --older-than",
        live: "in use",
    }
    assert dead.exists()
    code, told = ask(*words, "--older-than", 1)
    assert code == 0
    assert not dead.exists()
    assert young.exists()
    assert other.exists()
    manager.save(2)
    manager.wait()
