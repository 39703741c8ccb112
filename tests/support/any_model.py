"""Random models and optimizers: every kind of tensor, name and optimizer state there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from moc.state.tensors import as_bytes, tensor_bytes
from tests.support.tiny import DIM, MoE

FROZEN = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)
TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("plain", "turned", "every_other", "channels_last", "expanded", "scalar", "empty", "one")
NAMES = ("w", "a b", "\u043c\u0438\u0440/\u2603", "x" * 300, "a|b", "@int", "\\", "0:1")


class ScheduleFree(torch.optim.Optimizer):
    """A sequence beside the parameters, and counters that live in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            weight = group["lr"] * group["k"] ** 0.5
            group["weight_sum"] += weight
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["z"], state["count"], state["scale"] = param.clone(), 0, 1.0
                    state["warm"], state["unused"] = True, None
                state["count"] += 1
                state["scale"] *= 0.9
                state["warm"] = state["count"] < 2
                if state["count"] == 2:
                    state["unused"] = param.grad.clone()  # state that appears late
                state["z"].sub_(param.grad, alpha=group["lr"] * state["scale"])
                param.lerp_(state["z"], weight / group["weight_sum"])


_OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "schedule_free": ScheduleFree,
}
if hasattr(torch.optim, "Muon"):
    _OPTIMIZERS["muon"] = lambda p: torch.optim.Muon(p, lr=0.01)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model is made of.

    Attributes:
        trained: (dtype, layout) of trained parameters.
        frozen: the same of parameters that are not.
        buffers: (dtype, layout, persistent, inside the MoE layer).
        name: put before the names of all of them.
        stacked: experts as one tensor, or a module each; None for none.
        allowed: experts that get tokens.
        tied: the first trained parameter has a second name.
        optimizer: by name.
        several: a second optimizer has every other parameter.
        groups: options differ between two groups.
    """

    trained: tuple[tuple[torch.dtype, str], ...]
    frozen: tuple[tuple[torch.dtype, str], ...]
    buffers: tuple[tuple[torch.dtype, str, bool, bool], ...]
    name: str
    stacked: bool | None
    allowed: tuple[int, ...]
    tied: bool
    optimizer: str
    several: bool
    groups: bool


def shapes() -> st.SearchStrategy[Shape]:
    """Any model, with any optimizer."""
    layout = st.sampled_from(LAYOUTS)
    frozen = st.tuples(st.sampled_from(FROZEN), layout)
    own = st.sampled_from([x for x in LAYOUTS if x != "expanded"])
    trained = st.tuples(st.sampled_from(TRAINED), own)
    buffer = st.tuples(st.sampled_from(FROZEN), layout, st.booleans(), st.booleans())
    return st.builds(
        Shape,
        trained=st.lists(trained, min_size=1, max_size=4).map(tuple),
        frozen=st.lists(frozen, max_size=5).map(tuple),
        buffers=st.lists(buffer, max_size=6).map(tuple),
        name=st.sampled_from(NAMES),
        stacked=st.sampled_from([None, True, False]),
        allowed=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
        tied=st.booleans(),
        optimizer=st.sampled_from(sorted(_OPTIMIZERS)),
        several=st.booleans(),
        groups=st.booleans(),
    )


def tensor_of(dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Any bytes (NaN payloads, -0.0), laid out in any way; booleans are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def filled(*shape: int) -> Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        size = (*shape, dtype.itemsize)
        data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return data.view(dtype).squeeze(-1)

    if layout == "turned":
        return filled(3, 4).t()
    if layout == "every_other":
        return filled(6, 4)[::2]
    if layout == "channels_last":
        return filled(2, 4, 5, 3).permute(0, 3, 1, 2)
    if layout == "expanded":
        return filled(1, 3).expand(4, 3)
    return filled(*{"plain": (3, 4), "scalar": (), "empty": (0, 3), "one": (1,)}[layout])


class AnyModel(nn.Module):
    """A model of a `Shape`; other seeds have other values everywhere."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        seeds = iter(range(1000 * seed, 1000 * seed + 1000))
        self.layer = MoE(shape.stacked) if shape.stacked is not None else nn.Identity()
        if isinstance(self.layer, MoE):
            self.layer.router.allowed = sorted(shape.allowed)
        self.ours: list[nn.Parameter] = []
        for index, (dtype, layout) in enumerate(shape.trained):
            param = nn.Parameter(_like(tensor_of(torch.float32, layout, 0), dtype))
            self.ours.append(param)
            self.register_parameter(f"{shape.name}t{index}", param)
        for index, (dtype, layout) in enumerate(shape.frozen):
            value = tensor_of(dtype, layout, next(seeds))
            self.register_parameter(f"{shape.name}f{index}", nn.Parameter(value, False))
        for index, (dtype, layout, persistent, inside) in enumerate(shape.buffers):
            value = tensor_of(dtype, layout, next(seeds) if persistent or inside else 0)
            place = self.layer if inside else self
            # One outside a MoE layer that is not persistent is not saved: made anew alike.
            if inside and shape.stacked is None and not persistent:
                value = tensor_of(dtype, layout, 0)
            place.register_buffer(f"{shape.name}b{index}", value, persistent=persistent)
        if shape.tied:
            self.tied = nn.Module()
            self.tied.weight = self.ours[0]

    def loss(self, x: Tensor) -> Tensor:
        """Uses every trained parameter."""
        total = self.layer(x).square().mean() if isinstance(self.layer, MoE) else x.mean()
        for number, param in enumerate(self.ours):
            total = total + (param.float() * x[number, 0]).square().sum()
        return total


def _like(value: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(value.size(), value.stride(), dtype=dtype)
    return made.copy_(torch.randn(value.shape))


def optimizers_of(shape: Shape, model: AnyModel) -> list[torch.optim.Optimizer]:
    """Never stepped; Muon takes matrices only, and AdamW the rest."""
    params = [p for p in model.parameters() if p.requires_grad]
    rest: list[nn.Parameter] = []
    if shape.optimizer == "muon":
        rest = [p for p in params if p.dim() != 2 or not p.numel()]
        params = [p for p in params if p.dim() == 2 and p.numel()]
    elif shape.several:
        params, rest = params[::2], params[1::2]
    made = []
    if params:
        groups: Any = params
        if shape.groups and len(params) > 1:
            groups = [{"params": params[1:]}, {"params": params[:1], "lr": 0.02}]
        if shape.optimizer == "adam_tensor_lr":
            groups = params
        made.append(_OPTIMIZERS[shape.optimizer](groups))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=0.01))
    return made


def train_any(model: AnyModel, optimizers: list[torch.optim.Optimizer]) -> None:
    """A step on data that the global generator draws."""
    model.zero_grad()
    model.loss(torch.randn(8, DIM)).backward()
    for optimizer in optimizers:
        optimizer.step()


def everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Every byte, number and option by name."""
    names = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, Any] = {"rng": torch.get_rng_state().numpy().tobytes()}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        found[name] = _plain(value)
    for number, optimizer in enumerate(optimizers):
        for param, entry in optimizer.state.items():
            for key, value in entry.items():
                if value is not None:
                    found[f"{names[id(param)]}/{key}"] = _plain(value)
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found[f"group {number}.{index}.{key}"] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (type(value).__name__, repr(value))
    data = bytes(tensor_bytes(as_bytes(value.detach())))
    return (str(value.dtype), tuple(value.shape), data)
