"""A tiny deterministic MoE training job on forked ranks, and how to look at its state.

The model is the demo's, at a size that makes a step cost milliseconds: four layers, two of them
MoE with 8 experts, expert parallelism over 2 of 4 ranks, optimizer states partitioned as in
ZeRO-1. Experts are stacked, or one module each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it: here once, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import moc
from moc.core.faults import FaultScript
from moc.demo.loader import Loader
from moc.demo.model import ModelConfig, Transformer
from moc.demo.trainer import Ranks, adamw, average_gradients, make_groups
from moc.metrics import JsonlSink, fan_out
from moc.state.experts import build_expert_map
from moc.state.live import LiveState
from moc.state.tensors import tensor_bytes

CONFIG = ModelConfig(
    seq_len=16, dim=16, layers=4, heads=2, experts=8, expert_dim=16, capacity_factor=2.0
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One start of the job.

    Attributes:
        run_dir: where checkpoints go.
        memory: memory directory of each node; ranks are spread over them in blocks.
        text: file with the text to learn.
        steps: last step.
        policy: of the manager; None trains without one.
        stacked: experts as ``[E, ...]`` tensors, else one module each.
        ep: expert-parallel ranks.
        zero: partition optimizer states.
        record: steps whose full live state is returned.
        asked: step to restore, None for the newest.
        faults: what the store of the helper of rank ``faulty_rank`` does.
        each_step: called on every rank before ``manager.step(step)``.
        after_step: called on every rank after it.
        drain: leave the manager cleanly at the end, else vanish without a word.
        disks: run directory of each node, in place of ``run_dir``; then disks are node-local.
        places: node of each rank; in blocks by default.
        node_local: the manager's setting; by default whether there are ``disks``.
        events: where each rank writes its events as JSON lines, None for nowhere.
    """

    run_dir: Path
    memory: tuple[Path, ...]
    text: Path
    steps: int = 12
    policy: moc.Policy | None = None
    stacked: bool = True
    ep: int = 2
    zero: bool = True
    record: tuple[int, ...] = ()
    asked: int | None = None
    faults: FaultScript | None = None
    faulty_rank: int = 0
    each_step: Callable[[int, int], None] | None = None
    after_step: Callable[[int, int, Any], None] | None = None
    drain: bool = True
    disks: tuple[Path, ...] = ()
    places: tuple[int, ...] = ()
    node_local: bool | None = None
    events: Path | None = None

    def but(self, **changes: Any) -> Spec:
        """The same start with changes."""
        return replace(self, **changes)


@dataclass(kw_only=True)
class Outcome:
    """What one rank saw.

    Attributes:
        losses: by step.
        states: live state by recorded step: piece name -> tensor; see `snapshot_of`.
        restored: live state right after `restore`, before any step.
        report: of the restore, None where there was nothing.
        events: all events of this rank.
        stats: of the manager, after the end.
        error: text of what the manager raised, empty for nothing.
    """

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    restored: dict[str, Tensor] = field(default_factory=dict)
    report: moc.RestoreReport | None = None
    events: list[moc.Event] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class ExpertList(nn.ModuleList):
    """The same experts, one module each."""

    def forward(self, seats: Tensor) -> Tensor:
        """[local experts, seats, dim] -> the same shape."""
        return torch.stack([expert(seats[i]) for i, expert in enumerate(self)])


class Job:
    """Model, optimizers, schedulers and data of one rank."""

    def __init__(self, spec: Spec, ranks: Ranks) -> None:
        self.ranks = ranks
        torch.manual_seed(1)
        self.model = Transformer(CONFIG, ranks.ep)
        if not spec.stacked:
            for block in self.model.blocks:
                if getattr(block, "moe", None) is not None:
                    block.moe.experts = _as_modules(block.moe.experts)
        torch.manual_seed(100 + ranks.rank)
        self.dense, self.experts = split_parameters(self.model)
        groups = (ranks.dp, ranks.edp) if spec.zero else (None, None)
        self.optimizers = [
            adamw(self.dense, groups[0], 1e-2),
            adamw(self.experts, groups[1], 1e-2),
        ]
        self.schedulers = [LambdaLR(o, lambda s: 1.0 / (1 + 0.1 * s)) for o in self.optimizers]
        self.loader = Loader(
            spec.text, batch=2, seq_len=16, rank=ranks.rank, world_size=ranks.world_size
        )

    def step(self) -> float:
        """One optimizer step; the mean loss over all ranks."""
        self.model.train()
        self.model.zero_grad()
        loss, balance = self.model(*self.loader.next_batch(torch.device("cpu")))
        (loss + balance).backward()
        world = self.ranks.world_size
        mean = average_gradients(self.dense, self.ranks.dp, world, loss.detach())
        average_gradients(self.experts, self.ranks.edp, world)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return float(mean)

    def snapshot(self) -> dict[str, Tensor]:
        """Every live value of this rank by piece name, with scheduler, loader and RNG."""
        live = LiveState(self.model, self.optimizers)
        ep_rank = dist.get_rank(self.ranks.ep) if self.ranks.ep else 0
        ep_size = dist.get_world_size(self.ranks.ep) if self.ranks.ep else 1
        live.experts = build_expert_map(live.shapes, "auto", ep_rank, ep_size)
        values = {
            piece.name: region.view(piece.box).clone()
            for region in live.regions()
            for piece in region.pieces()
        }
        rank = self.ranks.rank
        values[f"rng@{rank}"] = torch.get_rng_state()
        values[f"position@{rank}"] = torch.tensor(self.loader.samples)
        for i, scheduler in enumerate(self.schedulers):
            values[f"lr{i}@{rank}"] = torch.tensor(scheduler.get_last_lr()[0], dtype=torch.float64)
        return values


def run_job(spec: Spec) -> Outcome:
    """One start of the job on this rank; run it under `run_ranks`."""
    ranks = (
        make_groups(spec.ep, torch.device("cpu"))
        if dist.is_initialized() and dist.get_world_size() > 1
        else Ranks(device=torch.device("cpu"))
    )
    job, outcome = Job(spec, ranks), Outcome()
    if spec.policy is None:
        _train(spec, job, outcome, None, 1)
        return outcome
    manager = make_manager(spec, job, outcome)
    try:
        with manager:
            outcome.report = manager.restore(spec.asked)
            if outcome.report is not None:
                outcome.restored = job.snapshot()
            _train(spec, job, outcome, manager, outcome.report.step + 1 if outcome.report else 1)
            if not spec.drain:
                raise _Vanish
    except _Vanish:
        pass
    outcome.stats = manager.stats()
    return outcome


def make_manager(spec: Spec, job: Job, outcome: Outcome) -> moc.CheckpointManager:
    """The manager as the job's trainer would make it."""
    ranks = job.ranks
    blocks = ranks.rank * len(spec.memory) // ranks.world_size
    node = spec.places[ranks.rank] if spec.places else blocks
    sinks = [JsonlSink(spec.events)] if spec.events else []
    return moc.CheckpointManager(
        spec.disks[node] if spec.disks else spec.run_dir,
        model=job.model,
        optimizer=job.optimizers,
        extras={"scheduler": job.schedulers, "loader": job.loader},
        layout=moc.Layout.from_groups(dp=ranks.dp, ep=ranks.ep, edp=ranks.edp)
        if ranks.dp
        else moc.Layout.single(),
        policy=spec.policy,
        memory_dir=spec.memory[node],
        node_local=bool(spec.disks) if spec.node_local is None else spec.node_local,
        on_event=fan_out(outcome.events.append, *sinks) if sinks else outcome.events.append,
        faults=spec.faults if ranks.rank == spec.faulty_rank else None,
    )


def wait_at(*steps: int) -> Callable[[int, int, Any], None]:
    """For ``after_step``: wait for the commit there, so that timing decides nothing."""

    def hook(_rank: int, step: int, manager: Any) -> None:
        if step in steps:
            manager.wait()

    return hook


def merged(outcomes: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all ranks together; what several hold must be equal."""
    whole: dict[str, Tensor] = {}
    for values in outcomes:
        for name, value in values.items():
            if name in whole:
                assert_equal({name: whole[name]}, {name: value})
            whole[name] = value
    return whole


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Same names, and every byte the same."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    different = [name for name in left if not same_bytes(left[name], right[name])]
    assert not different, different


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """NaN and -0.0 count."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.numel() == 0:
        return True
    return bytes(tensor_bytes(left)) == bytes(tensor_bytes(right))


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Dense and routed experts' parameters."""
    named = list(model.named_parameters())
    return (
        [p for n, p in named if ".experts." not in n],
        [p for n, p in named if ".experts." in n],
    )


class _Vanish(Exception):
    """The trainer dies by an exception of its own: nothing may be drained."""


class _Expert(nn.Module):
    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())

    def forward(self, seats: Tensor) -> Tensor:
        return nn.functional.gelu(seats @ self.w1) @ self.w2


def _as_modules(stacked: nn.Module) -> ExpertList:
    return ExpertList(
        _Expert(w1, w2) for w1, w2 in zip(stacked.w1.detach(), stacked.w2.detach(), strict=True)
    )


def _train(spec: Spec, job: Job, outcome: Outcome, manager: Any, first: int) -> None:
    for step in range(first, spec.steps + 1):
        outcome.losses[step] = job.step()
        if step in spec.record:
            outcome.states[step] = job.snapshot()
        if spec.each_step is not None:
            spec.each_step(job.ranks.rank, step)
        if manager is not None:
            manager.step(step)
        if spec.after_step is not None:
            spec.after_step(job.ranks.rank, step, manager)
