"""Live objects as regions of logical tensors, and regions as pieces.

What a rank holds is described, never copied, here: parameters and buffers of the unwrapped model,
optimizer state by parameter name, everything cut by routed expert where it can be. An expert's
name and rows carry its *global* id, so that the same description serves any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moc.core.box import Box
from moc.core.digest import digest_plan
from moc.core.dtypes import ITEM_BYTES
from moc.core.piece import (
    DENSE,
    MASTER,
    MAX_PIECE_BYTES,
    STEP_OF_EXPERT,
    WEIGHT,
    Piece,
    value_box,
)
from moc.errors import ConfigError, StateError
from moc.state.experts import ExpertMap, ExpertParam
from moc.state.masters import Masters, resolve_masters
from moc.state.tensors import as_bytes, can_add, dtype_names, is_expanded, torch_dtype

__all__ = [
    "BUFFER",
    "REGISTERED",
    "SUMMED",
    "Always",
    "LiveState",
    "OwnedParam",
    "Region",
    "inner_optimizer",
    "pieces_of",
    "unwrap",
]

BUFFER = "buffer"
"""Part name of module buffers."""

REGISTERED = "registered"
"""Part name of tensors that the user registered beside the model."""

SUMMED = "registered_sum"
"""The same, where every rank holds a part of a sum."""

_SCOPES = {"replicated": REGISTERED, "per_rank": REGISTERED, "sum": SUMMED}

_NAMED = (WEIGHT, MASTER, BUFFER, *_SCOPES.values())
"""Parts of other things: optimizer state of such a name is saved as ``name@tensor``."""

EAGER_BELOW_BYTES = 64 << 10
"""Smaller optimizer state is copied at once: overlapping it gains nothing."""

_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_SHOWN = 8
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_SCALARS = {
    bool: ("@bool", torch.bool),
    int: ("@int", torch.int64),
    float: ("@float", torch.float64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A live tensor as a region of a logical one.

    Attributes:
        fqn: name with global expert ids.
        part: see `Piece`.
        box: the region that ``tensor()`` spans.
        dtype: safetensors name.
        live: the live tensor, looked up anew at every call.
        overlapped: whether nothing but an optimizer step writes it.
        layer: MoE layer, -1 for dense.
        expert: the one expert it belongs to; None with ``layer`` >= 0: rows are experts.
        logical: see `Piece`; the box then has a dimension more than the live tensor.
        rank: the rank whose own value this is, -1 where replicas hold the same.
    """

    fqn: str
    part: str
    box: Box
    dtype: str
    live: Callable[[], Tensor]
    overlapped: bool
    layer: int = DENSE
    expert: int | None = None
    logical: str = ""
    rank: int = -1

    @property
    def value_box(self) -> Box:
        """The region in values, of the live tensor's shape."""
        return value_box(self.box, self.logical)

    def tensor(self) -> Tensor:
        """The live tensor, or its bytes; of the box's shape."""
        return as_bytes(self.live()) if self.logical else self.live()

    def pieces(self) -> Iterator[Piece]:
        """The region cut by expert, and into pieces of at most 64 MiB."""
        max_numel = MAX_PIECE_BYTES // ITEM_BYTES[self.dtype]
        for expert, box in self._by_expert():
            for tile in box.tiles(max_numel):
                yield Piece(
                    fqn=self.fqn,
                    part=self.part,
                    box=tile,
                    dtype=self.dtype,
                    layer=self.layer,
                    expert=expert,
                    rank=self.rank,
                    logical=self.logical,
                )

    def view(self, box: Box) -> Tensor:
        """The live values, or bytes, of a box inside the region."""
        tensor = self.tensor().detach()
        return tensor[box.within(self.box)] if box.sizes else tensor

    def values(self, box: Box) -> Tensor:
        """The live values of a box in values inside the region."""
        tensor = self.live().detach()
        return tensor[box.within(self.value_box)] if box.sizes else tensor

    def _by_expert(self) -> Iterator[tuple[int, Box]]:
        if self.layer < 0:
            yield DENSE, self.box
        elif self.expert is not None:
            yield self.expert, self.box
        else:
            first, count = self.box.offsets[0], self.box.sizes[0]
            for expert in range(first, first + count):
                yield (
                    expert,
                    Box((expert, *self.box.offsets[1:]), (1, *self.box.sizes[1:])),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedParam:
    """A parameter whose optimizer state lives on this rank.

    ``param`` is what the optimizer holds: the parameter, or its master.
    """

    fqn: str
    param: Tensor
    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    entry: ExpertParam | None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state: ZeroRedundancyOptimizer's own ``state`` is empty.

    Raises:
        ConfigError: it updates parameters during backward, where no fence can stand.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ConfigError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters during backward; "
            "a snapshot would be torn. Use overlap_with_ddp=False."
        )
    return inner


class LiveState:
    """Everything of one rank that a checkpoint holds, apart from extras."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        experts: ExpertMap | None = None,
        *,
        masters: Masters | None = None,
        exclude_frozen: bool = False,
        rank: int = 0,
    ) -> None:
        """Look at the objects; copy nothing.

        Args:
            model: wrapped or not.
            optimizers: in an order that stays the same.
            experts: which parameters are routed experts.
            masters: see `CheckpointManager`.
            exclude_frozen: leave out parameters that are not trained now. Those of a MoE layer in
                which some experts are trained and others not stay in, as an expert without any
                piece could not be told from a lost one.
            rank: global rank, to which belongs what no other rank has and no expert either.

        Raises:
            ConfigError: an optimizer holds a parameter that the model has not, or ``masters`` does
                not fit.
        """
        self.rank = rank
        self.model = unwrap(model)
        self.optimizers = list(optimizers)
        self.inner = [inner_optimizer(o) for o in optimizers]
        self.experts = experts or ExpertMap()
        self.routers: tuple[str, ...] = ()
        """Names of the routers, which may lie outside their MoE layers."""
        self._check_names()
        self.params = {_canonical(n): p for n, p in self.model.named_parameters()}
        aliases = {_canonical(n): p for n, p in self.model.named_parameters(remove_duplicate=False)}
        self.masters = resolve_masters(masters, self.params, aliases)
        self._names = {id(p): n for n, p in (*self.params.items(), *self.masters.items())}
        self._optimized: set[int] = set()
        for optimizer in self.optimizers:
            for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
                if id(param) not in self._names:
                    raise ConfigError(
                        f"{type(optimizer).__name__} holds a parameter (number {index}, shape "
                        f"{tuple(param.shape)}) that the model has not; was a module replaced "
                        f"after the optimizer was built?{self._untrained_like(param)} Build the "
                        "optimizer from model.parameters(), or give masters={parameter: tensor} "
                        "if it is a master copy"
                    )
                self._optimized.add(id(param))
        for name in self.masters:
            if id(self.params[name]) in self._optimized:
                raise ConfigError(
                    f"masters: an optimizer holds {name} itself, not its master; hand over the "
                    "optimizer that steps the masters"
                )
        self._links = _links(self.model)
        self._registered: dict[str, Region] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self.frozen: list[str] = []
        """Global names of the parameters that are left out."""
        if exclude_frozen:
            self._leave_out_frozen()

    def _untrained_like(self, orphan: Tensor) -> str:
        held = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        alike = [
            name
            for name, param in self.params.items()
            if held.isdisjoint((id(param), id(self.masters.get(name, param))))
            and param.requires_grad
            and param.shape == orphan.shape
        ]
        return f" No optimizer holds {', '.join(alike[:_SHOWN])}, of that shape" if alike else ""

    def replaced(self) -> list[str]:
        """Names of parameters that are no longer the objects they were when this was made."""
        if all(holder.get(key) is value for holder, key, value in self._links):
            return []
        now = {_canonical(n): p for n, p in self.model.named_parameters()}
        names = [n for n in {**self.params, **now} if self.params.get(n) is not now.get(n)]
        if not names:  # modules were wrapped, or tied ones untied and tied again
            self._links = _links(self.model)
        return names

    def _check_names(self) -> None:
        seen: dict[str, str] = {}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        for name, _ in tensors:
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{name!r} cannot be saved under this name: {error.reason}; rename it"
                ) from error
            other = seen.setdefault(_canonical(name), name)
            if other != name:
                raise ConfigError(
                    f"{other!r} and {name!r} are one name without wrappers, {_canonical(name)!r}; "
                    "rename one of them"
                )

    def _leave_out_frozen(self) -> None:
        held: dict[int, set[int]] = {}
        trained: dict[int, set[int]] = {}
        for name, entry in self.experts.entries.items():
            ids = range(entry.first, entry.first + entry.count)
            held.setdefault(entry.layer, set()).update(ids)
            if self.params[name].requires_grad:
                trained.setdefault(entry.layer, set()).update(ids)
        partly = {layer for layer in trained if trained[layer] != held[layer]}
        for name, param in self.params.items():
            owner = self._entry(name)
            if not param.requires_grad and (owner is None or owner.layer not in partly):
                self._frozen[name] = param
        self.frozen = [self.global_name(name) for name in self._frozen]
        self.experts = self.experts.without(held.keys() - trained.keys())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Local shapes of the parameters by canonical name."""
        return {name: tuple(p.shape) for name, p in self.params.items()}

    @property
    def left_out(self) -> list[str]:
        """Buffers that are not saved: non-persistent and outside MoE layers."""
        return [name for name, _, saved in self._buffers() if not saved]

    def fingerprint(self) -> int:
        """Number that two models share only if dense names and global shapes agree."""
        names = [
            (name, shape) for name, shape in sorted(self.shapes.items()) if not self._entry(name)
        ]
        return digest_plan([*names, self.experts.layers, self.experts.experts])

    def stamp(self) -> tuple[int, ...]:
        """Changes when state appears, vanishes or takes another form: an expert's first token, a
        buffer that grows, a model that is cast.
        """
        thawed = sum(param.requires_grad for param in self._frozen.values())
        forms = [_form(param) for param in self.params.values()]
        forms += [_form(value) for m in self.model.modules() for value in m._buffers.values()]
        states = [entry for optimizer in self.inner for entry in optimizer.state.values()]
        forms += [_form(value) for entry in states for value in entry.values()]
        return (thawed, len(self.replaced()), hash(tuple(forms)), len(states))

    def may_grow(self, *, stepped: bool) -> bool:
        """Whether the next optimizer step may bring state that is not there yet.

        So it is before the first step, and while some trained parameters have state and others
        have none: experts that have seen no token.

        Args:
            stepped: whether an optimizer has stepped; one without state then has none for good.
        """
        for optimizer in self.inner:
            held = [p for g in optimizer.param_groups for p in g["params"]]
            trained = [p for p in held if self.params[self._names[id(p)]].requires_grad]
            have = sum(bool(optimizer.state.get(p)) for p in trained)
            if 0 < have < len(trained) or (not have and not stepped):
                return True
        return False

    def register(self, name: str, tensor: Tensor, *, stable: bool, scope: str, rank: int) -> None:
        """Add a tensor that lives outside the model; see `CheckpointManager.register`.

        Raises:
            ConfigError: the name is taken, or the tensor or scope is of no use.
            StateError: its dtype cannot be saved.
        """
        taken = {*self.params, *map(self.global_name, self.params), *self._registered}
        taken |= {buffer for buffer, _, _ in self._buffers()}
        if type(name) is not str or not name or name.startswith("moc."):
            raise ConfigError(
                f"register: {name!r} cannot be a name; give a text that does not begin with 'moc.'"
            )
        if name in taken:
            raise ConfigError(f"register: the name {name!r} is taken; give the tensor another")
        if scope not in _SCOPES:
            raise ConfigError(
                f"register({name!r}): scope {scope!r} is none of {list(_SCOPES)}; give one of them"
            )
        if getattr(tensor, "layout", None) != torch.strided or tensor.is_meta:
            raise ConfigError(
                f"register({name!r}): {type(tensor).__name__} is no plain tensor; give one that is "
                "dense and has values"
            )
        if scope == "sum" and not can_add(tensor.dtype):
            raise ConfigError(
                f"register({name!r}): values of {tensor.dtype} cannot be summed; give another scope"
            )
        region = self._region(name, _SCOPES[scope], None, Always(tensor), stable)
        self._registered[name] = replace(region, rank=-1 if scope == "replicated" else rank)

    def registered(self) -> list[Region]:
        """Tensors outside the model."""
        return list(self._registered.values())

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """Canonical local names of parameters."""
        return [self._names[id(p)] for p in params]

    def global_name(self, fqn: str) -> str:
        """Name with global expert ids."""
        return self.experts.global_fqn(fqn)

    def logical_shape(self, region: Region) -> tuple[int, ...]:
        """Shape of the logical tensor behind a region of the model, in values."""
        sizes = region.value_box.sizes
        if region.layer >= 0 and region.expert is None:
            return (self.experts.experts[region.layer], *sizes[1:])
        return sizes

    def regions(self) -> Iterator[Region]:
        """Everything that is there now.

        Raises:
            StateError: a parameter that was left out as frozen is trained now, or one is another
                object than when the manager was made.
        """
        replaced = self.replaced()
        if replaced:
            raise StateError(
                f"{', '.join(replaced[:_SHOWN])} ({len(replaced)} parameters) were added, removed "
                "or replaced after the manager was made, so that neither it nor the optimizer "
                "holds what the model uses; make both anew after changing modules"
            )
        thawed = [name for name, param in self._frozen.items() if param.requires_grad]
        if thawed:
            raise StateError(
                f"exclude_frozen=True left out {', '.join(thawed[:_SHOWN])} "
                f"({len(thawed)} parameters), which are trained now; restore with a manager that "
                "is made after they are unfrozen"
            )
        yield from self.model_regions()
        yield from self.master_regions()
        yield from self.registered()
        self._check_state_keys()
        for owned in self.owned():
            yield from self._state_regions(owned)

    def model_regions(self) -> Iterator[Region]:
        """Parameters and buffers."""
        for name, param in self.params.items():
            if name in self._frozen:
                continue
            # Its wrapper casts a master back after the step, behind the fence.
            overlapped = id(self.masters.get(name, param)) in self._optimized
            yield self._region(name, WEIGHT, self._entry(name), Always(param), overlapped)
        for name, buffer, saved in self._buffers():
            if saved:
                yield self._region(name, BUFFER, None, buffer, False)

    def master_regions(self) -> Iterator[Region]:
        """Masters, each under the name of its parameter."""
        for name, master in self.masters.items():
            if name not in self._frozen:
                overlapped = id(master) in self._optimized
                yield self._region(name, MASTER, self._entry(name), Always(master), overlapped)

    def unfold(self) -> None:
        """Give memory of their own to expanded tensors: values cannot be put into shared memory.

        A parameter stays the same object; a buffer that is expanded is another afterwards.
        """
        for param in (*self.params.values(), *self.masters.values()):
            if is_expanded(param):
                param.data = param.detach().clone(memory_format=torch.contiguous_format)
        for _, buffer, saved in self._buffers():
            now = buffer()
            if saved and is_expanded(now):
                own = now.clone(memory_format=torch.contiguous_format)
                buffer.module._buffers[buffer.key] = own

    def _check_state_keys(self) -> None:
        """State that belongs to no parameter would be lost without a word."""
        for optimizer in self.inner:
            known = {id(p) for g in optimizer.param_groups for p in g["params"]}
            keys: list[object] = list(optimizer.state)
            for key in keys:
                if id(key) not in known:
                    what = repr(key)[:60] if not isinstance(key, Tensor) else "a tensor"
                    raise StateError(
                        f"{type(optimizer).__name__}.state has an entry for {what}, which is none "
                        "of its parameters; keep such state in param_groups, or give it as extras"
                    )

    def owned(self) -> Iterator[OwnedParam]:
        """Parameters whose optimizer state lives here (ZeRO gives each to one rank)."""
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    name = self._names[id(param)]
                    if name in self._frozen:
                        continue
                    yield OwnedParam(
                        fqn=name,
                        param=param,
                        optimizer=optimizer,
                        group=group,
                        entry=self._entry(name),
                    )

    def adopt(
        self, owned: OwnedParam, parts: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> list[tuple[Region, Callable[[], None]]]:
        """Make the optimizer state of a parameter what a checkpoint has, ready to be filled.

        The state is created from what is in the file, not from what the target has: a fresh
        optimizer has none. A parameter that had none (an expert without tokens) has none again.

        Args:
            owned: the parameter.
            parts: name of its dtype (see `torch_dtype`) and global shape, of each part.

        Returns:
            The regions to fill, each with what to call when it is filled.
        """
        state = owned.optimizer.state
        if not parts:
            state.pop(owned.param, None)
            return []
        entry = state[owned.param]
        for key in set(entry) - {part.partition("@")[0] for part in parts}:
            del entry[key]
        targets = []
        for part, (dtype, shape) in parts.items():
            key, _, kind = part.partition("@")
            rows, tensor = self._state_target(owned, entry.get(key), dtype, shape, key)
            number = kind in ("bool", "int", "float")
            if not number:
                entry[key] = tensor
            region = self._region(owned.fqn, part, rows, Always(tensor), False)
            finish = _Put(entry, key, tensor, kind) if number else _nothing
            targets.append((region, finish))
        return targets

    def _state_target(
        self, owned: OwnedParam, now: Any, dtype: str, shape: tuple[int, ...], key: str
    ) -> tuple[ExpertParam | None, Tensor]:
        entry, kind = owned.entry, torch_dtype(dtype)
        local = shape
        if entry is not None and entry.stacked:
            by_row = bool(shape) and shape[0] == self._count(entry)
            local = (entry.count, *shape[1:]) if by_row else shape
            entry = entry if by_row else None
        if isinstance(now, Tensor) and tuple(now.shape) == local and now.dtype == kind:
            return entry, now
        # A 0-d parameter has a ``step`` of its shape, which is no moment.
        if local == tuple(owned.param.shape) and key != "step":
            return entry, torch.empty_like(owned.param, dtype=kind, requires_grad=False)
        on_device = owned.group.get("capturable") or owned.group.get("fused")
        device = owned.param.device if on_device or key != "step" else "cpu"
        return entry, torch.empty(local, dtype=kind, device=device)

    def rescale(self, owned: OwnedParam, step_of_expert: Mapping[int, float]) -> None:
        """Fit moments of older versions to the step that a stacked tensor's rows share.

        Adam divides its moments by 1 - beta**step. Rows whose moments were made at their own step
        s, but are divided as if at S, would take steps 2 to 3 times too large; multiplying by
        (1 - beta**S) / (1 - beta**s) undoes that.

        Args:
            owned: a stacked parameter.
            step_of_expert: own step by global expert id, of the experts that are stale.
        """
        state, entry = owned.optimizer.state.get(owned.param, {}), owned.entry
        betas = owned.group.get("betas")
        if entry is None or betas is None or "step" not in state:
            return
        shared = float(state["step"])
        for key, beta in zip(_MOMENTS, (betas[0], betas[1], betas[1]), strict=True):
            if key not in state or state[key].shape != owned.param.shape:
                continue
            for expert, own in step_of_expert.items():
                if 0 < own < shared:
                    factor = (1 - float(beta) ** shared) / (1 - float(beta) ** own)
                    with torch.no_grad():
                        state[key][expert - entry.first].mul_(factor)

    def _state_regions(self, owned: OwnedParam) -> Iterator[Region]:
        state = owned.optimizer.state.get(owned.param, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield from self._state_tensor(owned, key, value)
            elif type(value) in _SCALARS:
                suffix, dtype = _SCALARS[type(value)]
                getter = _ScalarOf(owned, key, dtype)
                yield self._region(owned.fqn, key + suffix, _whole(owned.entry), getter, False)
                yield from self._step_of_expert(owned, key, getter)
            elif value is not None:
                raise StateError(
                    f"optimizer state {key!r} of {owned.fqn} is a {type(value).__name__}; "
                    "tensors, bools, ints and floats can be saved"
                )

    def _state_tensor(self, owned: OwnedParam, key: str, value: Tensor) -> Iterator[Region]:
        if "|" in key or "@" in key:
            raise StateError(f"optimizer state {key!r} of {owned.fqn}: '|' and '@' are reserved")
        entry = owned.entry
        tensor = _StateOf(owned, key)
        large = value.numel() * value.element_size() >= EAGER_BELOW_BYTES
        same_shape = value.shape == owned.param.shape
        stacked = entry is not None and entry.stacked
        by_row = stacked and value.dim() > 0 and value.shape[0] == entry.count  # type: ignore[union-attr]
        cut = entry if not stacked or same_shape or by_row else None
        part = f"{key}@tensor" if key in _NAMED else key
        region = self._region(owned.fqn, part, cut, tensor, large)
        if cut is None and entry is not None and value.dim() and entry.count < self._count(entry):
            # Of the experts here all together (Adafactor's factor over them), so of this rank.
            region = replace(region, rank=self.rank)
        yield region
        if value.dim() == 0:
            yield from self._step_of_expert(owned, key, tensor)

    def _step_of_expert(
        self, owned: OwnedParam, key: str, step: Callable[[], Tensor]
    ) -> Iterator[Region]:
        """All rows share one step; each expert's version must remember its own."""
        entry = owned.entry
        if entry is not None and entry.stacked and key == "step":
            count = entry.count
            yield self._region(
                owned.fqn, STEP_OF_EXPERT, entry, lambda: step().reshape(1).expand(count), False
            )

    def _region(
        self,
        name: str,
        part: str,
        entry: ExpertParam | None,
        tensor: Callable[[], Tensor],
        overlapped: bool,
    ) -> Region:
        now = tensor()
        first = entry.first if entry is not None and entry.stacked else 0
        offsets = (first, *(0,) * (now.dim() - 1)) if now.dim() else ()
        dtype, logical = dtype_names(now.dtype, f"{part} of {name}")
        if logical:
            now, offsets = as_bytes(now), (*offsets, 0)
        return Region(
            fqn=self.global_name(name),
            part=part,
            box=Box(offsets, tuple(now.shape)),
            dtype=dtype,
            live=tensor,
            overlapped=overlapped,
            layer=entry.layer if entry is not None else DENSE,
            expert=entry.expert if entry is not None else None,
            logical=logical,
        )

    def _count(self, entry: ExpertParam) -> int:
        return self.experts.experts[entry.layer]

    def _entry(self, name: str) -> ExpertParam | None:
        return self.experts.entries.get(name)

    def _buffers(self) -> Iterator[tuple[str, _BufferOf, bool]]:
        for prefix, module in self.model.named_modules():
            for key, _ in module.named_buffers(recurse=False):
                name = _canonical(f"{prefix}.{key}" if prefix else key)
                persistent = key not in module._non_persistent_buffers_set
                yield name, _BufferOf(module, key), persistent or self._in_moe_layer(name)

    def _in_moe_layer(self, name: str) -> bool:
        modules = (*self.experts.layers, *self.routers)
        return any(not module or name.startswith(f"{module}.") for module in modules)


@dataclass(frozen=True, slots=True)
class Always:
    """A tensor that stays the same object."""

    tensor: Tensor

    def __call__(self) -> Tensor:
        """The tensor."""
        return self.tensor


@dataclass(frozen=True, slots=True)
class _BufferOf:
    """A module's buffer, which user code may rebind at any time."""

    module: nn.Module
    key: str

    def __call__(self) -> Tensor:
        buffer = self.module._buffers[self.key]
        assert buffer is not None
        return buffer


@dataclass(frozen=True, slots=True)
class _StateOf:
    """A tensor in optimizer state; ``load_state_dict`` puts other dicts and tensors there."""

    owned: OwnedParam
    key: str

    def __call__(self) -> Tensor:
        value: Tensor = self.owned.optimizer.state[self.owned.param][self.key]
        return value


@dataclass(frozen=True, slots=True)
class _ScalarOf:
    """A Python number in optimizer state, as a 0-d tensor."""

    owned: OwnedParam
    key: str
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        state = self.owned.optimizer.state[self.owned.param]
        return torch.tensor(state[self.key], dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class _Put:
    """Turn a filled 0-d tensor back into the Python number it was."""

    entry: dict[str, Any]
    key: str
    tensor: Tensor
    kind: str

    def __call__(self) -> None:
        self.entry[self.key] = {"bool": bool, "int": int, "float": float}[self.kind](
            self.tensor.item()
        )


def _form(value: object) -> object:
    """What a region of a value depends on, but for the value."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _links(model: nn.Module) -> list[tuple[Mapping[str, Any], str, object]]:
    """(holder, key, what it holds) of every module and parameter: a quick look for a change."""
    return [
        (holder, key, value)
        for module in model.modules()
        for holder in (module._modules, module._parameters)
        for key, value in holder.items()
    ]


def _nothing() -> None:
    """Nothing is left to do for a tensor that was filled in place."""


def _whole(entry: ExpertParam | None) -> ExpertParam | None:
    """A scalar belongs to an expert only where the expert has a module of its own."""
    return None if entry is None or entry.stacked else entry


def _canonical(name: str) -> str:
    return ".".join(s for s in name.split(".") if s not in _WRAPPER_SEGMENTS)


def pieces_of(regions: Iterable[Region]) -> list[Piece]:
    """All pieces of the regions."""
    return [piece for region in regions for piece in region.pieces()]
