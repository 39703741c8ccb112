"""State that changes everywhere: in forward, in backward, in hooks, and beside the optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.job import assert_equal
from tests.support.tiny import DIM, EXPERTS, Managers, adamw, batch, dense, moe, state_of, train
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import moc
from moc.errors import ConfigError, SaveError, StateError

Job = tuple[nn.Module, Any, dict[str, Any]]


class Busy(nn.Module):
    """Batch statistics, an amax history, a token counter, and a scale written in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.Linear(8, DIM)
        self.register_buffer("amax", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("grad_amax", torch.zeros(()))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.out.register_full_backward_hook(self._rescale)

    def _rescale(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self.scale.copy_(1 + outputs[0].abs().max())

    def _watch(self, grad: Tensor) -> None:
        self.grad_amax = grad.abs().max()  # bound anew

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tokens += len(x)
            self.amax.copy_(self.amax.roll(1))
            self.amax[0] = x.abs().max()
        hidden = self.norm(self.inp(x)) / self.scale.clone()  # backward writes it
        if hidden.requires_grad:
            hidden.register_hook(self._watch)
        return self.out(hidden.tanh())


class Codebook(nn.Module):
    """A parameter of the optimizer that forward writes as well."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.lin, self.codes = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.write, self.on = write, True

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.on:
            self.write(self.codes)
        return self.lin(x) * self.codes.clone()


def in_place(codes: nn.Parameter) -> None:
    with torch.no_grad():
        codes.mul_(0.75)


def through_data(codes: nn.Parameter) -> None:
    codes.data.mul_(0.75)


def swapped(codes: nn.Parameter) -> None:
    codes.data = codes.data * 0.75


class Replacing(torch.optim.Optimizer):
    """Momentum whose state is another tensor after every step; large enough to be overlapped."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                old = state.get("momentum", torch.zeros_like(param))
                state["momentum"] = 0.9 * old + param.grad
                state["wide"] = state.get("wide", torch.zeros(20_000)) + param.grad.sum()
                param.sub_(group["lr"] * state["momentum"])


def resumed(managers: Managers, make: Callable[[], Job], turn: Callable[..., None]) -> None:
    """Three steps saved while training goes on, each compared; the newest is gone on from."""
    model, optimizer, extras = make()
    manager = managers(model, optimizer, extras=extras)
    then = {}
    for step in range(1, 4):
        turn(model, optimizer, extras, step)
        manager.wait()  # every step is to be committed
        manager.step(step)
        then[step] = everything(model, optimizer, extras)
    manager.wait()
    assert manager.stats()["torn"] == 0
    turn(model, optimizer, extras, 4)
    after = everything(model, optimizer, extras)
    managers.vanish(manager)
    for step in (2, 3):  # the newest last: it stays the history
        torch.manual_seed(9)
        again, fresh, more = make()
        reader = managers(again, fresh, extras=more, directory=managers.run)
        if step == 3:
            report = reader.restore()
            assert report is not None
            assert report.step == 3
            assert_equal(everything(again, fresh, more), then[3])
            turn(again, fresh, more, 4)
            assert_equal(everything(again, fresh, more), after)
        else:
            reader.restore(step, weights_only=True)
            weights = {k: v for k, v in then[2].items() if k in again.state_dict()}
            assert_equal(dict(again.state_dict()), weights)
        managers.vanish(reader)


def everything(model: nn.Module, optimizer: Any, extras: dict[str, Any]) -> dict[str, Tensor]:
    """State as `state_of` has it, with groups and schedulers."""
    found = state_of(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        found[f"lr {number}"] = torch.as_tensor(group["lr"]).clone()
    for name, extra in extras.items():
        for key, value in extra.state_dict().items():
            if isinstance(value, int | float | Tensor):
                found[f"{name} {key}"] = torch.as_tensor(value).clone()
    return found


def plain(model: nn.Module, optimizer: Any, extras: dict[str, Any], step: int) -> None:
    train(model, optimizer, step)
    for extra in extras.values():
        extra.step()


@pytest.mark.parametrize("kind", ["adamw", "replacing"])
def test_forward_and_backward_write_buffers(managers: Managers, kind: str) -> None:
    def make() -> Job:
        model = Busy()
        return model, adamw(model) if kind == "adamw" else Replacing(model.parameters()), {}

    resumed(managers, make, plain)


def test_a_learning_rate_that_is_a_tensor_and_changes_in_place(managers: Managers) -> None:
    def make() -> Job:
        model = dense()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        return model, optimizer, {"lr": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    resumed(managers, make, plain)


def test_a_scheduler_that_steps_after_the_save_is_saved_as_it_was(managers: Managers) -> None:
    model = dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    manager = managers(model, optimizer, extras={"lr": scheduler})
    for step in (1, 2):
        train(model, optimizer, step)
        manager.step(step)
        then = everything(model, optimizer, {"lr": scheduler})
        scheduler.step()
    manager.wait()
    managers.vanish(manager)
    again = dense(1)
    fresh = torch.optim.AdamW(again.parameters(), lr=torch.tensor(0.5))
    other = torch.optim.lr_scheduler.ExponentialLR(fresh, 0.5)
    managers(again, fresh, extras={"lr": other}).restore()
    assert_equal(everything(again, fresh, {"lr": other}), then)
    assert float(fresh.param_groups[0]["lr"]) == pytest.approx(0.005)


@pytest.mark.parametrize("reach", ["global", "own"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("write", [in_place, through_data, swapped])
def test_pre_step_hooks_write_only_after_the_copy(
    managers: Managers, reach: str, order: str, write: Callable[[nn.Parameter], None]
) -> None:
    """As loss-free balancing does with its bias; here also with a parameter of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    optimizer = adamw(model)

    def hook(*_: object) -> None:
        write(model[0].weight)
        model[1].running_mean.add_(1)

    def register() -> Any:
        if reach == "own":
            return optimizer.register_step_pre_hook(hook)
        return register_optimizer_step_pre_hook(hook)

    handle = register() if order == "before" else None
    manager = managers(model, optimizer)
    handle = handle or register()
    try:
        for step in (1, 2):
            train(model, optimizer, step)
            manager.step(step)
        manager.wait()
        go = threading.Event()
        train(model, optimizer, 3)
        worker = manager._saver._snapshots.worker._pool
        worker.submit(go.wait, 30)  # the copy starts when the optimizer is at the fence, at last
        manager.step(3)
        then = state_of(model, optimizer)
        timer = threading.Timer(0.05, go.set)
        timer.start()
        train(model, optimizer, 4)
        timer.join()
        manager.wait()
    finally:
        handle.remove()
    assert manager.stats()["torn"] == 0
    managers.vanish(manager)
    again = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), then)


@pytest.mark.parametrize("write", [in_place, through_data, swapped])
def test_a_parameter_that_forward_writes_is_never_sealed_wrong(
    managers: Managers, write: Callable[[nn.Parameter], None]
) -> None:
    """The copy is held back until forward has written, which a slow copy amounts to."""
    torch.manual_seed(0)
    model = Codebook(write)
    optimizer = adamw(model)
    events: list[moc.Event] = []
    manager = managers(model, optimizer, on_event=events.append)
    then: dict[int, dict[str, Tensor]] = {}
    for step in range(1, 4):
        train(model, optimizer, step)
        go = threading.Event()
        manager._saver._snapshots.worker._pool.submit(go.wait, 30)
        manager.step(step)
        then[step] = state_of(model, optimizer)
        model(batch(step))
        go.set()
        manager.wait()
    assert manager.all_steps() == [1, 2, 3]
    managers.vanish(manager)
    told = [e.text for e in events if e.kind == "warning" and "besides the optimizers" in e.text]
    assert len(told) == 1
    assert "codes" in told[0]
    again = Codebook(write)
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), then[3])


@pytest.mark.parametrize("write", [in_place, swapped])
def test_a_writer_that_comes_later_tears_one_snapshot_at_most(
    managers: Managers, write: Callable[[nn.Parameter], None]
) -> None:
    torch.manual_seed(0)
    model = Codebook(write)
    model.on = False
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    saved, then = [], {}
    for step in range(1, 5):
        model.on = False
        train(model, optimizer, step)
        go = threading.Event()
        manager._saver._snapshots.worker._pool.submit(go.wait, 30)
        manager.step(step)
        then[step] = state_of(model, optimizer)
        model.on = step > 1
        model(batch(step))
        go.set()
        if step == 2 and write is in_place:
            with pytest.raises(SaveError, match="torn: codes weight"):
                manager.wait()
        else:
            manager.wait()
            saved.append(step)
    assert saved == ([1, 3, 4] if write is in_place else [1, 2, 3, 4])
    managers.vanish(manager)
    again = Codebook(write)
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), then[4])


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("early", [True, False], ids=["before step", "after step"])
def test_an_ema_copy(managers: Managers, stable: bool, early: bool) -> None:
    """An EMA that is written after `step` is not stable; saying so wrongly is found."""
    model = dense()
    optimizer = adamw(model)
    average = torch.zeros(8 * DIM)
    manager = managers(model, optimizer)
    manager.register("ema", average, stable=stable)

    def follow() -> None:
        average.lerp_(model[0].weight.detach().flatten(), 0.1)

    for step in range(1, 4):
        train(model, optimizer, step)
        if early:
            follow()
        manager.step(step)
        then = average.clone()
        if not early:
            follow()
    manager.wait()
    assert manager.stats()["torn"] == 0
    managers.vanish(manager)
    again, found = dense(1), torch.zeros(8 * DIM)
    reader = managers(again, adamw(again))
    reader.register("ema", found)
    reader.restore()
    assert torch.equal(found, then)


def test_a_module_that_was_replaced_is_named(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    model[2] = nn.Linear(8, DIM)
    with pytest.raises(ConfigError, match=r"shape \(6, 8\).*No optimizer holds 2\.weight"):
        managers(model, optimizer)


def test_a_module_that_is_replaced_later_is_named(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    for step in (1, 2):
        train(model, optimizer, step)
        manager.step(step)
    manager.wait()
    kept, model[2] = model[2], nn.Linear(8, DIM)
    train(model, optimizer, 3)
    with pytest.raises(StateError, match=r"2\.weight.*2\.bias"):
        manager.step(3)
    model[2] = kept
    train(model, optimizer, 5)
    manager.step(5)
    manager.wait()
    assert 5 in manager.all_steps()
    assert 3 not in manager.all_steps()


def test_a_module_that_is_wrapped_later_is_the_same(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    train(model, optimizer, 1)
    manager.step(1)

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = inner

        def forward(self, x: Tensor) -> Tensor:
            return self._fsdp_wrapped_module(x)

    model[2] = Wrapped(model[2])
    for step in (2, 3):
        train(model, optimizer, step)
        manager.step(step)
    manager.wait()
    then = [p.detach().clone() for p in model.parameters()]
    managers.vanish(manager)
    again = dense(1)
    managers(again, adamw(again)).restore()
    for a, b in zip(again.parameters(), then, strict=True):
        assert torch.equal(a, b)


def test_tables_are_left_out_and_buffers_of_experts_are_not(managers: Managers) -> None:
    def make(seed: int) -> nn.Module:
        model = moe(seed)
        model[0].register_buffer("rope", torch.full((3,), float(seed)), persistent=False)
        model[1].register_buffer("load", torch.full((3,), float(seed)), persistent=False)
        model[1].router.register_buffer("bias", torch.full((EXPERTS,), float(seed)), False)
        return model

    model = make(3)
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    train(model, optimizer, 1)
    manager.step(1)
    manager.wait()
    assert manager._session.live.left_out == ["0.rope"]
    managers.vanish(manager)
    again = make(5)
    managers(again, adamw(again)).restore()
    assert torch.equal(again[0].rope, torch.full((3,), 5.0))
    assert torch.equal(again[1].load, torch.full((3,), 3.0))
    assert torch.equal(again[1].router.bias, torch.full((EXPERTS,), 3.0))


class Scaled(nn.Linear):
    """Keeps a number that is neither parameter nor buffer."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_extra_state_of_modules(managers: Managers) -> None:
    model = nn.Sequential(Scaled(DIM, DIM), Scaled(DIM, DIM))
    model[1].scale = 42.0
    with managers(model) as manager:
        manager.save(1)
    again = nn.Sequential(Scaled(DIM, DIM), Scaled(DIM, DIM))
    assert managers(again).restore() is not None
    assert [m.scale for m in again] == [1.0, 42.0]


@pytest.mark.parametrize("form", ["longer", "float", "new"])
def test_a_buffer_that_takes_another_form_is_saved_as_it_is(managers: Managers, form: str) -> None:
    def change(model: nn.Module) -> nn.Module:
        if form == "new":
            model.register_buffer("other", torch.arange(3.0))
        else:
            model.seen = torch.arange(8) if form == "longer" else torch.tensor([0.5] * 4)
        return model

    def build() -> nn.Module:
        model = dense()
        model.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        return model

    model = build()
    with managers(model) as manager:
        manager.save(1)
        manager.wait()
        change(model)
        manager.save(2)
    again = change(build())
    for buffer in again.buffers():
        buffer.zero_()
    report = managers(again).restore()
    assert report is not None
    assert report.step == 2
    assert_equal(state_of(again), state_of(model))


def test_an_error_of_user_code_in_a_save_costs_that_save_alone(managers: Managers) -> None:
    class Fickle:
        fails = False

        def state_dict(self) -> dict[str, int]:
            if self.fails:
                raise ZeroDivisionError("of the user")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    extra, model = Fickle(), dense()
    manager = managers(model, extras={"mine": extra})
    manager.step(1)
    manager.wait()
    extra.fails = True
    with pytest.raises(ZeroDivisionError):
        manager.step(2)
    extra.fails = False
    manager.step(3)
    manager.wait()
    assert manager.all_steps() == [1, 3]
    assert manager.stats()["failed"] == 1


def test_a_tensor_rate_that_groups_shared_parts_with_them(managers: Managers) -> None:
    def build(seed: int, *rates: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = dense(seed)
        groups = [
            {"params": model[i].parameters(), "lr": r} for i, r in zip((0, 2), rates, strict=True)
        ]
        return model, torch.optim.AdamW(groups, foreach=False)

    rates = [torch.tensor(5e-4), torch.tensor(1e-3)]
    model, optimizer = build(0, *rates)
    with managers(model, optimizer) as manager:
        train(model, optimizer, 1)
        manager.step(1)
    shared = torch.tensor(1.0)
    again, fresh = build(1, shared, shared)
    assert managers(again, fresh).restore() is not None
    assert [float(g["lr"]) for g in fresh.param_groups] == [float(rate) for rate in rates]
