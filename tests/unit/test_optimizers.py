"""Optimizers of every kind: what they keep, what a restore leaves alone, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal
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
)
from torch import Tensor, nn

import moc
from moc.errors import MismatchError, RanksDisagree, StateError
from moc.state.experts import build_expert_map
from moc.state.live import LiveState
from moc.testing.ranks import run_ranks


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
