"""``moc bench``: what saving costs, against the raw limits of this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moc import knobs
from moc.cli import draw
from moc.errors import ConfigError
from moc.snapshot.buffers import DEFAULT_MEMORY_DIR

if TYPE_CHECKING:
    from moc.bench.measure import Result

__all__ = ["add_arguments", "run"]

_RATIOS = {
    "snapshot_to_memcpy": ("snapshot", "memcpy", "snapshot, share of the speed of memcpy"),
    "persist_to_write": ("persist", "write", "persist, share of the speed of write + fsync"),
    "persist_to_write_streamed": (
        *("persist", "write_streamed"),
        "persist, share of the speed of the same written out early",
    ),
}
_MB = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc bench``."""
    parser.add_argument(
        "--mb", type=float, default=512, help="megabytes of parameters and moments; default 512"
    )
    parser.add_argument(
        "--tensors", type=int, default=234, help="of them, with moments; default 234"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5; medians need that many")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR", help="storage; default: here"
    )
    parser.add_argument(
        "--memory-dir", type=Path, metavar="DIR", help="default MOC_MEMORY_DIR, else /dev/shm"
    )
    parser.add_argument(
        "--experts", type=int, default=0, metavar="N", help="stacked experts per MoE layer"
    )
    parser.add_argument("--k-snapshot", type=int, metavar="K", help="experts in a snapshot")
    parser.add_argument("--k-persist", type=int, metavar="K", help="experts that are persisted")
    parser.add_argument("--no-peers", action="store_true", help="leave torch's own ways out")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Measure, and print.

    Returns:
        0.

    Raises:
        ConfigError: a size makes no sense, or there is no room for it.
    """
    from moc.bench.measure import measure, need
    from moc.bench.state import Shape

    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds}: at least 1")
    if not args.experts and (args.k_snapshot or args.k_persist):
        raise ConfigError("--k-snapshot and --k-persist count experts; give --experts, too")
    shape = Shape(nbytes=int(args.mb * _MB), tensors=args.tensors, experts=args.experts)
    memory_dir = (args.memory_dir or knobs.memory_dir() or Path(DEFAULT_MEMORY_DIR)).absolute()
    memory, storage = need(shape.nbytes, with_peers=not args.no_peers)
    with ExitStack() as stack:
        if not args.json:
            draw.console().print(
                f"takes up to {draw.size(memory)} of memory and {draw.size(storage)} in "
                f"{args.directory.absolute()}"
            )
        result = measure(
            shape,
            rounds=args.rounds,
            directory=args.directory.absolute(),
            memory_dir=memory_dir,
            k_snapshot=args.k_snapshot,
            k_persist=args.k_persist,
            with_peers=not args.no_peers,
            tell=_progress(stack),
        )
    facts = _facts(result, args, memory_dir)
    if args.json:
        draw.put_json(facts)
    else:
        _print(result, facts)
    return 0


def _progress(stack: ExitStack) -> Callable[[int, int, str], None]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = stack.enter_context(
        Progress(console=console, transient=True, disable=not console.is_terminal)
    )
    task = bar.add_task("")

    def tell(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=what)

    return tell


def _facts(result: Result, args: argparse.Namespace, memory_dir: Path) -> dict[str, Any]:
    import torch

    from moc.bench.measure import MEASURES, Spread

    measures = {}
    for name in MEASURES:
        if result.secs[name]:
            measures[name] = {
                "bytes": max(result.nbytes[name]),
                "secs": asdict(Spread.of(result.secs[name])),
                "memcpys": asdict(result.times(name, "memcpy")),
                "writes": asdict(result.times(name, "write")),
            }
    return {
        "ratios": {
            key: asdict(result.speed(name, limit)) for key, (name, limit, _) in _RATIOS.items()
        },
        "measures": measures,
        "rounds": args.rounds,
        "state": {
            "bytes": result.state_bytes,
            "tensors": result.tensors,
            "experts": args.experts,
            "k_snapshot": args.k_snapshot,
            "k_persist": args.k_persist,
        },
        "machine": {
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "directory": str(args.directory.absolute()),
            "memory_dir": str(memory_dir),
            "load": asdict(Spread.of(result.loads)),
        },
        "notes": result.notes,
    }


def _print(result: Result, facts: dict[str, Any]) -> None:
    from moc.bench.measure import MEASURES

    console = draw.console()
    for key, (_, _, text) in _RATIOS.items():
        console.print(f"{text}: {_spread(facts['ratios'][key], '.0%')}")
    rows = [
        (
            MEASURES[name],
            draw.size(found["bytes"]),
            *(f"{found['secs'][part]:.3f}" for part in ("median", "min", "max")),
            f"{found['memcpys']['median']:.2f}",
            f"{found['writes']['median']:.2f}",
        )
        for name, found in facts["measures"].items()
    ]
    columns = ("measurement", "bytes", "median s", "min", "max", "/ memcpy", "/ write")
    machine, load = facts["machine"], facts["machine"]["load"]
    title = (
        f"{result.tensors} tensors, {facts['rounds']} rounds; {machine['cpus']} cores, load "
        f"{load['min']:.1f} to {load['max']:.1f}, torch {machine['torch']}"
    )
    console.print(draw.table(title, columns, rows, "measurement"))
    for note in result.notes:
        console.print(note)


def _spread(found: dict[str, float], form: str) -> str:
    low, high = format(found["min"], form), format(found["max"], form)
    return f"{format(found['median'], form)} ({low} to {high})"
