"""What users report of other checkpoint libraries, tried here: optimizers and steps, A27 to A39."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import pickle
import random
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    DIM,
    EXPERTS,
    Managers,
    adamw,
    batch,
    dense,
    moe,
    run_steps,
    state_of,
    train,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import moc
from moc.core.manifest import step_dir
from moc.core.versions import Version
from moc.errors import StepNotFound, UnsupportedValue
from moc.testing.ranks import run_ranks


def test_a27_groups_in_another_order_keep_their_own_options(managers: Managers) -> None:

    def build(model: nn.Module, order: list[int]) -> tuple[torch.optim.Optimizer, LambdaLR]:
        options = {
            0: {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.0},
            2: {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3},
        }
        groups = [
            {"params": list(model[i].parameters())[:: -1 if i == order[0] else 1], **options[i]}
            for i in order
        ]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = dense()
    optimizer, scheduler = build(model, [0, 2])
    with managers(model, optimizer, extras={"scheduler": scheduler}) as manager:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            scheduler.step()
            manager.step(step)
    saved = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    again = dense(1)
    fresh, _ = build(again, [2, 0])
    scheduler = LambdaLR(fresh, lambda step: 1 / (1 + step))
    managers(again, fresh, extras={"scheduler": scheduler}).restore()
    assert [{k: v for k, v in g.items() if k != "params"} for g in fresh.param_groups] == saved[
        ::-1
    ]
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    assert train(again, fresh, 4) == train(model, optimizer, 4)


def test_a28_moments_come_from_the_file(managers: Managers) -> None:
    """Into an optimizer that never stepped, in a new process, after fifty steps."""
    model = dense()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=10, persist_every=50)
    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, range(1, 51))
    then = state_of(model, optimizer)
    losses = [train(model, optimizer, step) for step in range(51, 56)]

    def resume() -> tuple[int, int, dict[str, torch.Tensor], list[float]]:
        again = dense(1)
        fresh = adamw(again)
        manager = managers(again, fresh, policy=policy)
        report = manager.restore()
        assert report is not None
        found = state_of(again, fresh)
        after = [train(again, fresh, step) for step in range(51, 56)]
        managers.vanish(manager)
        assert f"{report.optimizer_entries} optimizer entries" in str(report)
        return report.step, report.optimizer_entries, found, after

    ((step, entries, found, after),) = run_ranks(resume, 1)
    assert (step, entries) == (50, 3 * 4)
    assert_equal(found, then)
    assert after == losses


def test_a29_random_numbers_go_on(managers: Managers) -> None:

    def draw(model: nn.Module) -> tuple[Any, ...]:
        out = model(batch(1)).sum()
        return float(out.detach()), float(torch.rand(())), random.random(), float(np.random.rand())

    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))
    draw(model)
    with managers(model) as manager:
        manager.step(1)
        expected = [draw(model) for _ in range(5)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    again = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))
    managers(again).restore()
    assert [draw(again) for _ in range(5)] == expected


def test_a30_gradient_accumulation_and_the_data_position(managers: Managers) -> None:
    """The position saved is that of the optimizer step; every index counts once."""

    class Loader:
        position = 0

        def next(self) -> int:
            self.position += 1
            return self.position - 1

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    def micro_batches(manager: Any, model: Any, optimizer: Any, loader: Loader, n: int) -> list:
        seen = []
        for _ in range(n):
            index = loader.next()
            seen.append(index)
            (model(batch(index)).square().mean() / 4).backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            manager.step(index // 4 + 1)
        return seen

    model, loader = dense(), Loader()
    optimizer = adamw(model)
    manager = managers(model, optimizer, extras={"loader": loader})
    first = micro_batches(manager, model, optimizer, loader, 10)  # dies in step 3
    manager.wait()
    assert manager.stats()["saves"] == 2
    managers.vanish(manager)

    again, other = dense(1), Loader()
    fresh = adamw(again)
    manager = managers(again, fresh, extras={"loader": other})
    report = manager.restore()
    assert report is not None
    assert report.step == 2
    assert first[: 4 * report.step] + micro_batches(manager, again, fresh, other, 8) == [*range(16)]


class Epochs:
    """Indices of a shuffled epoch after another, as a data loader without workers has them."""

    def __init__(self, size: int = 6) -> None:
        self.size, self.epoch, self.taken = size, 0, 0

    def next(self) -> tuple[int, int]:
        if self.taken == self.size:
            self.epoch, self.taken = self.epoch + 1, 0
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        self.taken += 1
        return self.epoch, order[self.taken - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


@pytest.mark.parametrize("last", range(4, 9), ids=lambda n: f"dies_after_{n}")
def test_a30_positions_at_the_end_of_an_epoch(managers: Managers, last: int) -> None:
    def run(model: nn.Module, optimizer: Any, loader: Epochs, manager: Any, steps: range) -> list:
        seen = []
        for step in steps:
            seen.append(loader.next())
            train(model, optimizer, step)
            manager.step(step)
        return seen

    model, loader = dense(), Epochs()
    optimizer = adamw(model)
    manager = managers(model, optimizer, extras={"loader": loader})
    seen = run(model, optimizer, loader, manager, range(1, last + 1))
    manager.wait()
    loader.next()  # what is drawn for a step that is never made is drawn again
    managers.vanish(manager)
    again, other = dense(1), Epochs()
    fresh = adamw(again)
    manager = managers(again, fresh, extras={"loader": other})
    report = manager.restore()
    assert report is not None
    seen += run(again, fresh, other, manager, range(report.step + 1, 19))
    assert report.step == last
    assert [epoch for epoch, _ in seen] == [0] * 6 + [1] * 6 + [2] * 6
    assert sorted(seen) == [(epoch, index) for epoch in range(3) for index in range(6)]


@pytest.mark.parametrize("kind", ["dense", "experts", "manifest"])
def test_a31_a_flipped_bit_costs_a_step_or_an_expert(managers: Managers, kind: str) -> None:
    """At twenty random places; the trials of `moc verify` are in test_cli.py."""
    model = moe()
    optimizer = adamw(model)
    states = {}
    with managers(model, optimizer) as manager:
        for step in (1, 2):
            run_steps(manager, model, optimizer, [step], after=lambda _: manager.wait())
            states[step] = state_of(model, optimizer)
    folder = managers.run / step_dir(Version(2, 1))
    path = folder / ("manifest.json" if kind == "manifest" else f"{kind}-00000.safetensors")
    data = path.read_bytes()
    header = 0 if kind == "manifest" else 8 + int.from_bytes(data[:8], "little")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for number in range(20):
        place, bit = dice.randrange(header, len(data)), dice.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        again = moe(1)
        fresh = adamw(again)
        manager = managers(again, fresh, memory_dir=managers.memory_dir / f"{kind}{number}")
        report = manager.restore()
        assert report is not None
        now = state_of(again, fresh)
        if kind == "experts":  # one expert comes from the step before, whole, and no other
            assert (report.step, report.stale_experts) == (2, 1), (seed, place, bit)
            weight = now["1.experts.w1"]
            old = [e for e in range(EXPERTS) if same_bytes(weight[e], states[1]["1.experts.w1"][e])]
            assert len(old) == 1
            assert all(
                same_bytes(weight[e], states[2]["1.experts.w1"][e])
                for e in range(EXPERTS)
                if e not in old
            )
        else:
            assert report.step == 1, (seed, place, bit)
            assert_equal(now, states[1])
            (reason,) = report.reasons
            assert "step 2 " in reason or f"{folder.name}/manifest.json" in reason
            if kind == "dense":
                assert f"{folder.name}/{path.name}" in reason
                assert "|" in reason, "the piece is named"
        managers.vanish(manager)
        (managers.run / f"attempts/{report.attempt:04d}.json").unlink()  # as if it had not been
    if kind != "experts":
        fresh = adamw(again)
        with pytest.raises(StepNotFound, match="step 2"):
            managers(again, fresh, memory_dir=managers.memory_dir / "asked").restore(2)


def test_a36_modes_follow_the_umask(managers: Managers) -> None:
    """A second user of the group reads, in a folder whose group is handed down."""
    managers.run.mkdir()
    os.chown(managers.run, -1, 4711)
    managers.run.chmod(0o2775)
    old = os.umask(0o002)
    try:
        model = dense()
        optimizer = adamw(model)
        with managers(model, optimizer) as manager:
            run_steps(manager, model, optimizer, [1, 2])
    finally:
        os.umask(old)
    for path in managers.run.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o2775 if path.is_dir() else 0o664), (path, oct(mode))
        assert path.stat().st_gid == 4711
    for folder in managers.run.parents:
        if folder.owner() == "root" and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
    then = state_of(model, optimizer)

    def another_user() -> dict[str, torch.Tensor]:
        os.setgroups([4711])
        os.setgid(4711)
        os.setuid(4712)
        again = dense(1)
        reader = managers(again, memory_dir=Path("/dev/shm") / f"moc-a36-{os.getpid()}")
        report = reader.restore(weights_only=True)
        assert report is not None
        (Path("/dev/shm") / f"moc-a36-{os.getpid()}").rmdir()
        return state_of(again)

    (found,) = run_ranks(another_user, 1)
    assert_equal(found, {name: value for name, value in then.items() if "/" not in name})


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    a: int = 1


@pytest.mark.parametrize(
    "value", [argparse.Namespace(a=1), Path("x"), signal.SIGTERM, Colour.RED, Record()]
)
def test_a39_an_extra_without_an_exact_form_is_refused_at_the_first_save(
    managers: Managers, value: object
) -> None:

    class Extra:
        def state_dict(self) -> dict[str, object]:
            return {"fine": 1, "odd": {"thing": value}}

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise AssertionError(state)

    manager = managers(dense(), extras={"mine": Extra()})
    with pytest.raises(UnsupportedValue, match=r"mine.*odd.*thing"):
        manager.step(1)


def test_a39_what_is_allowed_comes_back_as_it_was(managers: Managers) -> None:
    value = {
        "none": None, "flag": True, "int": 1 << 70, "float": -0.0, "text": "ü", "bytes": b"\0\xff",
        "tuple": (1, [2, (3,)]), 7: "an int key", "numpy": np.arange(3, dtype=np.int16),
        "scalar": np.float32(0.1), "tensor": torch.tensor([1.5, float("nan")]), "nan": float("inf"),
    }  # fmt: skip

    class Extra:
        held: Any = None

        def state_dict(self) -> dict[Any, Any]:
            return value

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.held = state

    with managers(dense(), extras={"mine": Extra()}) as manager:
        manager.save(1)
    other = Extra()
    assert managers(dense(1), extras={"mine": other}).restore() is not None
    assert repr(other.held) == repr(value)
    assert [type(v) for v in other.held.values()] == [type(v) for v in value.values()]


class Trap:
    """A pickle that leaves a trace where it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


def test_a39_a_pickle_in_the_run_is_never_opened(managers: Managers, tmp_path: Path) -> None:
    model = dense()
    with managers(model) as manager:
        manager.save(1)
        manager.wait()
        manager.save(2)
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Trap(trace))
    newest = managers.run / step_dir(Version(2, 1))
    for path in newest.iterdir():
        path.write_bytes(bomb)
    for name in ("data.pkl", "state.pt", "latest.pkl"):
        (managers.run / name).write_bytes(bomb)
    again = dense(1)
    report = managers(again, memory_dir=managers.memory_dir / "another").restore()
    assert report is not None
    assert report.step == 1
    assert_equal(state_of(again), state_of(model))
    assert not trace.exists()
    pickle.loads(bomb).close()  # noqa: S301
    assert trace.exists(), "it would have left one"
