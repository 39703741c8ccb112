"""The trainer behind ``moc demo``, short enough to copy: one process, or many under torchrun.

    torchrun --nproc-per-node 4 --max-restarts 3 -m moc.demo.trainer --data FILE --run-dir DIR

Data parallel over all ranks, experts over `--ep` of them, optimizer states partitioned as in
ZeRO-1. With rank = ep_rank * edp_size + edp_rank, the ranks that replicate an expert are
neighbours, so a node of two ranks holds its experts whole: what memory can save depends on it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LambdaLR

import moc
from moc.demo.baseline import blocking_save
from moc.demo.journal import Journal
from moc.demo.loader import Loader
from moc.demo.model import ModelConfig, Transformer
from moc.metrics import JsonlSink, fan_out

__all__ = ["Ranks", "Trainer", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who this process is, and whom it talks to; the groups are None in a single process."""

    rank: int = 0
    world_size: int = 1
    device: torch.device
    dp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    edp: dist.ProcessGroup | None = None


def join(ep_size: int) -> Ranks:
    """Meet the other ranks that torchrun started."""
    if "RANK" not in os.environ:
        return Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() >= local_size
    if gpus:
        torch.cuda.set_device(local_rank)
    moc.init_process_group("nccl" if gpus else "gloo")  # survives restarts by torchrun
    return make_groups(ep_size, torch.device("cuda", local_rank) if gpus else torch.device("cpu"))


def make_groups(ep_size: int, device: torch.device) -> Ranks:
    """Divide the ranks: {0, 2} and {1, 3} exchange tokens, {0, 1} and {2, 3} share experts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    edp_size = world_size // ep_size
    edp, _ = dist.new_subgroups_by_enumeration(
        [list(range(start, start + edp_size)) for start in range(0, world_size, edp_size)]
    )
    ep, _ = dist.new_subgroups_by_enumeration(
        [list(range(start, world_size, edp_size)) for start in range(edp_size)]
    )
    return Ranks(
        rank=rank, world_size=world_size, device=device, dp=dist.group.WORLD, ep=ep, edp=edp
    )


class Trainer:
    """Model, optimizers, schedule and data of one rank."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.ranks = ranks
        torch.manual_seed(args.seed)  # the same model on every rank
        config = ModelConfig(seq_len=args.seq_len)
        self.model = Transformer(config, ranks.ep).to(ranks.device)
        torch.manual_seed(1000 * (args.seed + 1) + ranks.rank)  # other gate noise on every rank
        self.dense, self.experts = self.model.parameters_by_kind()
        self.optimizers = [
            adamw(self.dense, ranks.dp, args.lr),
            adamw(self.experts, ranks.edp, args.lr),
        ]
        schedule = warm_up_and_cosine(args.steps)
        self.schedulers = [LambdaLR(optimizer, schedule) for optimizer in self.optimizers]
        self.loader = Loader(
            Path(args.data),
            batch=args.batch,
            seq_len=args.seq_len,
            seed=args.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )

    def step(self) -> Tensor:
        """One optimizer step on the next batch.

        Returns:
            The mean loss over all ranks.
        """
        self.model.train()
        self.model.zero_grad()
        loss, balance = self.model(*self.loader.next_batch(self.ranks.device))
        (loss + balance).backward()
        # An expert has already summed over its expert-parallel group, by the way back of the
        # tokens: so it sums over fewer ranks, but its mean is over all of them, too.
        world_size = self.ranks.world_size
        mean_loss = average_gradients(self.dense, self.ranks.dp, world_size, loss.detach())
        average_gradients(self.experts, self.ranks.edp, world_size)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return mean_loss

    @torch.no_grad()
    def validate(self, batches: int) -> float:
        """Mean loss on held-out text."""
        self.model.eval()
        total = torch.zeros((), device=self.ranks.device)
        for number in range(batches):
            loss, _ = self.model(*self.loader.validation_batch(number, self.ranks.device))
            total += loss / batches / self.ranks.world_size
        if self.ranks.dp:
            dist.all_reduce(total, group=self.ranks.dp)
        return float(total)


def adamw(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None, lr: float
) -> torch.optim.Optimizer:
    """AdamW, its state partitioned over the group."""
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if group is None:
        return torch.optim.AdamW(parameters, **options)
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, group, parameters_as_bucket_view=True, **options
    )


def average_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup | None,
    count: int,
    *scalars: Tensor,
) -> Tensor:
    """Replace gradients by their sum over the group / count, in one exchange.

    Returns:
        The sum of the scalars, which go along and are treated alike.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([tensor.flatten() for tensor in (*gradients, *scalars)])
    if group:
        dist.all_reduce(flat, group=group)
    flat /= count
    sizes = [gradient.numel() for gradient in gradients]
    *averages, rest = torch.split(flat, [*sizes, len(scalars)])
    for gradient, average in zip(gradients, averages, strict=True):
        gradient.copy_(average.view_as(gradient))
    return rest.sum()


def warm_up_and_cosine(steps: int) -> Any:
    """Factor of the learning rate after so many steps: up in 20, down to a tenth at the end."""

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / 20) * (0.1 + 0.9 * cosine)

    return factor


def make_manager(args: argparse.Namespace, trainer: Trainer, journal: Journal) -> Any:
    """What keeps the run safe: from here on, three calls are all there is to it."""
    ranks, checkpoints = trainer.ranks, Path(args.run_dir) / "checkpoints"
    node = ranks.rank * args.nodes // ranks.world_size
    return moc.CheckpointManager(
        checkpoints,
        model=trainer.model,
        optimizer=trainer.optimizers,
        extras={"scheduler": trainer.schedulers, "loader": trainer.loader},
        layout=moc.Layout.from_groups(dp=ranks.dp, ep=ranks.ep, edp=ranks.edp)
        if ranks.dp
        else moc.Layout.single(),
        policy=moc.Policy(
            snapshot_every=args.snapshot_every,
            persist_every=args.persist_every,
            k_snapshot=args.k_snapshot,
            k_persist=args.k_persist,
            total_steps=args.steps,
        ),
        memory_dir=Path(args.memory_dir, f"node{node}") if args.memory_dir else None,
        on_event=fan_out(journal.write_event, JsonlSink(checkpoints / "events.jsonl")),
    )


class NoManager(contextlib.AbstractContextManager["NoManager"]):
    """Stands in for the manager with ``--no-moc``: saves nothing, finds nothing."""

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def restore(self) -> None:
        """There is nothing to restore."""

    def step(self, step: int) -> None:
        """Saves nothing."""

    def stats(self) -> dict[str, Any]:
        """Nothing was measured."""
        return {}


def train(args: argparse.Namespace, ranks: Ranks, journal: Journal) -> None:
    """Train to the end, from wherever the last attempt got to."""
    trainer = Trainer(args, ranks)
    tokens = trainer.loader.tokens_per_batch * ranks.world_size
    with NoManager() if args.no_moc else make_manager(args, trainer, journal) as manager:
        report = manager.restore()
        journal.write_report(report)
        for step in range(report.step + 1 if report else 1, args.steps + 1):
            start = time.perf_counter()
            loss = trainer.step()
            manager.step(step)
            secs = time.perf_counter() - start
            journal.write("step", step=step, loss=float(loss), tokens=tokens, secs=secs)
            if step in args.blocking_at:
                path = Path(args.run_dir) / f"blocking-{ranks.rank}.pt"
                secs, nbytes = blocking_save(trainer.optimizers, path)
                journal.write("blocking", step=step, secs=secs, nbytes=nbytes)
            if step % args.validate_every == 0 and step < args.steps:
                journal.write("validation", step=step, loss=trainer.validate(4))
        val_loss = trainer.validate(32)
    journal.write("end", val_loss=val_loss, stats=manager.stats())


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small MoE model under MoC.")
    parser.add_argument("--data", required=True, help="file with the text to learn")
    parser.add_argument("--run-dir", required=True, help="for checkpoints and journals")
    parser.add_argument("--memory-dir", help="directory on tmpfs for snapshots")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes to divide ranks into")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share out the experts")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=2, help="windows per rank and step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot-every", type=int, default=10)
    parser.add_argument("--persist-every", type=int, default=20)
    parser.add_argument("--k-snapshot", type=int, default=4)
    parser.add_argument("--k-persist", type=int, default=2)
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--blocking-at", type=int, nargs="*", default=[])
    parser.add_argument("--no-moc", action="store_true", help="train without checkpoints")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of every rank."""
    args = parse_arguments(argv)
    ranks = join(args.ep)
    with Journal(Path(args.run_dir) / f"metrics-rank{ranks.rank}.jsonl") as journal:
        journal.write("start", rank=ranks.rank, pid=os.getpid())
        train(args, ranks, journal)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
