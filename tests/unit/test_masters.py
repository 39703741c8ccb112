"""Masters: float32 copies that a wrapper's optimizer steps in the place of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal
from tests.support.tiny import (
    DIM,
    EXPERTS,
    Managers,
    adamw,
    batch,
    dense,
    moe,
    sealed,
    stored,
    whole,
)
from torch import Tensor, nn

import moc
from moc.errors import ConfigError, MismatchError
from moc.testing.ranks import run_ranks


class Mixed:
    """What Apex O2 and Megatron do: 16-bit weights, float32 masters in a torch optimizer."""

    def __init__(self, model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.model = model.to(torch.bfloat16)
        self.pairs = [(p, p.detach().float().requires_grad_()) for p in self.model.parameters()]
        self.inner = make([master for _, master in self.pairs], lr=0.01)

    def step(self) -> None:
        """Hand the gradients over, step, and cast back; a parameter without one is left alone."""
        for param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        self.inner.step()
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)

    def train(self, step: int) -> float:
        """One step; the loss."""
        x = batch(step).to(torch.bfloat16)
        loss = (self.model(x) - x.sin()).float().square().mean()
        loss.backward()
        self.step()
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Every value by name; copies."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        for param, master in self.pairs:
            name = names[id(param)]
            values[f"{name}/master"] = master.detach().clone()
            for key, value in self.inner.state.get(master, {}).items():
                values[f"{name}/{key}"] = torch.as_tensor(value).clone()
        return values


def mixed(seed: int = 0, *, stacked: bool = True) -> Mixed:
    return Mixed(moe(seed, stacked=stacked))


def manager_of(managers: Managers, job: Mixed, **options: Any) -> moc.CheckpointManager:
    return managers(job.model, job.inner, **{"masters": job.pairs, **options})


def run(manager: moc.CheckpointManager, job: Mixed, steps: range) -> None:
    for step in steps:
        job.train(step)
        manager.step(step)
        manager.wait()


def casts_hold(job: Mixed) -> bool:
    return all(torch.equal(param, master.to(param.dtype)) for param, master in job.pairs)


def test_they_hold_what_the_weights_cannot() -> None:
    """Else nothing here would be shown: the weights alone do not give the masters."""
    job = mixed()
    for step in range(1, 4):
        job.train(step)
    assert casts_hold(job)
    assert not all(torch.equal(param.float(), master) for param, master in job.pairs)


@pytest.mark.parametrize("where", ["memory", "storage"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_training_goes_on_as_if_nothing_had_happened(
    managers: Managers, stacked: bool, where: str
) -> None:
    job = mixed(stacked=stacked)
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 4))
    again = mixed(1, stacked=stacked)  # has never stepped
    held = [(id(param), id(master)) for param, master in again.pairs]
    memory = managers.memory_dir / ("" if where == "memory" else "another")
    report = manager_of(managers, again, memory_dir=memory).restore()
    assert report is not None
    assert (report.step, bool(report.sources["storage"])) == (3, where == "storage")
    assert [(id(param), id(master)) for param, master in again.pairs] == held
    assert_equal(again.state(), job.state())
    assert casts_hold(again)
    losses = [[one.train(step) for step in range(4, 8)] for one in (job, again)]
    assert losses[0] == losses[1]
    assert_equal(again.state(), job.state())


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a_master_is_cut_by_expert(managers: Managers, stacked: bool) -> None:
    job = mixed(stacked=stacked)
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 2))
    pieces = stored(managers.run, 1)
    masters = [name for name in pieces if "|master|" in name]
    assert len(masters) == 4 + 2 + (EXPERTS if stacked else 2 * EXPERTS)
    name = "1.experts.w1" if stacked else "1.experts.2.weight"
    state = job.state()
    assert whole(pieces, name).dtype == torch.bfloat16
    for part in ("master", "exp_avg", "exp_avg_sq"):
        assert_equal({part: whole(pieces, name, part)}, {part: state[f"{name}/{part}"]})


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a_partial_save_holds_an_expert_with_its_master(managers: Managers, stacked: bool) -> None:
    """Weight, master and moments of each expert are of one step, the report's."""
    job = mixed(stacked=stacked)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    states = {}
    with manager_of(managers, job, policy=policy) as manager:
        for step in range(1, 5):
            run(manager, job, range(step, step + 1))
            states[step] = job.state()
    partial = stored(managers.run, 3)
    again = mixed(1, stacked=stacked)
    other = managers.memory_dir / "another"
    report = manager_of(managers, again, policy=policy, memory_dir=other).restore(3)
    assert report is not None
    now, ages = again.state(), set()
    assert casts_hold(again)
    for expert in range(EXPERTS):
        of_step = [
            step
            for step in (1, 2, 3)
            if all(
                torch.equal(rows(now, expert, part), rows(states[step], expert, part))
                for part in ("", "/master")
            )
        ]
        assert len(of_step) == 1, expert
        ages.add(of_step[0])
    assert len(ages) > 1
    assert len([n for n in partial if "|master|" in n]) == len(
        [n for n in partial if "|weight|" in n]
    )
    dense_names = [n for n in now if ".experts." not in n]
    assert_equal({n: now[n] for n in dense_names}, {n: states[3][n] for n in dense_names})


def rows(state: dict[str, Tensor], expert: int, part: str) -> Tensor:
    """One expert's values of a part, stacked or not."""
    if "1.experts.w1" in state:
        return state[f"1.experts.w1{part}"][expert]
    return state[f"1.experts.{expert}.weight{part}"]


def test_experts_that_saw_no_token_have_a_master_and_no_moments(managers: Managers) -> None:
    job = mixed(stacked=False)
    job.model[1].router.allowed = [1, 3]
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 3))
        job.model[1].router.allowed = [0, 1]  # state appears after the first save
        run(manager, job, range(3, 4))
    again = mixed(1, stacked=False)
    again.model[1].router.allowed = [0, 1]
    again.train(9)  # has state where the checkpoint has none
    manager_of(managers, again).restore()
    assert "1.experts.2.weight/exp_avg" not in job.state()
    assert_equal(again.state(), job.state())
    assert again.train(4) == job.train(4)


def test_masters_by_name_and_parameters_without_one(managers: Managers) -> None:
    """Megatron keeps float32 parameters in the same optimizer, by themselves."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
        model = dense(seed)
        model[0].to(torch.bfloat16)
        masters = {f"0.{n}": p.detach().float() for n, p in model[0].named_parameters()}
        return model, torch.optim.AdamW([*masters.values(), *model[2].parameters()]), masters

    def step(model: nn.Module, optimizer: Any, masters: dict[str, Tensor]) -> None:
        for name, param in model.named_parameters():
            holder = masters.get(name, param)
            holder.grad = torch.full_like(holder, 0.3)
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                model.get_parameter(name).copy_(master)

    job, again = make(0), make(1)
    with managers(job[0], job[1], masters=job[2]) as manager:
        told = manager.describe()
        step(*job)
        manager.step(1)
    assert "parameters whose master copy is saved (2): 0.weight; 0.bias" in told
    managers(again[0], again[1], masters=again[2]).restore()
    for _ in range(2):
        assert_equal(again[2], job[2])
        assert_equal(again[0].state_dict(), job[0].state_dict())
        step(*job)
        step(*again)


def test_weights_alone_give_the_masters_too(managers: Managers) -> None:
    """Nothing else is read; a master of before would undo the restore with the next step."""
    job = mixed()
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 3))
    again = mixed(1)
    again.train(9)
    moments = {k: v for k, v in again.state().items() if "/exp" in k or "/step" in k}
    report = manager_of(managers, again).restore(weights_only=True)
    assert report is not None
    assert report.optimizer_entries == 0
    assert_equal(again.model.state_dict(), job.model.state_dict())
    assert all(torch.equal(param.float(), master) for param, master in again.pairs)
    assert_equal({k: again.state()[k] for k in moments}, moments)


def test_weights_are_read_by_a_model_without_masters(managers: Managers) -> None:
    job = mixed()
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 3))
    again = moe(1).to(torch.bfloat16)
    managers(again).restore(weights_only=True)
    assert_equal(again.state_dict(), job.model.state_dict())


def test_a_checkpoint_with_masters_for_a_manager_without(managers: Managers) -> None:
    job = mixed()
    with manager_of(managers, job) as manager:
        run(manager, job, range(1, 3))
    again = moe(1).to(torch.bfloat16)
    before = {k: v.clone() for k, v in again.state_dict().items()}
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint .*w1 \(master\)"):
        managers(again, adamw(again)).restore()
    assert_equal(again.state_dict(), before)


def test_a_checkpoint_without_masters_for_a_manager_with(managers: Managers) -> None:
    """Refused; not strict, the masters become the weights, and no expert is left without one."""
    plain = moe().to(torch.bfloat16)
    optimizer = adamw(plain)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    with managers(plain, optimizer, policy=policy) as manager:
        for step in (1, 2):
            for param in plain.parameters():
                param.grad = torch.full_like(param, 0.1 * step)
            optimizer.step()
            manager.step(step)
            manager.wait()
    again = mixed(1)
    with pytest.raises(MismatchError, match=r"missing in the checkpoint .*w1 \(master\)"):
        manager_of(managers, again, policy=policy).restore()
    manager = manager_of(managers, again, policy=policy)
    report = manager.restore(strict=False)
    assert report is not None
    assert len(report.missing) == len(again.pairs)
    now, then = again.model.state_dict(), plain.state_dict()
    assert_equal(
        {n: v for n, v in now.items() if "experts" not in n},
        {n: v for n, v in then.items() if "experts" not in n},
    )
    assert all(torch.equal(param.float(), master) for param, master in again.pairs)
    with manager:
        run(manager, again, range(3, 5))
    other = mixed(2)
    assert manager_of(managers, other, policy=policy).restore() is not None
    assert casts_hold(other)


def test_the_copy_overlaps_and_the_inner_step_waits_for_it(managers: Managers) -> None:
    """Masters and weights are copied while training goes on; what is sealed is of one step."""
    torch.manual_seed(0)
    job = Mixed(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))

    def train(step: int) -> None:
        for param, _ in job.pairs:
            param.grad = torch.full_like(param, 0.1 * step)
        job.step()

    states = {}
    manager = manager_of(managers, job)
    with manager:
        for step in range(1, 6):
            train(step)
            manager.step(step)
            states[step] = job.state()
            if step == 3:
                live = {(r.fqn, r.part) for r in manager._session.live.regions() if r.overlapped}
                assert {("0.weight", "weight"), ("0.weight", "master")} <= live
    assert manager.stats()["torn"] == 0
    seals = sealed(managers.memory_dir)
    assert seals
    for step in manager.all_steps():
        pieces = stored(managers.run, step)
        for name in ("0.weight", "2.bias"):
            assert_equal(
                {"m": whole(pieces, name, "master"), "w": whole(pieces, name)},
                {"m": states[step][f"{name}/master"], "w": states[step][name]},
            )


class OwnMaster(torch.optim.SGD):
    """An optimizer that keeps tensors under names that parts have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                for key in ("master", "weight", "buffer", "registered"):
                    state[key] = state.get(key, param.float() * len(key)) + 0.1
                param.copy_(state["master"])


def test_state_that_an_optimizer_calls_master_is_its_own(managers: Managers) -> None:
    def state(model: nn.Module, optimizer: OwnMaster) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, param in model.named_parameters()
            for key, value in (*optimizer.state[param].items(), ("param", param.detach()))
        }

    made = []
    for seed in (0, 1):
        model = dense(seed).to(torch.bfloat16)
        made.append((model, OwnMaster(model.parameters(), lr=0.1)))
    (model, optimizer), (again, fresh) = made
    with managers(model, optimizer) as manager:
        optimizer.step()
        manager.step(1)
    managers(again, fresh).restore()
    assert len(state(again, fresh)) == 4 * 5
    assert_equal(state(again, fresh), state(model, optimizer))


def refusals() -> dict[str, tuple[Callable[[Mixed], Any], str]]:
    first = "0.weight"
    return {
        "none": (lambda _: None, r"AdamW holds a parameter \(number 0.*masters="),
        "one missing": (
            lambda j: j.pairs[:-1],
            r"AdamW holds a parameter \(number 6.*holds 2\.bias, of.*masters=",
        ),
        "shape": (
            lambda _: {first: torch.zeros(DIM * DIM)},
            r"master of 0\.weight has shape \(36,\), the parameter \(6, 6\)",
        ),
        "name": (lambda j: {"0.wight": j.pairs[0][1]}, r"'0\.wight' is no parameter of the model"),
        "stranger": (
            lambda j: [(nn.Parameter(torch.zeros(1)), j.pairs[0][1])],
            "a Parameter is no",
        ),
        "itself": (lambda j: {first: j.pairs[0][0]}, r"is 0\.weight of the model itself"),
        "twice": (lambda j: [j.pairs[0], j.pairs[0]], r"0\.weight has two masters"),
        "shared": (
            lambda j: {"0.bias": j.pairs[1][1], "2.bias": j.pairs[1][1]},
            r"0\.bias and 2\.bias have the same tensor",
        ),
        "kind": (lambda _: {first: torch.zeros(DIM, DIM).int()}, r"is torch\.int32, the parameter"),
        "no tensor": (lambda _: {first: 3}, r"int of 0\.weight is no plain tensor"),
        "no mapping": (lambda _: 5, r"masters=int is no mapping"),
        "no pairs": (lambda j: [j.pairs[0][1]], r"masters=list is no mapping"),
    }


@pytest.mark.parametrize("case", sorted(refusals()))
def test_what_does_not_fit_is_refused(managers: Managers, case: str) -> None:
    make, told = refusals()[case]
    job = mixed()
    with pytest.raises(ConfigError, match=told):
        manager_of(managers, job, masters=make(job))
    assert not managers.run.exists()


def test_a_parameter_that_the_optimizer_holds_itself_has_no_master(managers: Managers) -> None:
    job = mixed()
    with pytest.raises(ConfigError, match=r"an optimizer holds 0\.weight itself"):
        managers(job.model, adamw(job.model), masters=job.pairs)
    assert not managers.run.exists()


@pytest.mark.dist
def test_from_four_ranks_onto_two(managers: Managers) -> None:
    """Each rank has one expert of four, then two; a master moves with its expert."""

    def make(seed: int) -> tuple[Mixed, moc.Layout]:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        layout = moc.Layout.from_groups(ep=dist.group.WORLD, edp=alone[dist.get_rank()])
        model = dense(seed)
        model.experts = nn.Module()
        values = torch.randn(EXPERTS, DIM, DIM)
        model.experts.w1 = nn.Parameter(values[local()].clone())
        return Mixed(model), layout

    def local() -> slice:
        count = EXPERTS // dist.get_world_size()
        return slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)

    def step(job: Mixed, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for name, param in job.model.named_parameters():
            shape = (EXPERTS, DIM, DIM) if name == "experts.w1" else param.shape
            grad = torch.randn(shape, generator=generator).bfloat16()
            param.grad = grad[local()] if name == "experts.w1" else grad
        job.step()

    def save() -> dict[str, Tensor]:
        job, layout = make(0)
        with manager_of(managers, job, layout=layout) as manager:
            for number in (1, 2):
                step(job, number)
                manager.step(number)
        for number in (3, 4):
            step(job, number)
        return job.state()

    def load() -> dict[str, Tensor]:
        job, layout = make(1)
        manager = manager_of(managers, job, layout=layout)
        assert manager.restore() is not None
        managers.vanish(manager)
        for number in (3, 4):
            step(job, number)
        return job.state()

    told = run_ranks(save, 4)
    for rank, found in enumerate(run_ranks(load, 2)):
        want = {
            name: torch.cat([told[2 * rank][name], told[2 * rank + 1][name]])
            if name.startswith("experts.") and value.dim()
            else value
            for name, value in told[0].items()
        }
        assert_equal(found, want)
