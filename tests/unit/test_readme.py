"""The README's example runs, and goes on where it stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import moc

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_and_resumes(
    tmp_path: Path, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOC_MEMORY_DIR", str(memory_dir))
    stepped: list[int] = []
    step = moc.CheckpointManager.step
    monkeypatch.setattr(
        moc.CheckpointManager, "step", lambda self, n: (stepped.append(n), step(self, n))
    )
    torch.manual_seed(0)
    exec(block[1], {})
    assert stepped == list(range(1, 201))
    stepped.clear()
    exec(block[1].replace("201", "221"), {})
    assert stepped == list(range(201, 221))
