"""Counting routed tokens: forward hooks on routers, summed on the device, never waited for.

A token is counted once: in training mode only, and not when activation checkpointing runs a
forward a second time inside backward. What a router returns is read, not computed again. Counts
are local; summing them over ranks, with one rank per tensor-parallel group, is the caller's part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moc.errors import ConfigError

__all__ = ["TokenCounter"]

_ROUTERS = ("router", "gate")
"""What a router is called below its MoE module, the better name first."""

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Path segments that wrappers add to the names of modules."""

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16)


class TokenCounter:
    """Counts the tokens that each router sends to each expert.

    The router of a layer is the module called ``router`` or ``gate`` that lies nearest below the
    layer's module, else beside it. Its output tells the experts of every token: an entry
    ``indices``, or the last integer tensor of a tuple such as ``(logits, weights, indices)``, or a
    boolean ``[tokens, experts]`` map. Where a router returns logits only, as in DeepSeek of
    transformers, the indices are read from the arguments of the layer's ``experts`` module.
    Indices outside the experts stand for dropped tokens and are not counted.

    Under ``torch.compile`` each hook breaks the graph: ``fullgraph=True`` does not go with it, and
    hooks that come after the first compiled call may not be seen.

    Args:
        model: the model, wrapped or not.
        layer_names: MoE layers in order, as in `moc.state.experts.ExpertMap`.
        experts_per_layer: number of experts of each.
        router: where routers are, if not there: a regular expression for whole module names, or
            the name of the router by layer name (layers that are left out are searched for).

    Raises:
        ConfigError: ``router`` names a layer or module that is not there, or matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_names: Sequence[str],
        experts_per_layer: Sequence[int],
        router: Mapping[str, str] | str | None = None,
    ) -> None:
        if len(layer_names) != len(experts_per_layer):
            raise ConfigError(
                f"{len(layer_names)} MoE layers and {len(experts_per_layer)} numbers of experts"
            )
        modules = _canonical_modules(model)
        found = _find_routers(modules, layer_names, router)
        self.routers = tuple(found.values())
        """Names of the routers that were found."""
        self._layers: list[_Layer] = []
        self._handles: list[RemovableHandle] = []
        self._width = max(experts_per_layer, default=0)
        # one column more than experts: there go the indices that stand for no expert
        self._total = torch.zeros(
            (len(layer_names), self._width + 1),
            dtype=torch.int64,
            device=_device([modules[path] for path in found.values()] or [model]),
        )
        for row, (name, experts) in enumerate(zip(layer_names, experts_per_layer, strict=True)):
            layer = _Layer(name, row, experts)
            self._layers.append(layer)
            if name in found:
                layer.output_tells = True
                hook = torch.compiler.disable(self._after_router(layer))
                self._handles.append(modules[found[name]].register_forward_hook(hook))
            bank = modules.get(_join(name, "experts"))
            if bank is not None and not isinstance(bank, nn.ModuleList | nn.ModuleDict):
                layer.inputs_tell = True
                pre = torch.compiler.disable(self._before_experts(layer))
                self._handles.append(bank.register_forward_pre_hook(pre, with_kwargs=True))

    @property
    def missing(self) -> tuple[str, ...]:
        """Layers that are not counted: no router was found, or nothing tells the indices.

        The second is known only after the first training forward.
        """
        return tuple(x.name for x in self._layers if not (x.output_tells or x.inputs_tell))

    def counts(self) -> torch.Tensor:
        """Cumulative counts, a copy: int64 ``[layers, most experts of a layer]``."""
        return self._total[:, : self._width].clone()

    def load(self, total: torch.Tensor) -> None:
        """Go on from these counts.

        Raises:
            ConfigError: they have another shape.
        """
        if tuple(total.shape) != (len(self._layers), self._width):
            raise ConfigError(
                f"token counts of shape {tuple(total.shape)} for {len(self._layers)} MoE layers"
                f" with up to {self._width} experts"
            )
        self._total[:, : self._width].copy_(total)

    def close(self) -> None:
        """Remove the hooks; the counts stay."""
        while self._handles:
            self._handles.pop().remove()

    def _after_router(self, layer: _Layer) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            if layer.output_tells and module.training and not _in_backward():
                told = _read_output(output, layer.experts, _innermost(module))
                if told is None:
                    layer.output_tells = False
                else:
                    self._add(layer, *told)

        return hook

    def _before_experts(self, layer: _Layer) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # the router ran before: where it tells the indices, it has counted them
            if layer.output_tells or not layer.inputs_tell:
                return
            if module.training and not _in_backward():
                tensors = [t for t in _tensors((*args, *kwargs.values())) if _is_indices(t)]
                if tensors:
                    self._add(layer, tensors[-1], is_counts=False)
                else:
                    layer.inputs_tell = False

        return hook

    @torch.no_grad()
    def _add(self, layer: _Layer, told: torch.Tensor, is_counts: bool) -> None:
        told = told.detach()
        if hasattr(told, "to_local"):  # DTensor
            told = told.to_local()
        if told.device != self._total.device:
            if self._total.device.type == "cpu":  # the model has moved since
                self._total = self._total.to(told.device)
            told = told.to(self._total.device, non_blocking=True)
        row = self._total[layer.row]
        if is_counts:
            row[: layer.experts].add_(told)
            return
        flat = told.reshape(-1).to(torch.int64)
        flat = flat.masked_fill((flat < 0) | (flat >= layer.experts), self._width)
        row.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would wait for the device


@dataclass(slots=True)
class _Layer:
    """A MoE layer and what is known to tell its indices."""

    name: str
    row: int
    experts: int
    output_tells: bool = False
    inputs_tell: bool = False


def _in_backward() -> bool:
    # -1 outside of backward; both kinds of activation checkpointing recompute inside of it
    return torch._C._current_graph_task_id() != -1


def _read_output(
    output: object, experts: int, router: nn.Module
) -> tuple[torch.Tensor, bool] | None:
    """The indices of a router's output, or its counts; and whether they are counts."""
    named = output.get("indices") if isinstance(output, Mapping) else None
    if named is None:
        named = getattr(output, "indices", None)  # a method in a tensor, a field elsewhere
    if isinstance(named, torch.Tensor):
        return named, False
    tensors = list(_tensors(output))
    whole = [t for t in tensors if t.dtype in _INDEX_DTYPES]
    if type(router).__name__ == "TopKGate":  # DeepSpeed's: the last one is tokens per expert
        return (whole[-1], True) if whole and whole[-1].shape == (experts,) else None
    if whole:
        return ([t for t in whole if t.dim() > 1] or whole)[-1], False
    maps = [t for t in tensors if t.dtype == torch.bool and t.shape[1:] == (experts,)]
    return (maps[-1].sum(0), True) if maps else None


def _is_indices(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _INDEX_DTYPES and tensor.dim() > 1


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (v for v in value.values() if isinstance(v, torch.Tensor))
    elif isinstance(value, tuple | list):
        yield from (v for v in value if isinstance(v, torch.Tensor))


def _canonical_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names in the unwrapped model; the outermost where wrappers share one."""
    modules: dict[str, nn.Module] = {}
    for raw, module in model.named_modules(remove_duplicate=False):
        name = ".".join(part for part in raw.split(".") if part not in _WRAPPERS)
        modules.setdefault(name, module)
    for name, module in list(modules.items()):  # DistributedDataParallel and engines
        if name.startswith("module."):
            modules.setdefault(name.removeprefix("module."), module)
    return modules


def _innermost(module: nn.Module) -> nn.Module:
    for name in _WRAPPERS:
        inner = module._modules.get(name)
        if inner is not None:
            return _innermost(inner)
    return module


def _find_routers(
    modules: Mapping[str, nn.Module],
    layers: Sequence[str],
    router: Mapping[str, str] | str | None,
) -> dict[str, str]:
    """Name of the router by layer name, for the layers where there is one."""
    found: dict[str, str] = {}
    pattern = None
    if isinstance(router, str):
        try:
            pattern = re.compile(router)
        except re.error as error:
            raise ConfigError(
                f"router {router!r}: {error}; give a regular expression, or names by MoE layer"
            ) from error
    elif router is not None and not isinstance(router, Mapping):
        raise ConfigError(
            f"router={router!r}: give a regular expression, or a dict of names by MoE layer"
        )
    elif router is not None:
        for layer, path in router.items():
            if layer not in layers:
                raise ConfigError(
                    f"router names {layer!r}, which is none of the MoE layers {list(layers)}; name "
                    "these"
                )
            if path not in modules:
                raise ConfigError(
                    f"router of {layer!r}: the model has no module {path!r}; name one as "
                    "model.named_modules() does"
                )
            found[layer] = path
    for layer in layers:
        if layer not in found:
            nearest = _search(modules, layer, layers, pattern)
            if nearest is not None:
                found[layer] = nearest
    if pattern is not None and layers and not found:
        raise ConfigError(
            f"router {router!r} matches no module of MoE layers {list(layers)}; leave it out to "
            "have routers searched"
        )
    return found


def _search(
    modules: Mapping[str, nn.Module],
    layer: str,
    layers: Sequence[str],
    pattern: re.Pattern[str] | None,
) -> str | None:
    """The router of one layer: nearest below its module, else beside it."""

    def nearest(base: str, deepest: int) -> str | None:
        """The accepted module below ``base`` with the fewest steps; then by name, then order."""
        ranked: list[tuple[int, int, int, str]] = []
        for path in modules:
            if not path or (base and not path.startswith(f"{base}.")):
                continue
            steps = path[len(base) :].lstrip(".").split(".")
            if len(steps) > deepest or any(s == "experts" or "shared" in s for s in steps):
                continue
            if pattern.fullmatch(path) if pattern else steps[-1] in _ROUTERS:
                order = 0 if pattern else _ROUTERS.index(steps[-1])
                ranked.append((len(steps), order, len(ranked), path))
        return min(ranked)[-1] if ranked else None

    if layer not in modules:
        return None
    below = nearest(layer, 1 << 10)
    if below is not None or not layer:
        return below
    parent = layer.rpartition(".")[0]
    if any(other != layer and _is_below(other, parent) for other in layers):
        return None  # whose would it be?
    return nearest(parent, 1 << 10 if pattern else 1)


def _is_below(name: str, parent: str) -> bool:
    return not parent or name.startswith(f"{parent}.")


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _device(modules: Sequence[nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                return parameter.device
    return torch.device("cpu")
