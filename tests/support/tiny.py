"""Models of a few hundred numbers, and one process that trains, saves and resumes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import moc
from moc.core.versions import Version
from moc.persist.commit import load_manifest, load_timeline, versions_in
from moc.store.local import LocalStore

DIM = 6
EXPERTS = 4
EACH = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=None)
"""Every step is saved and persisted; nothing is deleted."""


def dense(seed: int = 0) -> nn.Module:
    """A model without experts."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM))


class Router(nn.Module):
    """Sends every token to the experts that it may use, by turns; the weight is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.allowed = list(range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        allowed = torch.tensor(self.allowed)
        indices = allowed[torch.arange(len(x)) % len(allowed)][:, None]
        return logits, logits.softmax(-1).gather(1, indices), indices


class Stacked(nn.Module):
    """Experts as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) * 0.3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return x @ self.w1[expert]


class MoE(nn.Module):
    """A router, experts stacked or one module each, and a buffer."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.router = Router()
        self.experts = (
            Stacked() if stacked else nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))
        )
        self.stacked = stacked
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        _, weights, indices = self.router(x)
        if self.training:
            self.seen += len(x)
        out = torch.zeros_like(x)
        for expert in indices.unique().tolist():  # an expert without tokens gets no gradient
            rows = (indices[:, 0] == expert).nonzero()[:, 0]
            run = self.experts(x[rows], expert) if self.stacked else self.experts[expert](x[rows])
            out = out.index_add(0, rows, run * weights[rows])
        return out


def moe(seed: int = 0, *, stacked: bool = True) -> nn.Module:
    """A dense layer, a MoE layer, and a head."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(DIM, DIM), MoE(stacked), nn.Linear(DIM, DIM))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def bare(names: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module of parameters with these shapes and nothing else."""
    model = nn.Module()
    for name, shape in names.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
    return model


def batch(step: int) -> Tensor:
    """What is learned at a step."""
    return torch.randn(16, DIM, generator=torch.Generator().manual_seed(1000 + step))


def train(model: nn.Module, optimizers: Any, step: int) -> float:
    """One optimizer step; the loss."""
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in several:
        optimizer.zero_grad()
    x = batch(step)
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    for optimizer in several:
        optimizer.step()
    return float(loss.detach())


def state_of(model: nn.Module, optimizers: Any = ()) -> dict[str, Tensor]:
    """Every value by name: parameters, buffers, optimizer state; copies."""
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    names = {id(p): n for n, p in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for optimizer in several:
        for param, entry in optimizer.state.items():
            for key, value in entry.items():
                if value is not None:
                    values[f"{names[id(param)]}/{key}"] = torch.as_tensor(value).clone()
    return values


def stored(run: Path, step: int) -> dict[str, Tensor]:
    """Pieces of a committed step, read with the safetensors library alone, by piece name."""
    store = LocalStore(run)
    manifest = load_manifest(store, version_of(run, step))
    found: dict[str, Tensor] = {}
    for index, file in enumerate(manifest.files):
        names = [r.piece.name for r in (*manifest.dense, *manifest.experts) if r.file == index]
        with safe_open(run / file.key, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in names}
    return found


def version_of(run: Path, step: int) -> Version:
    """The live version of a step."""
    store = LocalStore(run)
    timeline = load_timeline(store)
    return max(v for v in versions_in(store) if v.step == step and timeline.is_live(v))


def whole(pieces: dict[str, Tensor], fqn: str, part: str = "weight") -> Tensor:
    """A logical tensor put together from pieces by the boxes in their names."""
    found = []
    for name, value in pieces.items():
        if name.rsplit("|", 1)[0] == f"{fqn}|{part}":
            offsets, _, _ = name.rsplit("|", 1)[1].partition(":")
            found.append(([int(n) for n in offsets.split(",") if n], value))
    assert found, f"no piece of {fqn} ({part}) among {sorted(pieces)}"
    if found[0][1].dim() == 0:
        return found[0][1]
    shape = [
        max(offset[i] + value.shape[i] for offset, value in found) for i in range(found[0][1].dim())
    ]
    result = torch.empty(shape, dtype=found[0][1].dtype)
    for offsets, value in found:
        slices = tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))
        result[slices] = value
    return result


def sealed(memory_dir: Path) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Sealed buffers by step, with their seals as plain JSON."""
    found = {}
    for path in sorted(memory_dir.glob("moc-*/*.seal")):
        seal = json.loads(path.read_bytes())
        found[seal["version"][0]] = (path.with_suffix(".safetensors"), seal)
    return found


def kinds(events: Iterable[moc.Event], step: int) -> list[str]:
    """Kinds of the events of one step, in order."""
    return [event.kind for event in events if event.step == step]


class Recording(LocalStore):
    """Remembers what is read of data files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        if key.endswith(".safetensors"):
            assert nbytes is not None
            self.ranges.append((key, offset, nbytes))
        return super().get(key, offset, nbytes)


class Managers:
    """Makes managers over one run and one memory directory, and ends them all.

    Attributes:
        run: the run directory.
        memory_dir: directory of the memory tier.
    """

    def __init__(self, run: Path, memory_dir: Path) -> None:
        self.run, self.memory_dir = run, memory_dir
        self._made: list[tuple[moc.CheckpointManager, Any]] = []

    def __call__(
        self, model: nn.Module, optimizer: Any = (), *, policy: moc.Policy = EACH, **options: Any
    ) -> moc.CheckpointManager:
        """A manager; nothing is started yet."""
        options = {"memory_dir": self.memory_dir, **options}
        directory = options.pop("directory", self.run)
        manager = moc.CheckpointManager(
            directory, model=model, optimizer=optimizer, policy=policy, **options
        )
        self._made.append((manager, None))
        return manager

    def vanish(self, manager: moc.CheckpointManager) -> None:
        """End a manager as an exception in the ``with`` block does, and its helper."""
        helper = manager._saver._handover._helper
        manager.__exit__(RuntimeError, RuntimeError("gone"), None)
        if helper is not None:
            helper._process.wait(30)

    def close(self) -> None:
        """End them all without draining; no thread stays, as later tests fork."""
        for manager, _ in self._made:
            self.vanish(manager)
        for thread in threading.enumerate():
            if thread.name.startswith("moc-snapshot"):
                thread.join(30)


def run_steps(
    manager: moc.CheckpointManager,
    model: nn.Module,
    optimizers: Any,
    steps: Sequence[int],
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Train and call `manager.step`; the losses."""
    losses = []
    for step in steps:
        losses.append(train(model, optimizers, step))
        manager.step(step)
        if after is not None:
            after(step)
    return losses
