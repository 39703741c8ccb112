"""What a run holds in storage, counted on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import tiny
from tests.support.tiny import Managers, adamw, moe, run_steps

import moc


def test_three_steps_of_sixteen_experts_stay_under_one_and_a_half_states(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K_persist = 1 of N = 16, keep_latest_k = 3; experts are 87 % of the bytes.

    Once the first, full save is out of use: three times the dense part, and the expert files of
    one rotation and of the two steps before it. Manifests and receipts count, too.
    """
    monkeypatch.setattr(tiny, "EXPERTS", 16)
    monkeypatch.setattr(tiny, "DIM", 96)
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=3
    )
    manager = managers(model, optimizer, policy=policy)
    held: dict[int, int] = {}

    def count(step: int) -> None:
        manager.wait()
        held[step] = on_disk(managers.run)

    run_steps(manager, model, optimizer, range(1, 41), count)
    manager.close()
    stats = manager.stats()
    full, own = stats["full_bytes"], stats["committed_bytes"]
    assert own[1] > 0.99 * full  # the first save is full
    assert stats["partial_bytes"] < 0.2 * full
    assert on_disk(managers.run) < 1.5 * full
    # While training: retention of a step may follow the news that it is committed.
    assert max(held[step] - own[step] for step in range(20, 41)) < 1.5 * full
    assert manager.all_steps() == [38, 39, 40]


def on_disk(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
