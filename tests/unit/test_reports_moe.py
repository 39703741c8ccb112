"""What users report of other checkpoint libraries, tried here: mixtures of experts, A14 to A19.

A14 takes several ranks; it stands with the trials on four ranks in ``tests/dist/test_reports.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    DIM,
    EACH,
    EXPERTS,
    Managers,
    adamw,
    moe,
    run_steps,
    state_of,
    stored,
    train,
    version_of,
    whole,
)
from torch import nn

from moc.errors import MismatchError
from moc.persist.commit import load_manifest
from moc.store.local import LocalStore


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a15_experts_without_tokens_stay_without_state(managers: Managers, stacked: bool) -> None:
    model = moe(stacked=stacked)
    model[1].router.allowed = [0]
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    then = state_of(model, optimizer)
    assert ("1.experts.3.weight/exp_avg" in then) is False

    again = moe(1, stacked=stacked)
    fresh = adamw(again)
    if not stacked:
        train(again, fresh, 1)  # it has used all experts: what is absent must become absent
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), then)
    model[1].router.allowed = again[1].router.allowed = [0, 1, 2, 3]
    for step in (3, 4, 5):
        assert train(again, fresh, step) == train(model, optimizer, step)
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def balanced(seed: int) -> nn.Module:
    """In bfloat16, but for a bias and a counter of its router that must not be rounded."""
    model = moe(seed).to(torch.bfloat16)
    router = model[1].router
    bias = torch.tensor([257.0, 0.1, -1e-3, 3.0]) * (seed + 1)
    router.register_buffer("expert_bias", bias, persistent=False)
    router.register_buffer("tokens_per_expert", torch.tensor([16_777_217, 1, 2, 3]) * (seed + 1))
    model.register_buffer("rope", torch.arange(8.0) * (seed + 1), persistent=False)
    return model


def test_a16_router_bias_and_counters_keep_value_and_dtype(managers: Managers) -> None:
    model = balanced(0)
    outside = torch.tensor([0.1, 257.0])
    with managers(model) as manager:
        manager.register("history", outside)
        told = manager.describe()
        manager.save(1)
    assert "buffers left out (not persistent, outside MoE layers) (1): rope" in told

    again, held = balanced(1), torch.zeros(2)
    reader = managers(again)
    reader.register("history", held)
    assert reader.restore() is not None
    router = again[1].router
    assert router.expert_bias.dtype == torch.float32
    assert same_bytes(router.expert_bias, model[1].router.expert_bias)
    assert router.tokens_per_expert.tolist() == [16_777_217, 1, 2, 3]
    assert same_bytes(held, outside)
    assert again.rope[1] == 2, "what is computed anew is left alone"
    head = load_manifest(LocalStore(managers.run), version_of(managers.run, 1)).head
    assert head.left_out == ["rope"]


class Named(nn.Module):
    """A dense layer, a MoE layer, and much that is merely called expert."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dense, sparse = nn.Module(), nn.Module()
        dense.mlp = nn.Linear(DIM, DIM)
        sparse.moe = nn.Module()
        sparse.moe.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))
        sparse.moe.shared_experts = nn.ModuleList([nn.Linear(DIM, DIM)])
        sparse.moe.router = nn.Linear(DIM, EXPERTS)
        sparse.moe.router.register_buffer("expert_bias", torch.randn(EXPERTS))
        sparse.moe.register_buffer("experts_mask", torch.randn(EXPERTS) > 0)
        sparse.expertise = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([dense, sparse])


def test_a17_the_word_expert_in_a_name_makes_no_expert(managers: Managers) -> None:
    model = Named(0)
    policy = dataclasses.replace(EACH, k_snapshot=1, k_persist=1)
    with managers(model, policy=policy) as manager:
        table = manager.describe()
        for step in (1, 2):
            for value in (*model.parameters(), *model.buffers()):
                value.data = value.data.logical_not() if value.dtype == torch.bool else value + 1
            manager.save(step)
            manager.wait()
    experts = {f"layers.1.moe.experts.{e}.{p}" for e in range(4) for p in ("weight", "bias")}
    store = LocalStore(managers.run)
    for step, count in ((1, EXPERTS), (2, 1)):
        manifest = load_manifest(store, version_of(managers.run, step))
        fresh = {
            r.piece.fqn for r in manifest.experts if manifest.files[r.file].is_of(manifest.version)
        }
        assert len(fresh) == 2 * count
        assert {r.piece.fqn for r in manifest.experts} == experts
        others = set(model.state_dict()) - experts
        dense = {r.piece.fqn for r in manifest.dense if r.piece.part in ("weight", "buffer")}
        assert dense == others
        assert all(
            manifest.files[r.file].is_of(manifest.version)
            for r in manifest.dense
            if r.piece.fqn in others
        )
    rows = dict(line.split("  ", 1) for line in table.splitlines())
    assert {name: told.strip() for name, told in rows.items() if "expert of" in told} == {
        "layers.*.moe.experts.*.weight": "expert of layer layers.*.moe, 4 experts, one module each",
        "layers.*.moe.experts.*.bias": "expert of layer layers.*.moe, 4 experts, one module each",
    }
    again = Named(1)
    managers(again, policy=policy).restore(1)
    assert {
        n for n, v in again.state_dict().items() if same_bytes(v, model.state_dict()[n])
    } == set()


class Fused(nn.Module):
    """Eight experts in one tensor; row e is filled with e."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.experts = nn.Module()
        rows = torch.arange(8.0)[:, None, None].expand(8, 64, 32)
        rows = rows.clone() if fill is None else torch.full((8, 64, 32), fill)
        self.moe.experts.w1 = nn.Parameter(rows)

    def add(self, value: float) -> None:
        with torch.no_grad():
            self.moe.experts.w1 += value


def expert_bytes(run: Path, step: int) -> int:
    version = version_of(run, step)
    manifest = load_manifest(LocalStore(run), version)
    return sum(f.nbytes for f in manifest.files if f.is_of(version) and "/experts-" in f.key)


def test_a18_fused_experts_are_sliced(managers: Managers) -> None:
    model = Fused()
    optimizer = torch.optim.AdamW(model.parameters())
    policy = dataclasses.replace(EACH, k_snapshot=2, k_persist=2)

    def step(number: int) -> None:
        model.moe.experts.w1.grad = torch.ones_like(model.moe.experts.w1)
        optimizer.step()
        model.add(1000 * number)
        manager.step(number)
        manager.wait()

    with managers(model, optimizer, policy=policy) as manager:
        step(1)
        first = state_of(model, optimizer)
        step(2)
    full, partial = expert_bytes(managers.run, 1), expert_bytes(managers.run, 2)
    assert full > 8 * 3 * 64 * 32 * 4
    assert partial / full == pytest.approx(2 / 8, abs=0.06)
    names = stored(managers.run, 2)
    chosen = sorted(
        int(n.rsplit("|", 1)[1].split(",")[0])
        for n, v in names.items()
        if "|weight|" in n and v.max() > 2000
    )
    assert len(chosen) == 2

    target = Fused(-1.0)
    fresh = torch.optim.AdamW(target.parameters())
    elsewhere = managers.memory_dir / "another"
    assert managers(target, fresh, policy=policy, memory_dir=elsewhere).restore() is not None
    now, then = state_of(target, fresh), state_of(model, optimizer)
    for expert in range(8):
        source = then if expert in chosen else first
        assert same_bytes(now["moe.experts.w1"][expert], source["moe.experts.w1"][expert])
        if expert in chosen:  # the others' are fitted to the step that all rows share
            key = "moe.experts.w1/exp_avg"
            assert same_bytes(now[key][expert], then[key][expert])
    assert whole(names, "moe.experts.w1", "exp_avg").shape == (8, 64, 32)


def experts_apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SGD for the experts, AdamW for the rest."""
    experts = list(model[1].experts.parameters())
    rest = [p for p in model.parameters() if all(p is not e for e in experts)]
    return [torch.optim.SGD(experts, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def test_a19_two_optimizers_are_told_apart(managers: Managers) -> None:
    model = moe()
    optimizers = experts_apart(model)
    with managers(model, optimizers) as manager:
        run_steps(manager, model, optimizers, [1, 2])
    again = moe(1)
    fresh = experts_apart(again)
    before = state_of(again, fresh)
    with pytest.raises(MismatchError, match=r"SGD.*AdamW|AdamW.*SGD"):
        managers(again, fresh[::-1]).restore()
    assert_equal(state_of(again, fresh), before)
    assert managers(again, fresh).restore() is not None
    assert_equal(state_of(again, fresh), state_of(model, optimizers))
    assert train(again, fresh, 3) == train(model, optimizers, 3)
