"""State of every kind: odd dtypes, weights alone, casts, frozen parts, tensors beside the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    DIM,
    EACH,
    Managers,
    Recording,
    adamw,
    dense,
    moe,
    run_steps,
    state_of,
    stored,
    train,
    version_of,
)
from torch import Tensor, nn

import moc
from moc.core.box import Box
from moc.core.piece import Piece
from moc.errors import ConfigError, LayoutError, MismatchError, RestoreError, StateError
from moc.persist.commit import load_manifest
from moc.state.tensors import as_bytes, as_values, dtype_names, over, tensor_bytes
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

LACKING = [
    getattr(torch, name)
    for name in (
        "complex128",
        "complex32",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
]
"""What safetensors has no name for, or its binding no way to open."""

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bytes: every NaN payload, -0.0."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return data.view(dtype).squeeze(-1)


def memory_of(tensor: Tensor) -> bytes:
    """The bytes in row-major order, for dtypes that torch itself cannot copy."""
    return bytes(tensor_bytes(as_bytes(tensor)))


# ---------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", LACKING, ids=str)
@given(shape=st.lists(st.integers(0, 4), max_size=3).map(tuple), turn=st.booleans())
def test_a_dtype_that_the_format_lacks_is_bytes_with_a_name(
    dtype: torch.dtype, shape: tuple[int, ...], turn: bool
) -> None:
    stored_as, logical = dtype_names(dtype, "w")
    assert (stored_as, f"torch.{logical}") == ("U8", str(dtype))
    value = filled(dtype, shape)
    if turn and shape:
        value = value.transpose(0, -1)
    items = as_bytes(value)
    assert items.shape == (*value.shape, dtype.itemsize)
    copied = over(bytearray(tensor_bytes(items)), 0, "U8", items.shape)
    back = as_values(copied, logical)
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert memory_of(back) == memory_of(value)


def test_the_byte_view_shares_memory_and_version_with_the_tensor() -> None:
    value = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex128))
    before = as_bytes(value)._version
    with torch.no_grad():
        value.add_(1)
    assert as_bytes(value)._version == before + 1
    as_bytes(value).zero_()
    assert not value.any()


def test_a_lazily_conjugated_tensor_has_no_bytes() -> None:
    with pytest.raises(StateError, match="resolve_conj"):
        as_bytes(torch.zeros(2, dtype=torch.complex128).conj())


def test_a_quantized_dtype_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"weight of w has dtype torch\.qint8.*complex128"):
        dtype_names(torch.qint8, "weight of w")


def test_pieces_of_old_records_have_no_logical_dtype() -> None:
    piece = Piece("w", "weight", Box((0, 0), (3, 16)), "U8", logical="complex128")
    assert msgspec.json.decode(msgspec.json.encode(piece), type=Piece) == piece
    assert piece.value_box == Box((0,), (3,))
    assert piece.with_box(Box((1, 0), (1, 16))).logical == "complex128"
    old = b'["w","weight",[[0],[4]],"F32",-1,-1,-1]'
    assert msgspec.json.decode(old, type=Piece) == Piece("w", "weight", Box((0,), (4,)), "F32")


class OddTypes(nn.Module):
    """Every dtype that the format lacks, in every shape; one of them is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wave = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128).t())
        self.real = nn.Parameter(torch.randn(5))
        for number, dtype in enumerate(LACKING):
            name = str(dtype).removeprefix("torch.")
            for kind, shape in (
                ("matrix", (6, 4)),
                ("scalar", ()),
                ("empty", (0, 3)),
                ("one", (1,)),
            ):
                value = filled(dtype, shape, 100 * seed + number)
                self.register_buffer(f"{name}_{kind}", value)
            columns = filled(dtype, (6, 4), 7 * seed + number)
            self.register_buffer(f"{name}_turned", columns.t()[::2])

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :5] * (self.wave.abs().sum() + self.real).square().mean()


def train_odd(model: OddTypes, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()


def odd_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    values = {n: memory_of(v) for n, v in (*model.named_parameters(), *model.named_buffers())}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            values[f"{name}/{key}"] = memory_of(value)
    return values


@pytest.mark.parametrize("from_storage", [False, True], ids=["memory", "storage"])
def test_a_model_of_dtypes_that_the_format_lacks(managers: Managers, from_storage: bool) -> None:
    model = OddTypes(1)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        for step in (1, 2):
            train_odd(model, optimizer, step)
            manager.step(step)
            manager.wait()
    assert manager.stats()["torn"] == 0
    pieces = stored(managers.run, 2)
    assert pieces["wave|weight|0,0,0:5,3,16"].dtype == torch.uint8
    assert pieces["wave|exp_avg|0,0,0:5,3,16"].shape == (5, 3, 16)
    assert pieces["complex128_scalar|buffer|0:16"].numpy().tobytes() == memory_of(
        model.complex128_scalar
    )
    again = OddTypes(2)
    fresh = adamw(again)
    place = {"memory_dir": managers.memory_dir / "other"} if from_storage else {}
    report = managers(again, fresh, **place).restore()
    assert report is not None
    assert odd_bytes(again, fresh) == odd_bytes(model, optimizer)
    assert fresh.state[again.wave]["exp_avg"].dtype == torch.complex128
    train_odd(model, optimizer, 3)
    train_odd(again, fresh, 3)
    assert odd_bytes(again, fresh) == odd_bytes(model, optimizer)


def test_a_logical_dtype_is_compared_before_anything_is_touched(managers: Managers) -> None:
    def build(dtype: torch.dtype) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.zeros(3, 4, dtype=torch.uint8).view(dtype))
        return model

    with managers(build(torch.float8_e4m3fnuz)) as manager:
        manager.step(1)
    for dtype in (torch.float8_e5m2fnuz, torch.uint8, torch.float8_e4m3fn):
        model = build(dtype)
        then = model.weight.detach().clone()
        told = r"scale \(buffer\): checkpoint float8_e4m3fnuz \[3, 4\], model \w+ \[3, 4\]"
        with pytest.raises(MismatchError, match=told):
            managers(model).restore()
        assert same_bytes(model.weight.detach(), then)


# ------------------------------------------------------------------------------------ weights only


def spoil(run: Path, step: int) -> int:
    """Overwrite every byte of a step that is no parameter and no buffer; how many pieces."""
    manifest = load_manifest(LocalStore(run), version_of(run, step))
    others = [
        r
        for r in (*manifest.dense, *manifest.experts)
        if r.piece.part not in ("weight", "buffer") and r.piece.nbytes
    ]
    for record in others:
        with (run / manifest.files[record.file].key).open("r+b") as file:
            file.seek(record.offset)
            file.write(b"\xa5" * record.piece.nbytes)
    return len(others)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a19_weights_alone_read_no_other_byte(managers: Managers, stacked: bool) -> None:
    """For fine-tuning and evaluation, with an optimizer of another type or none."""
    model = moe(stacked=stacked)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with managers(model, optimizer, extras={"scheduler": scheduler}) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
    assert spoil(managers.run, 2) > 10
    then = state_of(model)
    files = {path: path.read_bytes() for path in managers.run.rglob("*") if path.is_file()}

    again = moe(1, stacked=stacked)
    tuner = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    train(again, tuner, 7)
    momentum = {k: v for k, v in state_of(again, tuner).items() if "/" in k}
    random_state = torch.get_rng_state()
    store = Recording(managers.run)
    manager = managers(again, tuner, directory=store)
    report = manager.restore(weights_only=True)
    assert report is not None
    assert (report.step, report.weights_only, report.attempt) == (2, True, 0)
    assert "the weights of step 2" in str(report)
    assert report.optimizer_entries == 0
    assert sum(report.sources.values()) == report.sources["storage"]
    assert sum(n for *_, n in store.ranges) == report.sources["storage"]
    assert_equal(state_of(again), then)
    assert_equal({k: v for k, v in state_of(again, tuner).items() if "/" in k}, momentum)
    assert tuner.param_groups[0]["lr"] == 0.5
    assert torch.equal(torch.get_rng_state(), random_state)
    manager.close()
    assert {path: path.read_bytes() for path in managers.run.rglob("*") if path.is_file()} == files


def test_after_weights_alone_the_manager_is_read_only(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    reader_model = dense(1)
    reader = managers(reader_model)
    assert reader.restore(weights_only=True) is None
    assert not managers.run.exists()
    with managers(model, optimizer) as manager:
        for step in (1, 2):
            run_steps(manager, model, optimizer, [step], after=lambda _: manager.wait())
            report = reader.restore(weights_only=True)  # while the other one goes on training
            assert report is not None
            assert report.step == step
            assert_equal(state_of(reader_model), state_of(model))
        assert reader.restore(1, weights_only=True) is not None
    for act in (lambda: reader.step(3), lambda: reader.save(3), reader.restore):
        with pytest.raises(RestoreError, match="only weights were restored"):
            act()
    reader.close()
    with pytest.raises(ConfigError, match="fresh"):
        managers(dense(1), fresh=True).restore(weights_only=True)


def test_weights_alone_into_a_model_with_another_head(managers: Managers) -> None:
    model = dense()
    with managers(model) as manager:
        manager.step(1)
    other = nn.Sequential(*dense(1), nn.Linear(DIM, 2))
    with pytest.raises(MismatchError, match=r"3\.weight"):
        managers(other).restore(weights_only=True)
    report = managers(other).restore(weights_only=True, strict=False)
    assert report is not None
    assert report.missing == ["3.bias (weight)", "3.weight (weight)"]
    assert same_bytes(other[0].weight, model[0].weight)


# ------------------------------------------------------------------------------------------ casts


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a_cast_is_asked_for_and_told(managers: Managers, stacked: bool) -> None:
    """A24: otherwise a different dtype is refused, with every name at once."""
    model = moe(stacked=stacked)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
    then = state_of(model, optimizer)

    again = moe(1, stacked=stacked).bfloat16()
    fresh = adamw(again)
    before = state_of(again)
    with pytest.raises(MismatchError, match=r"F32.*BF16.*cast=True") as caught:
        managers(again, fresh).restore()
    parameters = list(again.parameters())
    assert len(caught.value.differing) == len(parameters)
    assert_equal(state_of(again), before)

    events: list[moc.Event] = []
    policy = dataclasses.replace(EACH, k_snapshot=1, k_persist=1)
    manager = managers(again, fresh, on_event=events.append, policy=policy)
    report = manager.restore(cast=True)
    assert report is not None
    told = [e.text for e in events if e.kind == "warning" and "cast" in e.text]
    count = len(parameters)
    assert told == [f"cast=True: converted {count} tensors of the model: {count} from F32 to BF16"]
    expected = {
        name: value if name.endswith(("seen", "/step")) else value.bfloat16()
        for name, value in then.items()
    }
    assert_equal(state_of(again, fresh), expected)
    batch16 = torch.randn(8, DIM).bfloat16()
    again(batch16).square().mean().backward()
    fresh.step()
    manager.step(3)
    manager.wait()
    manager.close()
    # What follows is of one dtype, every expert: none is inherited from before the cast.
    third = moe(2, stacked=stacked).bfloat16()
    last = adamw(third)
    report = managers(third, last, memory_dir=managers.memory_dir / "another").restore()
    assert report is not None
    assert report.step == 3
    router = ("1.router.gate.weight", "0.weight")
    assert_equal(
        {k: v for k, v in state_of(third).items() if k in router},
        {k: v for k, v in state_of(again).items() if k in router},
    )


@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float16, True),
        (torch.complex128, torch.complex64, True),
        (torch.complex64, torch.complex128, True),
        (torch.float8_e4m3fnuz, torch.float32, True),
        (torch.float32, torch.float8_e5m2fnuz, True),
        (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, True),
        (torch.int64, torch.int32, True),
        (torch.float32, torch.int32, False),
        (torch.complex128, torch.float64, False),
        (torch.int64, torch.bool, False),
    ],
    ids=str,
)
def test_a_cast_keeps_the_kind_of_number(
    managers: Managers, then: torch.dtype, now: torch.dtype, fits: bool
) -> None:
    def build(dtype: torch.dtype, factor: int) -> nn.Module:
        model = nn.Linear(2, 2)
        values = torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, -6.0]]) * factor
        for name, value in (("matrix", values), ("turned", values.t()), ("one", values[0, 0])):
            model.register_buffer(name, value.to(dtype))
        return model

    saved, target = build(then, 1), build(now, 0)
    with managers(saved) as manager:
        manager.step(1)
    before = {name: memory_of(value) for name, value in target.named_buffers()}
    if fits:
        assert managers(target).restore(cast=True) is not None
        for name, value in target.named_buffers():
            assert value.dtype == now
            assert memory_of(value) == memory_of(saved.get_buffer(name).to(now))
    else:
        with pytest.raises(MismatchError) as caught:
            managers(target).restore(cast=True)
        assert len(caught.value.differing) == 3
        assert "cast=True" not in str(caught.value)
        assert {name: memory_of(value) for name, value in target.named_buffers()} == before


def test_a_cast_forgives_no_shape(managers: Managers) -> None:
    with managers(nn.Linear(3, 4)) as manager:
        manager.step(1)
    target = nn.Linear(4, 4).double()
    with pytest.raises(MismatchError, match=r"weight \(weight\).*\[4, 3\].*\[4, 4\]") as caught:
        managers(target).restore(cast=True)
    assert len(caught.value.differing) == 1  # the bias could be cast


# ----------------------------------------------------------------------------------------- frozen


class Adapter(nn.Module):
    """A frozen layer with a trained low-rank part beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int, base_seed: int = 0) -> nn.Module:
    base = dense(base_seed)
    torch.manual_seed(100 + seed)
    return nn.Sequential(Adapter(base[0]), nn.Tanh(), Adapter(base[2]))


BASE = ["0.base.bias", "0.base.weight", "2.base.bias", "2.base.weight"]


@pytest.mark.parametrize("everything_in_groups", [True, False], ids=["all", "adapters"])
def test_a21_frozen_parameters_are_left_out(managers: Managers, everything_in_groups: bool) -> None:
    """A21."""

    def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
        chosen = [p for p in model.parameters() if everything_in_groups or p.requires_grad]
        return torch.optim.AdamW(chosen, lr=0.01)

    model = adapted(1)
    optimizer = optimizer_of(model)
    with managers(model, optimizer, exclude_frozen=True) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
    names = {name.split("|")[0] for name in stored(managers.run, 2)} - {"moc.extras"}
    assert not names & set(BASE)
    head = load_manifest(LocalStore(managers.run), version_of(managers.run, 2)).head
    assert (head.frozen, head.left_out) == (BASE, [])

    loud = adapted(2)
    before = state_of(loud)
    with pytest.raises(MismatchError, match="exclude_frozen=True") as caught:
        managers(loud, optimizer_of(loud)).restore()
    assert caught.value.missing == tuple(f"{name} (weight)" for name in BASE)
    assert all(name in str(caught.value) for name in BASE)
    assert_equal(state_of(loud), before)

    again = adapted(3)
    fresh = optimizer_of(again)
    assert managers(again, fresh, exclude_frozen=True).restore() is not None
    assert_equal(state_of(again, fresh), state_of(model, optimizer))
    assert train(again, fresh, 3) == train(model, optimizer, 3)
    other_base = adapted(3, base_seed=4)
    managers(other_base, exclude_frozen=True).restore(weights_only=True)
    assert same_bytes(other_base[0].base.weight, adapted(3, base_seed=4)[0].base.weight)
    assert not same_bytes(other_base[0].base.weight, model[0].base.weight)


def test_a_full_checkpoint_leaves_frozen_parameters_alone(managers: Managers) -> None:
    model = adapted(1)
    with managers(model) as manager:
        manager.step(1)
    again = adapted(2, base_seed=5)
    then = again[0].base.weight.clone()
    assert managers(again, exclude_frozen=True).restore() is not None
    assert same_bytes(again[0].base.weight, then)
    assert same_bytes(again[0].up.weight, model[0].up.weight)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
@pytest.mark.parametrize("trained", ["none", "some"])
def test_frozen_experts(managers: Managers, stacked: bool, trained: str) -> None:
    """Frozen as a whole they are left out; an expert among trained ones is saved."""

    def build(seed: int) -> nn.Module:
        model = moe(seed, stacked=stacked)
        parameters = list(model[1].experts.parameters())
        for param in parameters[: None if trained == "none" else len(parameters) // 2]:
            param.requires_grad_(False)
        return model

    model = build(0)
    optimizer = adamw(model)
    policy = dataclasses.replace(EACH, k_snapshot=2, k_persist=1)
    with managers(model, optimizer, exclude_frozen=True, policy=policy) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3], after=lambda _: manager.wait())
    saved = [n for n in stored(managers.run, 3) if ".experts." in n and "|weight|" in n]
    assert bool(saved) == (trained == "some")
    again = build(0)
    fresh = adamw(again)
    place = managers.memory_dir / "another"
    report = managers(again, fresh, exclude_frozen=True, memory_dir=place).restore()
    assert report is not None
    if trained == "none":
        assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_parameter_that_is_unfrozen_later_is_not_lost_in_silence(managers: Managers) -> None:
    model = adapted(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = managers(model, optimizer, exclude_frozen=True)
    run_steps(manager, model, optimizer, [1], after=lambda _: manager.wait())
    model[0].base.weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"0\.base\.weight.*trained now"):
        run_steps(manager, model, optimizer, [2])


# ------------------------------------------------------------------------------------- registered


@pytest.mark.parametrize("stable", [True, False])
def test_tensors_outside_the_model(managers: Managers, stable: bool) -> None:
    def beside(manager: moc.CheckpointManager, model: nn.Module, factor: int) -> dict[str, Tensor]:
        own = {f"ema.{n}": p.detach().clone() * factor for n, p in model.named_parameters()}
        own |= {
            "seen": torch.tensor(7 * factor),
            "wave": torch.full((3, 2), complex(factor, -0.0), dtype=torch.complex128).t(),
            "empty": torch.zeros(0, 2),
        }
        for name, tensor in own.items():
            manager.register(name, tensor, stable=stable)
        return own

    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        own = beside(manager, model, 3)
        for step in (1, 2, 3):
            train(model, optimizer, step)
            for name, param in model.named_parameters():
                own[f"ema.{name}"].lerp_(param.detach(), 0.1)
            own["seen"] += 1
            manager.step(step)
            if not stable:
                own["seen"] += 100  # it was copied at once
                own["seen"] -= 100
        manager.wait()
        assert manager.stats()["torn"] == 0
    again = dense(1)
    fresh = adamw(again)
    reader = managers(again, fresh)
    target = beside(reader, again, 0)
    assert reader.restore() is not None
    assert {n: memory_of(t) for n, t in target.items()} == {n: memory_of(t) for n, t in own.items()}
    assert target["seen"].item() == 24
    with pytest.raises(ConfigError, match="before"):
        reader.register("late", torch.zeros(1))
    with pytest.raises(MismatchError, match=r"unexpected.*ema\.0\.bias"):
        managers(dense(2)).restore()


def test_what_cannot_be_registered(managers: Managers) -> None:
    manager = managers(moe())
    manager.register("mine", torch.zeros(2))
    for name in ("mine", "0.weight", "1.seen", "", "moc.extras", 3):
        with pytest.raises(ConfigError, match="name"):
            manager.register(name, torch.zeros(2))
    with pytest.raises(ConfigError, match="scope 'mean'"):
        manager.register("other", torch.zeros(2), scope="mean")
    with pytest.raises(ConfigError, match="no plain tensor"):
        manager.register("other", [1, 2])
    with pytest.raises(ConfigError, match="no plain tensor"):
        manager.register("other", torch.zeros(2, device="meta"))
    for dtype in (torch.bool, torch.float8_e4m3fnuz):
        with pytest.raises(ConfigError, match="summed"):
            manager.register("other", torch.zeros(2, dtype=dtype), scope="sum")


@pytest.mark.parametrize("world", [4, 3, 2, 1, 8])
def test_scopes_of_registered_tensors(managers: Managers, world: int) -> None:
    def tensors(rank: int) -> dict[str, tuple[Tensor, str]]:
        return {
            "same": (torch.arange(3.0), "replicated"),
            "own": (torch.full((2,), rank + 1), "per_rank"),
            "tokens": (torch.full((2, 2), 10**rank), "sum"),
            "wave": (torch.full((2,), 1j * rank, dtype=torch.complex128), "sum"),
        }

    def run(factor: int) -> dict[str, list[complex]]:
        rank = dist.get_rank()
        manager = managers(dense())
        held = {}
        for name, (tensor, scope) in tensors(rank).items():
            held[name] = tensor * factor
            manager.register(name, held[name], scope=scope)
        report = manager.restore()
        if factor:
            manager.step(1)
            manager.wait()
        assert (report is None) == bool(factor)
        managers.vanish(manager)
        return {name: tensor.flatten().tolist() for name, tensor in held.items()}

    run_ranks(run, 4, 1)
    found = run_ranks(run, world, 0)
    for rank, held in enumerate(found):
        assert held["same"] == [0, 1, 2]
        assert held["own"] == [rank % 4 + 1] * 2
        assert held["tokens"] == [0 if rank else 1111] * 4
        assert held["wave"] == [0 if rank else 6j] * 2


def test_a_registered_tensor_that_differs_is_no_replica(managers: Managers) -> None:
    def run() -> str:
        manager = managers(dense())
        manager.register("drift", torch.tensor(dist.get_rank()))
        with pytest.raises(LayoutError) as caught:
            manager.step(1)
        managers.vanish(manager)
        return str(caught.value)

    for told in run_ranks(run, 2):
        assert "drift differs between ranks 0 and 1" in told
        assert "per_rank" in told


def test_optimizer_state_called_sum_is_no_registered_sum(managers: Managers) -> None:
    model = dense()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with managers(model, optimizer) as manager:
        manager.register("0.weight.sum", torch.ones(1), scope="sum")
        run_steps(manager, model, optimizer, [1, 2])
    again = dense(1)
    fresh = torch.optim.Adagrad(again.parameters(), lr=0.1)
    reader = managers(again, fresh)
    reader.register("0.weight.sum", torch.zeros(1), scope="sum")
    assert reader.restore() is not None
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


# ------------------------------------------------------------------------------------ large extras


class Replay:
    """Keeps large values, nested, of types that must come back."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = 20_000 if seed else 1
        self.state: dict[str, object] = {
            "buffer": torch.randn(rows, 3, generator=generator).t(),
            "pair": (torch.full((rows,), 1j * seed, dtype=torch.complex128).conj(), seed),
            "array": np.arange(rows, dtype=">i4").reshape(-1, 1),
            "small": [torch.tensor([float("nan"), -0.0]), b"x"],
        }

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


@pytest.mark.parametrize("limit", [64 << 20, 100_000], ids=["whole", "cut"])
def test_large_tensors_in_extras_are_pieces(
    managers: Managers, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("moc.engine.structure.MAX_PIECE_BYTES", limit)
    monkeypatch.setattr("moc.state.extras.MAX_PIECE_BYTES", limit)
    replay = Replay(1)
    with managers(dense(), extras={"replay": replay}) as manager:
        manager.step(1)
        replay.state["buffer"].add_(1)  # what was saved is what was there
        manager.wait()
        replay.state["buffer"].sub_(1)
        # More of them than the header was made for: the rest stays in the small piece.
        many = {f"n{i}": torch.full((20_000,), i) for i in range(60)}
        replay.state |= many
        manager.step(2)
        manager.wait()
    first = {n.split("|")[0]: v for n, v in stored(managers.run, 1).items() if "moc.extras" in n}
    assert sorted(first) == ["moc.extras", "moc.extras.0", "moc.extras.1", "moc.extras.2"]
    assert first["moc.extras"].numel() < 64 << 10
    if limit > 1 << 20:
        assert first["moc.extras.0"].numpy().tobytes() == bytes(
            tensor_bytes(Replay(1).state["buffer"])
        )
    for step, then in ((2, replay.state), (1, Replay(1).state)):
        again = Replay(0)
        reader = managers(dense(1), extras={"replay": again})
        assert reader.restore(step) is not None
        managers.vanish(reader)
        assert again.state.keys() == then.keys()
        for name in ("buffer", *(many if step == 2 else ())):
            assert same_bytes(again.state[name], then[name])
        pair, array = again.state["pair"], again.state["array"]
        assert type(pair) is tuple
        assert pair[1] == 1
        assert same_bytes(pair[0], then["pair"][0].resolve_conj())
        assert array.dtype == np.dtype(">i4")
        assert (array == then["array"]).all()
        assert same_bytes(again.state["small"][0], then["small"][0])
