"""Optimizers of every kind: what they keep, what a restore leaves alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.any_model import ScheduleFree
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    EXPERTS,
    Managers,
    adamw,
    dense,
    moe,
    run_steps,
    state_of,
    stored,
    train,
    whole,
)
from torch import Tensor, nn

import moc
from moc.errors import MismatchError, RanksDisagree, StateError
from moc.state.experts import build_expert_map
from moc.state.live import LiveState
from moc.testing.ranks import run_ranks

ONE_EACH = moc.Policy(
    snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
)


def test_a_step_that_the_scaler_skipped_is_no_step(managers: Managers) -> None:
    """The scale is halved and goes on; numbers of the steps stay those of the loop."""

    def scaled(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        scaler.scale(loss * float("inf") if step in (2, 3) else loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def make(seed: int) -> tuple[Any, Any, Any]:
        model = dense(seed)
        return model, adamw(model), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    model, optimizer, scaler = make(0)
    with managers(model, optimizer, extras={"scaler": scaler}) as manager:
        for step in (1, 2, 3, 4):
            scaled(model, optimizer, scaler, step)
            manager.step(step)
            manager.wait()
        assert manager.all_steps() == [1, 4]
    again, fresh, other = make(1)
    report = managers(again, fresh, extras={"scaler": other}).restore()
    assert report is not None
    assert report.step == 4
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 16.0
    for step in (5, 6):
        scaled(model, optimizer, scaler, step)
        scaled(again, fresh, other, step)
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    assert other.state_dict() == scaler.state_dict()


def test_loading_never_steps_and_never_touches_gradients(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    again = moe(1)
    fresh = adamw(again)
    train(again, fresh, 1)
    called: list[str] = []
    fresh.register_step_pre_hook(lambda *_: called.append("before"))
    fresh.register_step_post_hook(lambda *_: called.append("after"))
    fresh.step = lambda *_: called.append("step")  # type: ignore[assignment,method-assign]
    grads = {name: (p.grad, p.grad.clone()) for name, p in again.named_parameters()}
    params = dict(again.named_parameters())
    assert managers(again, fresh).restore() is not None
    assert called == []
    for name, param in again.named_parameters():
        assert param is params[name]
        assert param.grad is grads[name][0]
    assert_equal(
        {name: p.grad for name, p in again.named_parameters()},
        {name: copy for name, (_, copy) in grads.items()},
    )
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_the_largest_moment_is_cut_by_expert(managers: Managers, stacked: bool) -> None:
    model = moe(stacked=stacked)
    optimizer = adamw(model, amsgrad=True)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
        manager.wait()
    found = [name for name in stored(managers.run, 1) if "|max_exp_avg_sq|" in name]
    of_experts = [name for name in found if "experts" in name]
    assert len(of_experts) == EXPERTS * (1 if stacked else 2)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "schedule-free": ScheduleFree,
}


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_full_save_is_exact(managers: Managers, kind: str, stacked: bool) -> None:
    """State, group options and the next steps, of an optimizer that has never stepped."""
    model = moe(stacked=stacked)
    optimizer = KINDS[kind](model.parameters())
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3])
    again = moe(1, stacked=stacked)
    fresh = KINDS[kind](again.parameters())
    managers(again, fresh).restore()
    for step in (4, 5, 6):
        assert_equal(state_of(again, fresh), state_of(model, optimizer))
        assert options_of(fresh) == options_of(optimizer)
        assert train(again, fresh, step) == train(model, optimizer, step)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_partial_save_is_exact(managers: Managers, kind: str, stacked: bool) -> None:
    """All that an expert has is of one step; the rest, and state across experts, of the newest."""
    model = moe(stacked=stacked)
    optimizer = KINDS[kind](model.parameters())
    states = {}
    with managers(model, optimizer, policy=ONE_EACH) as manager:
        for step in (1, 2, 3, 4):
            run_steps(manager, model, optimizer, [step], after=lambda _: manager.wait())
            states[step] = state_of(model, optimizer)
    again = moe(1, stacked=stacked)
    fresh = KINDS[kind](again.parameters())
    elsewhere = managers.memory_dir / "another"
    managers(again, fresh, policy=ONE_EACH, memory_dir=elsewhere).restore(3)
    now = state_of(again, fresh)
    found, seen = set(), set()
    for expert in range(EXPERTS):
        mine = of_expert(now, expert, stacked)
        # Adam's moments of rows are fitted to the step that all rows share.
        fitted = kind == "AMSGrad" and stacked
        names = [name for name in mine if not (fitted and "/" in name)]
        then = {step: of_expert(states[step], expert, stacked) for step in (1, 2, 3)}
        steps = [s for s in then if all(same_bytes(then[s][n], mine[n]) for n in names)]
        assert len(steps) == 1, (expert, steps)
        found.add(steps[0])
        seen |= {name.split("[")[0] for name in mine}
    assert len(found) > 1
    rest = [name for name in now if name not in seen]
    assert_equal({n: now[n] for n in rest}, {n: states[3][n] for n in rest})


def of_expert(state: dict[str, Tensor], expert: int, stacked: bool) -> dict[str, Tensor]:
    """What belongs to one expert: its module's values, or its rows where there are rows."""
    if not stacked:
        return {n: v for n, v in state.items() if n.startswith(f"1.experts.{expert}.")}
    return {
        f"{n}[{expert}]": v[expert]
        for n, v in state.items()
        if n.startswith("1.experts.w1") and v.dim()
    }


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("resumed", [False, True], ids=["one run", "resumed"])
def test_state_that_appears_after_a_save_is_persisted_for_all(
    managers: Managers, resumed: bool
) -> None:
    """No expert is left at a version without moments beside others that have some."""
    model = moe()
    optimizer = adamw(model)
    with managers(model, optimizer, policy=ONE_EACH) as manager:
        manager.save(0)
        manager.wait()
        if not resumed:
            run_steps(manager, model, optimizer, [1])
    if resumed:
        with managers(model, optimizer, policy=ONE_EACH) as manager:
            manager.restore()
            run_steps(manager, model, optimizer, [1])
    then = state_of(model, optimizer)
    again = moe(1)
    fresh = adamw(again)
    elsewhere = managers.memory_dir / "another"
    report = managers(again, fresh, policy=ONE_EACH, memory_dir=elsewhere).restore()
    assert report is not None
    assert report.step == 1
    assert_equal(state_of(again, fresh), then)
    assert train(again, fresh, 2) == train(model, optimizer, 2)


def test_rows_without_moments_have_zeros_and_it_is_said(managers: Managers) -> None:
    """In memory alone, an expert's newest version may be from before the first step."""
    policy = moc.Policy(snapshot_every=1, persist_every=None, k_snapshot=1, k_persist=1)
    model = moe()
    optimizer = adamw(model)
    manager = managers(model, optimizer, policy=policy)
    with manager:
        for step in range(EXPERTS):  # one expert each
            manager.save(step)
        run_steps(manager, model, optimizer, [EXPERTS])
    events: list[moc.Event] = []
    again = moe(1)
    fresh = adamw(again)
    report = managers(again, fresh, policy=policy, on_event=events.append).restore()
    assert report is not None
    assert report.step == EXPERTS
    moment = fresh.state[again[1].experts.w1]["exp_avg"]
    have = [bool(row.any()) for row in moment]
    assert moment.shape == (EXPERTS, 6, 6)
    assert sum(have) == 1
    assert any("had no exp_avg yet" in str(event) for event in events)
    row = have.index(True)
    assert same_bytes(moment[row], optimizer.state[model[1].experts.w1]["exp_avg"][row])
    train(again, fresh, EXPERTS + 1)


class Biased(nn.Module):
    """Stacked biases: Adafactor keeps one factor over all of them. Rows may be on other ranks."""

    def __init__(self, seed: int, rows: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts = nn.Module()
        self.experts.mlp1_weight = nn.Parameter(torch.randn(EXPERTS, 3, 5)[rows].clone())
        self.experts.mlp1_bias = nn.Parameter(torch.randn(EXPERTS, 5)[rows].clone())
        self.rows = rows

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for param in self.parameters():
            param.grad = torch.randn(EXPERTS, *param.shape[1:], generator=generator)[self.rows]
        optimizer.step()


def test_factors_over_experts_are_dense_and_listed(managers: Managers) -> None:
    model = Biased(0)
    optimizer = torch.optim.Adafactor(model.parameters())
    with managers(model, optimizer) as manager:
        model.step(optimizer, 1)
        manager.step(1)
        manager.wait()
        told = manager.describe().splitlines()[-1]
        pieces = stored(managers.run, 1)
    assert told == (
        "optimizer state of experts that is dense all the same (1): experts.mlp1_bias (col_var)"
    )
    count = {
        part: sum(name.startswith(f"experts.{part}|") for name in pieces)
        for part in ("mlp1_weight|row_var", "mlp1_weight|col_var", "mlp1_bias|row_var")
    }
    assert set(count.values()) == {EXPERTS}
    assert [n for n in pieces if "mlp1_bias|col_var" in n] == ["experts.mlp1_bias|col_var|0,0:1,5"]


@pytest.mark.dist
def test_factors_over_the_experts_of_a_rank_are_its_own(managers: Managers) -> None:
    """Ranks with other experts have other factors, also where they appear after the first save."""

    def build(seed: int) -> tuple[Biased, torch.optim.Optimizer, moc.Layout]:
        rank = dist.get_rank()
        alone = [dist.new_group([r]) for r in range(2)]
        model = Biased(seed, slice(2 * rank, 2 * rank + 2))
        layout = moc.Layout.from_groups(ep=dist.group.WORLD, edp=alone[rank])
        return model, torch.optim.Adafactor(model.parameters()), layout

    def save() -> dict[str, Tensor]:
        model, optimizer, layout = build(0)
        with managers(model, optimizer, layout=layout) as manager:
            manager.save(0)
            for number in (1, 2):
                model.step(optimizer, number)
                manager.step(number)
        model.step(optimizer, 3)
        return state_of(model, optimizer)

    def load() -> dict[str, Tensor]:
        model, optimizer, layout = build(1)
        manager = managers(model, optimizer, layout=layout)
        assert manager.restore() is not None
        managers.vanish(manager)
        model.step(optimizer, 3)
        return state_of(model, optimizer)

    then = run_ranks(save, 2)
    assert not same_bytes(*(state["experts.mlp1_bias/col_var"] for state in then))
    for found, expected in zip(run_ranks(load, 2), then, strict=True):
        assert_equal(found, expected)


def test_trained_complex_parameters(managers: Managers) -> None:
    """complex64 has a name in the format, and so have its moments."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Module()
        model.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64).t())
        return model, torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        (model.wave * (number + 1j)).abs().square().sum().backward()
        optimizer.step()

    model, optimizer = build(0)
    with managers(model, optimizer) as manager:
        for number in (1, 2):
            step(model, optimizer, number)
            manager.step(number)
            manager.wait()
    pieces = stored(managers.run, 2)
    assert pieces["wave|exp_avg|0,0:3,4"].dtype == torch.complex64
    assert_equal({"w": whole(pieces, "wave")}, {"w": model.wave.detach()})
    again, fresh = build(1)
    managers(again, fresh).restore()
    for number in (3, 4):
        assert_equal(state_of(again, fresh), state_of(model, optimizer))
        step(again, fresh, number)
        step(model, optimizer, number)


def test_other_groups_are_refused_with_both_lists(managers: Managers) -> None:
    model = dense()
    with managers(model, adamw(model)) as manager:
        train(model, manager._session.live.optimizers, 1)
        manager.step(1)
    again = dense(1)
    fresh = torch.optim.AdamW([again[0].weight, again[0].bias], lr=0.5)
    train(again, fresh, 1)
    before = state_of(again, fresh)
    told = r"\(2 parameters: 0\.weight, 0\.bias\).*4 parameters: 0\.weight, 0\.bias, 2\.weight"
    with pytest.raises(MismatchError, match=told):
        managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), before)
    assert fresh.param_groups[0]["lr"] == 0.5


def test_groups_without_parameters_keep_their_own_options(managers: Managers) -> None:
    def make(seed: int, lrs: tuple[float, float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = dense(seed)
        empty = [{"params": [], "lr": lr} for lr in lrs]
        return model, torch.optim.AdamW([{"params": list(model.parameters())}, *empty], lr=0.01)

    model, optimizer = make(0, (0.1, 0.2))
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
    again, fresh = make(1, (0.3, 0.4))
    managers(again, fresh).restore()
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.1, 0.2]


def test_state_of_no_parameter_is_refused() -> None:
    model = dense()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    optimizer.state["global"] = {"count": 3}  # type: ignore[index]
    live = LiveState(model, [optimizer])
    with pytest.raises(StateError, match=r"AdamW\.state has an entry for 'global'"):
        list(live.regions())


_STEPS, _OWN = 200, 20


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_stale_moments_are_fitted_to_the_shared_step(kind: str) -> None:
    """The next update of a stale expert is as large as an undisturbed one, not 2 to 3 times."""

    def updates(fit: bool) -> Tensor:
        model = moe()
        weight = model[1].experts.w1
        optimizer = getattr(torch.optim, kind)([weight], lr=1e-3)
        old: dict[str, Tensor] = {}
        gradient = torch.randn(weight.shape[1:], generator=torch.Generator().manual_seed(1))
        for step in range(1, _STEPS + 1):
            weight.grad = gradient.expand_as(weight).clone()
            optimizer.step()
            if step == _OWN:
                old = {k: v.clone() for k, v in optimizer.state[weight].items() if v.dim()}
        for key, value in old.items():
            optimizer.state[weight][key][0] = value[0]
        if fit:
            found = build_expert_map(LiveState(model, []).shapes, "auto", 0, 1)
            live = LiveState(model, [optimizer], found)
            (owned,) = live.owned()
            live.rescale(owned, {0: _OWN})
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        sizes = (weight.detach() - before).flatten(1).norm(dim=1)
        return sizes[0] / sizes[1]

    assert abs(updates(fit=True) - 1) < 0.05
    assert 2 < updates(fit=False) < 3


def test_ranks_that_disagree_on_a_skipped_step_are_named(managers: Managers) -> None:
    """A scaler that skips on one rank only: told by both ranks at the next save, no hang."""

    def one() -> str:
        rank = dist.get_rank()
        model = dense()
        optimizer = adamw(model)
        policy = moc.Policy(snapshot_every=1, persist_every=1, timeout_secs=10)
        manager = managers(model, optimizer, policy=policy)
        try:
            for step in range(1, 10):
                if rank == 0 or step != 3:
                    train(model, optimizer, step)
                manager.step(step)
        except RanksDisagree as error:
            managers.vanish(manager)
            return str(error)
        return "nobody noticed"

    for told in run_ranks(one, 2, timeout_secs=40):
        assert "ranks disagree on the step of a save" in told
        assert "rank 1" in told
