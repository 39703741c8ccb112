"""What users report of other checkpoint libraries, tried here: tensors and names, A20 to A26."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from tests.support.job import assert_equal
from tests.support.tiny import (
    DIM,
    Managers,
    adamw,
    bare,
    dense,
    run_steps,
    state_of,
    stored,
    train,
)
from torch import Tensor, nn

import moc
from moc.cli.main import main
from moc.errors import MismatchError, RestoreError
from moc.testing.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, DIM)
        self.head = nn.Linear(DIM, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) @ self.embed.weight


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "equal"])
def test_a20_tied_parameters_are_one_and_equal_ones_are_two(managers: Managers, tied: bool) -> None:
    model = Tied(tied)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        manager.save(0)
        manager.wait()
        names = stored(managers.run, 0)
        assert len([n for n in names if n.split("|")[1] == "weight"]) == (1 if tied else 2)
        run_steps(manager, model, optimizer, [1])
    again = Tied(tied)
    weight = again.head.weight
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert (again.head.weight is again.embed.weight) is tied
    assert again.head.weight is weight  # filled in place, not replaced
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a21_frozen_parameters_are_kept(managers: Managers) -> None:
    model = dense()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
    again = dense(1)
    again[0].requires_grad_(False)
    fresh = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.01)
    managers(again, fresh).restore()
    assert [p.requires_grad for p in again.parameters()] == [False, False, True, True]
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


class Views(nn.Module):
    """Parameters and buffers that are not contiguous, of several types."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        conv = torch.arange(48.0).reshape(2, 4, 3, 2).contiguous(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t() * factor)
        self.conv = nn.Parameter(conv * factor)
        self.brief = nn.Parameter(torch.arange(10.0)[::2].to(torch.bfloat16) * factor)
        self.register_buffer("ints", (torch.arange(12) * factor).reshape(3, 4).t())
        self.register_buffer("flags", torch.tensor([True, False] * 4)[::2] ^ (factor == 0))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(-0.0 if factor else 1.0))
        self.register_buffer("odd", torch.tensor([float("nan"), 2.0, 3.0])[1 - factor :: 2])

    def forward(self, _: Tensor) -> Tensor:
        return (self.turned**3).sum() + (self.conv**2).sum() + self.brief.float().sum()


def test_a22_tensors_that_are_not_contiguous_and_odd_values(managers: Managers) -> None:
    model = Views(1)
    assert not model.turned.is_contiguous()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        train(model, optimizer, 1)
        manager.step(1)
    again = Views(0)
    again.odd = torch.zeros_like(model.odd)
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    assert not again.turned.is_contiguous()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_a22_the_size_follows_the_number_of_values(managers: Managers, dtype: torch.dtype) -> None:
    def build(factor: int) -> nn.Module:
        big = (torch.arange(400_000) * factor % 251).to(dtype).reshape(1000, 400)
        model = nn.Module()
        model.register_buffer("every_other", big[::2])
        model.register_buffer("turned", big[:200].t())
        model.register_buffer(
            "image", big[:12].reshape(2, 3, 20, 40).to(memory_format=torch.channels_last)
        )
        model.register_buffer("same", big[0, :1].expand(2000))
        return model

    model = build(1)
    with managers(model) as manager:
        manager.save(1)
    numel = sum(b.numel() for b in model.buffers())
    size = sum(path.stat().st_size for path in managers.run.rglob("dense-*.safetensors"))
    assert size <= 1.1 * numel * dtype.itemsize + 16_384  # headers, RNG state
    again = build(0)
    again.same = again.same.clone()  # several values in one place cannot be filled
    assert managers(again).restore() is not None
    assert_equal(state_of(again), state_of(model))
    assert again.image.is_contiguous(memory_format=torch.channels_last)


SIZES = {"scalar": (), "none": (0,), "wide": (0, 3), "one": (1,), "deep": (3, 0, 2)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", ["memory", "storage"])
def test_a23_scalars_and_empty_tensors(managers: Managers, overlap: bool, place: str) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, overlap=overlap)

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = bare(SIZES)
        for name, shape in SIZES.items():
            model.register_buffer(f"{name}_flags", torch.randn(shape) > 0)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    model, optimizer = build(0)
    with managers(model, optimizer, policy=policy) as manager:
        step(model, optimizer)
        manager.step(1)
    again, fresh = build(1)
    where = managers.memory_dir / ("another" * (place == "storage"))
    report = managers(again, fresh, policy=policy, memory_dir=where).restore()
    assert report is not None
    assert report.sources[place] > 0
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    step(model, optimizer)
    step(again, fresh)
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((3, 4), torch.float32, r"\[4, 3\].*\[3, 4\]"),
        ((12,), torch.float32, r"\[4, 3\].*\[12\]"),
        ((4, 1), torch.float32, r"\[4, 3\].*\[4, 1\]"),
        ((4, 3), torch.bfloat16, "F32.*BF16"),
    ],
)
def test_a24_a_wrong_shape_or_dtype_is_never_taken(
    managers: Managers, shape: tuple[int, ...], dtype: torch.dtype, told: str
) -> None:
    with managers(bare({"w": (4, 3), "v": (2,)})) as manager:
        manager.step(1)
    target = bare({"w": shape, "v": shape}, dtype)
    before = state_of(target)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=told) as caught:
            managers(target).restore(strict=strict)
        assert len(caught.value.differing) == 2
        assert_equal(state_of(target), before)


def test_a25_missing_and_unexpected_names_are_both_listed(managers: Managers) -> None:
    """Nothing is half loaded; without strict they are returned."""
    saved = bare({"a": (2,), "b": (3,), "d": (4,)})
    with managers(saved) as manager:
        manager.step(1)
    target = bare({"a": (2,), "b": (3,), "c": (5,)})
    before = state_of(target)
    with pytest.raises(MismatchError) as caught:
        managers(target).restore()
    assert caught.value.missing == ("c (weight)",)
    assert caught.value.unexpected == ("d",)
    assert caught.value.differing == ()
    for word in ("missing", "c (weight)", "unexpected", "d", "nothing was changed"):
        assert word in str(caught.value)
    assert_equal(state_of(target), before)

    manager = managers(target)
    report = manager.restore(strict=False)
    assert report is not None
    assert (report.missing, report.unexpected) == (["c (weight)"], ["d"])
    assert_equal(
        state_of(target),
        {"a": saved.a.detach(), "b": saved.b.detach(), "c": before["c"]},
    )
    with pytest.raises(RestoreError, match=r"another model.*another directory"):
        manager.step(2)  # the run stays what it is
    assert managers(saved).restore() is not None


class Inner(nn.Module):
    """Has a part that is truly called ``module``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_a26_wrappers_are_seen_through(managers: Managers) -> None:
    """Saved from each, loaded into each."""
    wrappers = {
        "plain": lambda m: m,
        "compiled": torch.compile,
        "ddp": nn.parallel.DistributedDataParallel,
        "both": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
    }

    def on_a_rank() -> int:
        assert dist.is_initialized()
        pairs = 0
        for saver, wrap in wrappers.items():
            run = managers.run / saver
            model = Inner(7)
            with managers(wrap(model), directory=run) as manager:
                manager.step(1)
            assert {n.split("|")[0] for n in stored(run, 1) if n.split("|")[1] == "weight"} == {
                "module.weight",
                "module.bias",
            }
            for unwrap in wrappers.values():
                again = Inner(8)
                manager = managers(unwrap(again), directory=run)
                manager.restore()
                managers.vanish(manager)
                assert_equal(state_of(again), state_of(model))
                pairs += 1
        return pairs

    assert run_ranks(on_a_rank, 1) == [16]


HOSTILE = [
    "module", "weight|exp_avg", "a b", "a/b", "a@b", "~up", "größe", "層", "e\u0301", "\U0001f9ea",
    "new\nline", "tab\t", "quote\"", "back\\slash", "nul\x00", "x" * 5000, "_orig_mod2", "[red]",
]  # fmt: skip


def test_a26_names_of_all_kinds(managers: Managers, capsys: pytest.CaptureFixture[str]) -> None:
    """What torch takes as a name comes back, and the command line can show it."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = bare({name: (2,) for name in HOSTILE})
        for name in HOSTILE:
            inner = bare({"w": (3,), name: (1,)})
            model.add_module(f"in {name}", inner)
        return model

    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with managers(model, optimizer) as manager:
        manager.save(1)
    again = build(1)
    fresh = torch.optim.AdamW(again.parameters())
    assert managers(again, fresh, memory_dir=managers.memory_dir / "x").restore() is not None
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    assert main(["verify", str(managers.run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["show", str(managers.run)]) == 0
