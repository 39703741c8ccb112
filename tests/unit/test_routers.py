"""Token counting: every token once, whatever runs the forward and however often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from moc.errors import ConfigError
from moc.state.routers import TokenCounter

EXPERTS, TOP_K, DIM = 4, 2, 8


class Router(nn.Module):
    """Returns (logits, weights, indices); remembers every call's indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.calls: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        logits = x @ self.weight.t()
        weights, indices = logits.softmax(-1).topk(TOP_K)
        self.calls.append(indices)
        return logits, weights, indices


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, indices = self.router(x)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outs.gather(1, indices[..., None].expand(-1, -1, DIM))
        return x + (weights[..., None] * chosen).sum(1)


class Model(nn.Module):
    def __init__(self, ac: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoE() for _ in range(2))
        self.ac = ac

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.ac is None else checkpoint(layer, x, use_reentrant=self.ac)
        return x


LAYERS = ("layers.0", "layers.1")


def counted(model: Model, calls: int) -> list[list[int]]:
    return [
        torch.bincount(torch.cat(layer.router.calls[:calls]).flatten(), minlength=EXPERTS).tolist()
        for layer in model.layers
    ]


@pytest.mark.parametrize("ac", [None, True, False])
def test_every_token_counts_once(ac: bool | None) -> None:
    model = Model(ac)
    counter = TokenCounter(model, LAYERS, (EXPERTS, EXPERTS))
    assert counter.missing == ()
    accumulated = 3
    expected = torch.zeros(2, EXPERTS, dtype=torch.int64)
    for _ in range(accumulated):
        for layer in model.layers:
            layer.router.calls.clear()
        model(torch.randn(5, DIM, requires_grad=True)).sum().backward()
        assert len(model.layers[0].router.calls) == (1 if ac is None else 2)
        expected += torch.tensor(counted(model, 1))
    assert torch.equal(counter.counts(), expected)
    assert expected.sum().item() == accumulated * 5 * TOP_K * 2


def test_only_training_counts() -> None:
    model = Model()
    counter = TokenCounter(model, LAYERS, (EXPERTS, EXPERTS))
    model.eval()
    model(torch.randn(5, DIM))
    assert counter.counts().sum() == 0
    model.train()
    with torch.no_grad():  # the first forward of reentrant checkpointing is such a one
        model(torch.randn(5, DIM))
    with torch.inference_mode():
        model(torch.randn(5, DIM))
    assert counter.counts().sum() == 2 * 5 * TOP_K * 2


def test_load_goes_on_and_close_ends() -> None:
    model = Model()
    counter = TokenCounter(model, LAYERS, (EXPERTS, EXPERTS))
    counter.load(torch.full((2, EXPERTS), 16_777_217))
    model(torch.randn(5, DIM))
    before = counter.counts()
    assert before.dtype == torch.int64
    assert before.sum().item() == 8 * 16_777_217 + 5 * TOP_K * 2
    counter.close()
    counter.close()
    model(torch.randn(5, DIM))
    assert torch.equal(counter.counts(), before)
    assert not model.layers[0].router._forward_hooks
    with pytest.raises(ConfigError, match=r"\(3, 4\) for 2 MoE layers"):
        counter.load(torch.zeros(3, EXPERTS))


def test_counts_are_a_copy() -> None:
    counter = TokenCounter(Model(), LAYERS, (EXPERTS, EXPERTS))
    counter.counts().add_(1)
    assert counter.counts().sum() == 0


class Says(nn.Module):
    """A router that returns what it is given."""

    def forward(self, output: Any) -> Any:
        return output


class Holder(nn.Module):
    """A MoE module around a router of some name."""

    def __init__(self, router: nn.Module, name: str = "gate") -> None:
        super().__init__()
        self.add_module(name, router)


INDICES = torch.tensor([[0, 2], [2, 1]])
FLOATS = torch.rand(2, 3)


@pytest.mark.parametrize(
    "output",
    [
        INDICES,
        INDICES.to(torch.int32),
        (FLOATS, FLOATS, INDICES),
        [FLOATS, INDICES, FLOATS],
        (FLOATS, INDICES, torch.tensor([1, 1, 2])),  # counts behind the indices
        {"logits": FLOATS, "indices": INDICES},
        {"logits": FLOATS, "chosen": INDICES},
        torch.return_types.topk((FLOATS, INDICES)),
        (FLOATS, torch.tensor([[True, False, True], [False, True, True]])),
        (FLOATS, torch.tensor([[0, 2, -1], [2, 1, 3]])),  # dropped tokens
        (FLOATS, torch.tensor([0, 2, 2, 1])),  # top-1
    ],
)
def test_what_routers_return(output: Any) -> None:
    model = Holder(Says())
    counter = TokenCounter(model, [""], [3])
    model.gate(output)
    assert counter.counts().tolist() == [[1, 1, 2]]


class TopKGate(Says):
    """Called as DeepSpeed's gate, which returns tokens per expert last."""


def test_gate_that_returns_counts() -> None:
    model = Holder(TopKGate())
    counter = TokenCounter(model, [""], [3])
    model.gate((FLOATS, FLOATS, torch.ones(2, 3, 4, dtype=torch.bool), torch.tensor([1, 1, 2])))
    assert counter.counts().tolist() == [[1, 1, 2]]


@given(
    st.lists(st.lists(st.integers(-2, 9), min_size=1), max_size=4),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_layers_of_any_width(calls: list[list[int]], widths: list[int]) -> None:
    model = nn.ModuleList(Holder(Says()) for _ in widths)
    counter = TokenCounter(model, [str(i) for i in range(len(widths))], widths)
    for indices in calls:
        for layer in model:
            layer.gate(torch.tensor(indices))  # type: ignore[operator,union-attr]
    flat = [i for indices in calls for i in indices]
    for layer, width in enumerate(widths):
        row = counter.counts()[layer].tolist()
        assert row[:width] == [flat.count(e) for e in range(width)]
        assert not any(row[width:])


class Bank(nn.Module):
    """Experts in one module, called with (hidden, indices, weights)."""

    def forward(self, hidden: Any, indices: Any, weights: Any = None) -> Any:
        return hidden


def test_indices_from_the_experts_where_the_router_tells_logits() -> None:
    model = Holder(nn.Linear(3, 3))
    model.experts = Bank()
    counter = TokenCounter(model, [""], [3])
    for _ in range(2):
        model.gate(FLOATS)
        model.experts(FLOATS, INDICES, weights=FLOATS)
        model.experts(FLOATS, indices=INDICES)
    assert counter.counts().tolist() == [[4, 4, 8]]
    assert counter.missing == ()


def test_nothing_is_counted_twice_where_both_tell() -> None:
    model = Holder(Says())
    model.experts = Bank()
    counter = TokenCounter(model, [""], [3])
    model.gate(INDICES)
    model.experts(FLOATS, INDICES)
    assert counter.counts().tolist() == [[1, 1, 2]]


def test_layers_without_a_router_are_named() -> None:
    model = nn.ModuleDict(
        {
            "linear": Holder(nn.Linear(3, 3)),
            "odd": Holder(Says(), "chooser"),
            "shared": Holder(Holder(Says()), "shared_experts"),
            "good": Holder(Says(), "router"),
        }
    )
    names = ["linear", "odd", "shared", "good", "elsewhere"]
    counter = TokenCounter(model, names, [3] * 5)
    assert counter.missing == ("odd", "shared", "elsewhere")
    model["linear"].gate(FLOATS)
    model["good"].router(INDICES)
    assert counter.missing == ("linear", "odd", "shared", "elsewhere")
    assert counter.counts().tolist() == [[0, 0, 0]] * 3 + [[1, 1, 2], [0, 0, 0]]


def test_the_nearest_router_counts_and_a_router_beside() -> None:
    inner = Holder(Says(), "router")
    inner.router.gate = nn.Linear(3, 3)
    block = nn.Module()
    block.moe, block.router = nn.Module(), Says()
    block.moe.experts = Bank()
    model = nn.ModuleDict({"a": inner, "b": block})
    counter = TokenCounter(model, ["a", "b.moe"], [3, 3])
    model["a"].router(INDICES)
    model["b"].router(INDICES)
    assert counter.counts().tolist() == [[1, 1, 2], [1, 1, 2]]
    two = nn.ModuleDict({"x": nn.Module(), "y": nn.Module(), "router": Says()})
    assert TokenCounter(two, ["x", "y"], [3, 3]).missing == ("x", "y")


def test_routers_of_other_names() -> None:
    model = nn.ModuleDict({str(i): Holder(Says(), "chooser") for i in range(2)})
    for router in (r"\d\.chooser", {"0": "0.chooser", "1": "1.chooser"}):
        counter = TokenCounter(model, ["0", "1"], [3, 3], router=router)
        assert counter.missing == ()
        model["1"].chooser(INDICES)
        assert counter.counts().tolist() == [[0, 0, 0], [1, 1, 2]]
        counter.close()
    for wrong in ("nothing", "(", {"2": "0.chooser"}, {"0": "0.gate"}):
        with pytest.raises(ConfigError, match="router"):
            TokenCounter(model, ["0", "1"], [3, 3], router=wrong)
    with pytest.raises(ConfigError, match="2 MoE layers and 1"):
        TokenCounter(model, ["0", "1"], [3])


class Wrapped(nn.Module):
    """Named like DistributedDataParallel around a compiled module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module._orig_mod = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.module._orig_mod(x)


def test_wrappers_are_seen_through() -> None:
    model = Model()
    wrapped = Wrapped(model)
    counter = TokenCounter(wrapped, LAYERS, (EXPERTS, EXPERTS))
    wrapped(torch.randn(5, DIM))
    assert counter.counts().tolist() == counted(model, 1)


# torch warns where its compiler resumes behind any graph break with a tensor that needs gradients
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute:UserWarning")
def test_compiled_models_count() -> None:
    model = Holder(nn.Linear(DIM, EXPERTS))
    model.experts = Bank()
    model.forward = lambda x: model.experts(x, model.gate(x).topk(TOP_K).indices)  # type: ignore[method-assign]
    counter = TokenCounter(model, [""], [EXPERTS])
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.randn(5, DIM, requires_grad=True)).sum().backward()
    assert counter.counts().sum().item() == 2 * 5 * TOP_K


def test_a_model_without_memory_is_counted_on_the_cpu() -> None:
    model = Model().to("meta")
    counter = TokenCounter(model, LAYERS, (EXPERTS, EXPERTS))
    assert counter.counts().device.type == "cpu"
