"""``moc demo``: train a MoE model twice, lose half of its processes in the second run, compare.

This process only watches; it imports no torch. Every figure that it shows was measured in the
two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from moc.demo.corpus import write_corpus
from moc.demo.fault import NODES, RANKS, NodeFault
from moc.demo.launch import Launch, LaunchError
from moc.demo.picture import draw
from moc.demo.runlog import RunLog
from moc.demo.screen import Screen, result_table

__all__ = ["Plan", "add_arguments", "run_demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often; the short form keeps the proportions."""

    steps: int
    snapshot_every: int
    seed: int = 0

    @property
    def persist_every(self) -> int:
        """Every second snapshot is persisted."""
        return 2 * self.snapshot_every

    @property
    def fault_after(self) -> int:
        """From this step on the node may be lost: at 60 %, when a snapshot is ahead of storage."""
        persists = int(0.6 * self.steps / self.persist_every)
        return persists * self.persist_every + self.snapshot_every + 2

    @property
    def blocking_at(self) -> list[int]:
        """Five steps shortly before a persist, when no other save is under way."""
        last = self.steps // self.persist_every
        periods = sorted({max(2, round(last * part / 6)) for part in range(1, 6)})
        return [period * self.persist_every - 2 for period in periods]

    def options(self, data: Path, *, blocking: bool) -> list[str]:
        """Arguments of the trainer."""
        options = ["--data", str(data), "--nodes", str(NODES), "--ep", "2"]
        options += ["--steps", str(self.steps), "--seed", str(self.seed)]
        options += ["--snapshot-every", str(self.snapshot_every)]
        options += ["--persist-every", str(self.persist_every)]
        options += ["--validate-every", str(self.persist_every)]
        if blocking:
            options += ["--blocking-at", *map(str, self.blocking_at)]
        return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc demo``."""
    parser.add_argument("--quick", action="store_true", help="fewer steps: about two minutes")
    parser.add_argument("--run-dir", type=Path, help="new directory (default: runs/demo-<time>)")
    parser.add_argument("--data", type=Path, help="text to learn (default: Python's own sources)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run_demo(args: argparse.Namespace) -> int:
    """Run it.

    Returns:
        0; 1 when the training failed; 2 when the arguments make no sense; 130 after Ctrl-C.
    """
    console = Console(stderr=args.json)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = _demo(args, Screen(console))
    except ValueError as error:
        return _fail(str(error), 2)
    except (LaunchError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted; all processes ended, memory freed", 130)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if args.json:
        print(json.dumps(result))
    return 0


def _demo(args: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    began = time.monotonic()
    steps = args.steps or (160 if args.quick else 400)
    plan = Plan(steps=steps, snapshot_every=5 if args.quick else 8, seed=args.seed)
    if steps < 8 * plan.snapshot_every:
        raise ValueError(f"--steps {steps}: at least {8 * plan.snapshot_every}, to lose a node in")
    run_dir: Path = args.run_dir or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ValueError(f"{run_dir} is not empty; give --run-dir a new directory")
    run_dir.mkdir(parents=True, exist_ok=True)
    data = run_dir / "corpus.bin"
    nbytes = write_corpus(data, args.data)
    screen.console.print(
        f"A Mixture-of-Experts language model learns {nbytes / 1e6:.1f} MB of "
        f"{args.data or 'Python sources'}, byte by byte, in {RANKS} processes on {NODES} virtual "
        f"nodes; {steps} steps, twice.\nEverything is kept in [bold]{run_dir}[/bold].",
        highlight=False,
    )
    undisturbed = _train(plan, data, run_dir / "undisturbed", screen)
    faulted, fault = _train_and_lose_node(plan, data, run_dir / "faulted", screen)
    assert fault.loss is not None

    result = _result(undisturbed, faulted, fault.loss.step, fault.recovery_secs)
    picture = run_dir / "loss.png"
    drawn = draw(picture, undisturbed, faulted, result["faulted"]["fault_steps"])
    result["picture"] = str(picture) if drawn else None
    result["run_dir"] = str(run_dir)
    result["secs"] = round(time.monotonic() - began, 1)
    (run_dir / "result.json").write_text(json.dumps(result, indent=1))
    screen.console.print()
    screen.console.print(result_table(result))
    screen.line(f"picture: {picture}" if drawn else "no picture: matplotlib is not installed")
    checkpoints = run_dir / "faulted" / "checkpoints"
    screen.line(f"look inside: moc show {checkpoints}, moc report {checkpoints}")
    return result


def _train(plan: Plan, data: Path, run_dir: Path, screen: Screen) -> RunLog:
    """The undisturbed run, which also measures what blocking saves would cost."""
    screen.begin("Run 1 of 2: undisturbed", plan.steps)
    with screen, _launch(plan, data, run_dir, screen, restarts=0) as launch:
        launch.watch(lambda: screen.update(launch.log))
    return launch.log


def _train_and_lose_node(
    plan: Plan, data: Path, run_dir: Path, screen: Screen
) -> tuple[RunLog, NodeFault]:
    """The run that loses a node."""
    screen.begin("Run 2 of 2: node 1 will be lost", plan.steps)
    with screen, _launch(plan, data, run_dir, screen, restarts=1) as launch:
        fault = NodeFault(launch, not_before=plan.fault_after, screen=screen)
        launch.watch(fault.poll)
    if fault.recovery_secs is None:
        raise LaunchError(
            f"no step was committed with a newer one in memory after step {plan.fault_after}, "
            "so no node was lost; try more --steps"
        )
    return launch.log, fault


def _launch(plan: Plan, data: Path, run_dir: Path, screen: Screen, *, restarts: int) -> Launch:
    return Launch(
        run_dir,
        ranks=RANKS,
        restarts=restarts,
        memory_dir=_memory_base() / f"mocdemo-{secrets.token_hex(4)}",
        options=plan.options(data, blocking=not restarts),
        tell=screen.line,
    )


def _result(
    undisturbed: RunLog, faulted: RunLog, fault_step: int, recovery_secs: float | None
) -> dict[str, Any]:
    """The figures for programs."""
    assert undisturbed.final is not None
    assert faulted.final is not None
    reports = [report or _NOTHING_RESTORED for report in faulted.reports[1:]]
    full, partial = undisturbed.checkpoint_bytes()
    return {
        "undisturbed": {"val_loss": undisturbed.final["val_loss"]},
        "faulted": {
            "val_loss": faulted.final["val_loss"],
            "resumed_at": [report["step"] for report in reports],
            "fault_steps": [fault_step],
        },
        "bytes": {"full": full, "partial": partial},
        "stall_secs": {"blocking": undisturbed.blocking_secs(), "moc": undisturbed.stall_secs()},
        "lost_tokens": reports[-1]["lost_tokens"],
        "plt": reports[-1]["plt"],
        "sources": reports[-1]["sources"],
        "by_class": reports[-1]["by_class"],
        "oldest_expert_age_steps": reports[-1]["oldest_expert_age"],
        "recovery_secs": recovery_secs,
        "restore_secs": reports[-1].get("secs", {}).get("total"),
    }


_NOTHING_RESTORED: dict[str, Any] = {
    "step": 0,
    "lost_tokens": 0,
    "plt": 0.0,
    "sources": {},
    "by_class": {},
    "oldest_expert_age": 0,
}


def _memory_base() -> Path:
    """Where the virtual nodes keep their memory: tmpfs where there is one."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path("runs")


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(text: str, code: int) -> int:
    print(f"moc demo: {text}", file=sys.stderr)
    return code
