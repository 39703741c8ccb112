"""``moc clean``: remove what dead runs have left in the memory tier of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moc import knobs
from moc.cli import draw
from moc.errors import ConfigError
from moc.persist.residents import residents
from moc.snapshot.buffers import DEFAULT_MEMORY_DIR, RunFolder, remove_folder, run_folders

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc clean``."""
    parser.add_argument("--memory-dir", metavar="DIR", help="default MOC_MEMORY_DIR, else /dev/shm")
    parser.add_argument(
        "--older-than",
        type=float,
        default=24.0,
        metavar="HOURS",
        help="younger ones stay, as a crashed run may be restarted from them; default 24",
    )
    parser.add_argument("--dry-run", action="store_true", help="list; remove nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Clean a memory directory.

    Returns:
        0, or 1 where something could not be removed.

    Raises:
        ConfigError: there is no such directory, or the age is negative.
    """
    memory = Path(args.memory_dir or knobs.memory_dir() or DEFAULT_MEMORY_DIR).absolute()
    if args.older_than < 0:
        raise ConfigError(f"--older-than {args.older_than:g}: at least 0 hours")
    if not memory.is_dir():
        raise ConfigError(f"{memory} is no directory; name the memory tier with --memory-dir")
    served = {r.folder for r in residents()}
    now = knobs.now_secs()
    found = [
        _judge(folder, now, args, is_served=str(folder.path) in served)
        for folder in run_folders(memory)
    ]
    if args.json:
        draw.put_json({"memory_dir": str(memory), "dry_run": args.dry_run, "runs": found})
    else:
        rows = [
            (f["run_id"], f"{f['age_secs'] / 3600:.1f} h", draw.size(f["bytes"]), f["what"])
            for f in found
        ]
        columns = ("run id", "age", "bytes", "what")
        draw.console().print(draw.table(str(memory), columns, rows, "run id,what"))
    return 1 if any(f["what"].startswith("not removed") for f in found) else 0


def _judge(
    folder: RunFolder, now: float, args: argparse.Namespace, *, is_served: bool
) -> dict[str, Any]:
    age = now - folder.touched
    if folder.is_locked or is_served:
        what = "in use"
    elif age < args.older_than * 3600:
        what = "kept: younger than --older-than"
    elif args.dry_run:
        what = "would be removed"
    else:
        error = remove_folder(folder.path)
        what = f"not removed: {error}" if error else "removed"
    return {
        "run_id": folder.path.name.removeprefix("moc-"),
        "age_secs": age,
        "bytes": folder.nbytes,
        "locked": folder.is_locked or is_served,
        "what": what,
    }
