"""What users report of other checkpoint libraries, tried on four ranks: A14 to A31.

The trials in one process are in ``tests/unit/test_reports_*.py``, under the same numbers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    DIM,
    EACH,
    EXPERTS,
    Managers,
    adamw,
    bare,
    batch,
    dense,
    moe,
    state_of,
    stored,
    train,
    version_of,
    whole,
)
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LambdaLR

import moc
from moc.core.manifest import step_dir
from moc.errors import MocError
from moc.persist.commit import load_manifest
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

WORLD = 4
State = dict[str, Tensor]


def spread() -> moc.Layout:
    """Every rank has experts of its own."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return moc.Layout.from_groups(ep=dist.group.WORLD, edp=alone[dist.get_rank()])


def place(managers: Managers, where: str) -> Path:
    """A memory directory: where the snapshots are, or one that is empty."""
    return managers.memory_dir if where == "memory" else managers.memory_dir / "another"


def same_everywhere(states: list[State], names: Callable[[str], bool] = lambda _: True) -> None:
    for other in states[1:]:
        for name in filter(names, states[0]):
            assert same_bytes(states[0][name], other[name]), name


# ------------------------------------------------------------------------------------------- MoE


class Local(nn.Module):
    """``experts.0`` and ``experts.1``, whatever the rank: global experts 2 * rank and one more."""

    def __init__(self, first: int, fill: float | None = None) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        with torch.no_grad():
            for index, expert in enumerate(self.moe.experts):
                for param in expert.parameters():
                    param.fill_(first + index if fill is None else fill)


def test_a14_local_names_become_global_experts(managers: Managers) -> None:
    def save() -> None:
        model = Local(2 * dist.get_rank())
        with managers(model, layout=spread()) as manager:
            manager.save(1)

    def load() -> list[float]:
        model = Local(0, fill=-1.0)
        manager = managers(model, layout=spread(), memory_dir=managers.memory_dir / "another")
        assert manager.restore() is not None
        managers.vanish(manager)
        return [float(e.weight.detach().unique()) for e in model.moe.experts]

    run_ranks(save, WORLD)
    pieces = stored(managers.run, 1)
    for expert in range(2 * WORLD):
        assert whole(pieces, f"moe.experts.{expert}.weight").unique().tolist() == [expert]
    assert run_ranks(load, WORLD) == [[2 * r, 2 * r + 1] for r in range(WORLD)]


def test_a14_without_a_layout_it_is_refused(managers: Managers) -> None:
    def save() -> str:
        manager = managers(Local(2 * dist.get_rank()))
        try:
            manager.save(1)
        except MocError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            managers.vanish(manager)
        return ""

    for told in run_ranks(save, WORLD):
        assert told.startswith("LayoutError: ")
        assert "moe.experts.0" in told
        assert "edp" in told
    assert not list(managers.run.glob("step-*/manifest.json"))


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_a15_experts_without_tokens(managers: Managers, where: str) -> None:
    """Tokens go to the experts of rank 0 alone: the others' optimizers have no state at all."""

    def step(model: Local, optimizer: torch.optim.Optimizer, number: int, ranks: int) -> None:
        optimizer.zero_grad()
        if dist.get_rank() < ranks:
            sum(e(batch(number)).square().mean() for e in model.moe.experts).backward()
        optimizer.step()

    def save() -> tuple[State, State]:
        model = Local(2 * dist.get_rank())
        optimizer = adamw(model)
        with managers(model, optimizer, layout=spread()) as manager:
            for number in (1, 2):
                step(model, optimizer, number, ranks=1)
                manager.step(number)
        then = state_of(model, optimizer)
        for number in (3, 4, 5):
            step(model, optimizer, number, ranks=WORLD)
        return then, state_of(model, optimizer)

    def load() -> tuple[State, State]:
        model = Local(0, fill=-1.0)
        optimizer = adamw(model)
        manager = managers(model, optimizer, layout=spread(), memory_dir=place(managers, where))
        assert manager.restore() is not None
        managers.vanish(manager)
        found = state_of(model, optimizer)
        for number in (3, 4, 5):
            step(model, optimizer, number, ranks=WORLD)
        return found, state_of(model, optimizer)

    for saved, loaded in zip(run_ranks(save, WORLD), run_ranks(load, WORLD), strict=True):
        for then, now in zip(saved, loaded, strict=True):
            assert_equal(now, then)


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_a16_router_bias_and_counters(managers: Managers, where: str) -> None:
    """A bias that is the same on all ranks, and counters that each rank has for itself."""

    def build(factor: int) -> nn.Module:
        model = moe().to(torch.bfloat16)
        bias = torch.tensor([257.0, 0.1, -1e-3, 3.0]) * factor
        counts = torch.tensor([16_777_217, 1, 2, dist.get_rank()]) * factor
        model[1].router.register_buffer("expert_bias", bias, persistent=False)
        model[1].router.register_buffer("tokens_per_expert", counts)
        return model

    def save() -> State:
        model = build(1)
        with managers(model) as manager:
            manager.save(1)
        return dict(model.named_buffers())

    def load() -> State:
        model = build(0)
        manager = managers(model, memory_dir=place(managers, where))
        assert manager.restore() is not None
        managers.vanish(manager)
        return dict(model.named_buffers())

    for then, now in zip(run_ranks(save, WORLD), run_ranks(load, WORLD), strict=True):
        assert now["1.router.expert_bias"].dtype == torch.float32
        assert_equal(now, then)


class Fused(nn.Module):
    """Rows of one tensor of eight experts; row e is filled with e."""

    def __init__(self, first: int, count: int, fill: float | None = None) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.experts = nn.Module()
        rows = torch.arange(first, first + count).float()[:, None, None].expand(-1, 64, 32)
        rows = rows.clone() if fill is None else torch.full_like(rows, fill)
        self.moe.experts.w1 = nn.Parameter(rows)


def push(param: nn.Parameter, optimizer: torch.optim.Optimizer, step: int) -> None:
    param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        param += 1000 * step


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a18_fused_experts_are_sliced(managers: Managers, world: int) -> None:
    """Two of eight a save, over four ranks; restored over other numbers of ranks."""
    policy = dataclasses.replace(EACH, k_snapshot=2, k_persist=2)

    def save() -> list[State]:
        model = Fused(2 * dist.get_rank(), 2)
        optimizer = adamw(model)
        states = []
        with managers(model, optimizer, policy=policy, layout=spread()) as manager:
            for step in (1, 2):
                push(model.moe.experts.w1, optimizer, step)
                manager.step(step)
                manager.wait()
                states.append(state_of(model, optimizer))
        return states

    def load() -> State:
        count = 8 // dist.get_world_size() if dist.is_initialized() else 8
        layout = spread() if count < 8 else None
        model = Fused(0, count, fill=-1.0)
        optimizer = adamw(model)
        elsewhere = managers.memory_dir / "another"
        manager = managers(model, optimizer, policy=policy, layout=layout, memory_dir=elsewhere)
        assert manager.restore() is not None
        managers.vanish(manager)
        return state_of(model, optimizer)

    saved = run_ranks(save, WORLD)
    version = version_of(managers.run, 2)
    manifest = load_manifest(LocalStore(managers.run), version)
    chosen = [e for e, v in enumerate(manifest.versions[0]) if v == version]
    assert len(chosen) == 2
    own = [f for f in manifest.files if f.is_of(version) and "/experts-" in f.key]
    assert sum(f.nbytes for f in own) < 1.2 * 2 * 3 * 64 * 32 * 4 + len(own) * 4096
    loaded = run_ranks(load, world)
    for part in ("moe.experts.w1", "moe.experts.w1/exp_avg"):
        now = torch.cat([state[part] for state in loaded])
        for expert in range(8):
            then = saved[expert // 2][1 if expert in chosen else 0][part][expert % 2]
            if expert in chosen or "/" not in part:
                assert same_bytes(now[expert], then), (part, expert)


# --------------------------------------------------------------------------------------- tensors


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, DIM, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def go_on(
    managers: Managers, build: Callable[[int], nn.Module], where: str, **options: Any
) -> tuple[list[State], list[State]]:
    """Two steps on four ranks, then one more in the old processes and in new ones."""

    def save() -> tuple[State, State, list[str]]:
        model = build(0)
        optimizer = adamw(model)
        with managers(model, optimizer, **options) as manager:
            for step in (1, 2):
                train(model, optimizer, step)
                manager.step(step)
        then = state_of(model, optimizer)
        train(model, optimizer, 3)
        return then, state_of(model, optimizer), [n for n, _ in model.named_parameters()]

    def load() -> tuple[State, State, list[str]]:
        model = build(1)
        optimizer = adamw(model)
        manager = managers(model, optimizer, memory_dir=place(managers, where), **options)
        report = manager.restore()
        assert report is not None
        assert report.step == 2
        managers.vanish(manager)
        now = state_of(model, optimizer)
        train(model, optimizer, 3)
        return now, state_of(model, optimizer), [n for n, _ in model.named_parameters()]

    saved, loaded = run_ranks(save, WORLD), run_ranks(load, WORLD)
    for before, after in zip(saved, loaded, strict=True):
        assert before[2] == after[2]
        assert_equal(after[0], before[0])
        assert_equal(after[1], before[1])
    return [s for s, *_ in saved], [s for s, *_ in loaded]


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build()

    return make


@pytest.mark.parametrize("where", ["memory", "storage"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "equal"])
def test_a20_tied_parameters(managers: Managers, tied: bool, where: str) -> None:
    go_on(managers, seeded(lambda: Tied(tied)), where)
    names = [n for n in stored(managers.run, 2) if n.split("|")[1] == "weight"]
    assert len({n.split("|")[0] for n in names}) == (1 if tied else 2)


@pytest.mark.parametrize("where", ["memory", "storage"])
@pytest.mark.parametrize("exclude", [True, False], ids=["excluded", "kept"])
def test_a21_a_frozen_layer(managers: Managers, exclude: bool, where: str) -> None:
    def build(seed: int) -> nn.Module:
        model = nn.Sequential(*dense(seed), nn.Linear(DIM, DIM))
        model[2].requires_grad_(False)
        if exclude:  # as after loading the base model
            with torch.no_grad():
                for param in model[2].parameters():
                    param.fill_(0.25)
        return model

    go_on(managers, build, where, exclude_frozen=exclude)
    names = {n.split("|")[0] for n in stored(managers.run, 2)}
    assert ("2.weight" in names) is not exclude


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_a23_scalars_empty_tensors_and_an_empty_rank(managers: Managers, where: str) -> None:
    """Also where they lie in the memory of another node, which has no store of its own."""
    shapes = {"scalar": (), "none": (0,), "wide": (0, 3), "one": (1,), "deep": (3, 0, 2)}

    class Mine:
        """State of every rank; none on rank 1."""

        def __init__(self) -> None:
            rank = dist.get_rank()
            self.state: dict[str, Any] = {}
            if rank != 1:
                self.state = {n: torch.full(s, float(rank)) for n, s in shapes.items()}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    def save() -> tuple[State, State]:
        torch.manual_seed(0)
        model, mine = bare(shapes), Mine()
        with managers(model, extras={"mine": mine}) as manager:
            manager.save(1)
        return state_of(model), mine.state

    def load() -> tuple[State, State]:
        torch.manual_seed(1)
        model, mine = bare(shapes), Mine()
        mine.state = {"old": 1}
        manager = managers(model, extras={"mine": mine}, memory_dir=place(managers, where))
        assert manager.restore() is not None
        managers.vanish(manager)
        return state_of(model), mine.state

    for saved, loaded in zip(run_ranks(save, WORLD), run_ranks(load, WORLD), strict=True):
        for then, now in zip(saved, loaded, strict=True):
            assert_equal(now, then)


def test_a26_from_every_wrapper_into_every_other(managers: Managers) -> None:
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda m: m,
        "compiled": torch.compile,
        "ddp": nn.parallel.DistributedDataParallel,
        "both": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
    }

    def work() -> int:
        pairs = 0
        for saver, wrap in wrappers.items():
            run, model = managers.run / saver, dense(7)
            with managers(wrap(model), directory=run) as manager:
                manager.save(1)
            dist.barrier()
            for unwrap in wrappers.values():
                again = dense(8)
                manager = managers(unwrap(again), directory=run)
                manager.restore(weights_only=True)
                managers.vanish(manager)
                assert_equal(state_of(again), state_of(model))
                pairs += 1
        return pairs

    assert run_ranks(work, WORLD) == [16] * WORLD


# ------------------------------------------------------------------------------ optimizers, steps


@pytest.mark.parametrize("zero", [True, False], ids=["zero", "plain"])
def test_a27_groups_in_another_order(managers: Managers, zero: bool) -> None:
    options = [
        {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.0},
        {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3},
        {"lr": 0.03, "betas": (0.7, 0.8), "weight_decay": 0.1},
    ]

    def build(model: nn.Module, order: list[int]) -> tuple[torch.optim.Optimizer, LambdaLR]:
        groups = [
            {"params": [*model[2 * i].parameters()][:: -1 if i == order[0] else 1], **options[i]}
            for i in order
        ]
        if zero:
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.5)
        else:
            optimizer = torch.optim.AdamW(groups)
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def three(seed: int) -> nn.Module:
        return nn.Sequential(*dense(seed), nn.Tanh(), nn.Linear(DIM, DIM))

    def run(seed: int, order: list[int], steps: range, restore: bool) -> tuple[Any, ...]:
        model = three(seed)
        optimizer, scheduler = build(model, order)
        manager = managers(
            model,
            optimizer,
            extras={"scheduler": scheduler},
            policy=dataclasses.replace(EACH, snapshot_every=7, persist_every=7),
        )
        if restore:
            assert manager.restore() is not None
        seen = []
        for step in steps:
            train(model, optimizer, step)
            scheduler.step()
            if step <= 7:
                manager.step(step)
            else:
                rates = {
                    order[i]: (g["lr"], g["weight_decay"], g["betas"])
                    for i, g in enumerate(optimizer.param_groups)
                }
                seen.append((rates, state_of(model)))
        manager.close() if not restore else managers.vanish(manager)
        return tuple(seen)

    saved = run_ranks(lambda: run(0, [0, 1, 2], range(1, 11), False), WORLD)
    loaded = run_ranks(lambda: run(1, [2, 0, 1], range(8, 11), True), WORLD)
    for before, after in zip(saved, loaded, strict=True):
        assert len(before) == len(after) == 3
        for (rates, weights), (again, now) in zip(before, after, strict=True):
            assert again == rates
            assert_equal(now, weights)


@pytest.mark.parametrize(
    ("world", "in_buckets"), [(4, False), (2, False), (1, False), (2, True)], ids=str
)
def test_a28_moments_come_from_the_file(
    managers: Managers, world: int, in_buckets: bool
) -> None:
    """From partitioned optimizers, into such that never stepped, on other numbers of ranks."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = dense(seed)
        return model, ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=in_buckets,
            lr=0.01,
        )

    def save() -> list[float]:
        model, optimizer = build(0)
        policy = moc.Policy(snapshot_every=10, persist_every=50)
        with managers(model, optimizer, policy=policy) as manager:
            for step in range(1, 51):
                train(model, optimizer, step)
                manager.step(step)
        return [train(model, optimizer, step) for step in range(51, 56)]

    def load() -> tuple[list[float], int]:
        model, optimizer = build(1)
        manager = managers(model, optimizer)
        report = manager.restore()
        assert report is not None
        managers.vanish(manager)
        return [train(model, optimizer, step) for step in range(51, 56)], report.optimizer_entries

    losses = run_ranks(save, WORLD)[0]
    for found, entries in run_ranks(load, world):
        assert found == losses
        assert entries == 3 * 4


def test_a29_random_numbers_of_each_rank(managers: Managers) -> None:
    def draw(model: nn.Module) -> tuple[float, ...]:
        out = float(model(batch(1)).sum().detach())
        return out, float(torch.rand(())), random.random(), float(np.random.rand())

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))

    def save() -> list[tuple[float, ...]]:
        model = build()
        seed(10 + dist.get_rank())
        draw(model)
        with managers(model) as manager:
            manager.step(1)
            return [draw(model) for _ in range(5)]

    def load() -> list[tuple[float, ...]]:
        model = build()
        seed(0)
        manager = managers(model)
        assert manager.restore() is not None
        drawn = [draw(model) for _ in range(5)]
        managers.vanish(manager)
        return drawn

    expected = run_ranks(save, WORLD)
    assert len({draws[0] for draws in expected}) == WORLD
    assert run_ranks(load, WORLD) == expected


def test_a30_every_index_once(managers: Managers) -> None:
    """Four micro-batches a step, dealt out to the ranks; death after micro-batch 2 of step 5."""

    class Dealt:
        position = 0

        def next(self) -> int:
            self.position += 1
            return (self.position - 1) * WORLD + dist.get_rank()

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    def run(seed: int, micro_batches: range) -> tuple[int, list[int]]:
        model, loader = dense(seed), Dealt()
        optimizer = adamw(model)
        manager = managers(model, optimizer, extras={"loader": loader})
        report = manager.restore()
        seen = []
        for number in micro_batches if report is None else range(4 * report.step, 32):
            seen.append(loader.next())
            (model(batch(number)).square().mean() / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            manager.step(number // 4 + 1)
        if report is None:
            manager.wait()
        managers.vanish(manager)
        return report.step if report else 0, seen

    first = run_ranks(lambda: run(0, range(18)), WORLD)
    second = run_ranks(lambda: run(1, range(0)), WORLD)
    assert {step for step, _ in second} == {4}
    used = [i for _, seen in first for i in seen[:16]] + [i for _, seen in second for i in seen]
    assert sorted(used) == list(range(32 * WORLD))


@pytest.mark.parametrize("kind", ["dense", "experts", "manifest"])
def test_a31_damage_in_what_another_rank_reads(managers: Managers, kind: str) -> None:
    """All ranks step back together, or all take the same older expert."""

    def save() -> list[State]:
        model = moe()
        optimizer = adamw(model)
        states = []
        with managers(model, optimizer) as manager:
            for step in (1, 2):
                train(model, optimizer, step)
                manager.step(step)
                manager.wait()
                states.append(state_of(model, optimizer))
        return states

    (one, two), *_ = run_ranks(save, WORLD)
    folder = managers.run / step_dir(version_of(managers.run, 2))
    paths = sorted(folder.glob("manifest.json" if kind == "manifest" else f"{kind}-*.safetensors"))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    path = dice.choice(paths)
    data = path.read_bytes()
    start = 0 if kind == "manifest" else 8 + int.from_bytes(data[:8], "little")
    at, bit = dice.randrange(start, len(data)), dice.randrange(8)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])

    def load() -> tuple[int, int, str, State]:
        model = moe(1)
        optimizer = adamw(model)
        manager = managers(model, optimizer, memory_dir=managers.memory_dir / "another")
        report = manager.restore()
        assert report is not None
        managers.vanish(manager)
        told = " ".join(report.reasons)
        return report.step, report.stale_experts, told, state_of(model, optimizer)

    loaded = run_ranks(load, WORLD)
    same_everywhere([state for *_, state in loaded])
    step, stale, told, now = loaded[0]
    if kind == "experts":
        assert (step, stale) == (2, 1)
        rows = [
            [same_bytes(now["1.experts.w1"][e], then["1.experts.w1"][e]) for then in (one, two)]
            for e in range(EXPERTS)
        ]
        assert sorted(rows) == [[False, True]] * (EXPERTS - 1) + [[True, False]]
    else:
        assert step == 1
        assert path.name in told
        assert_equal(now, one)
