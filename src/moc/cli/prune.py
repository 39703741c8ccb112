"""``moc prune RUN``: apply retention by hand, and say why what stays has to stay."""

from __future__ import annotations

import argparse
from typing import Any

from moc.choose.retention import Sweep
from moc.cli import draw
from moc.core.manifest import step_dir
from moc.core.versions import Version
from moc.errors import ConfigError
from moc.persist.commit import load_timeline, named_files, plan_sweep, prune, unfinished_bases
from moc.persist.survey import read_run
from moc.store import open_store

__all__ = ["add_arguments", "run"]

_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc prune``."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument("--keep-latest-k", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep multiples of N as well")
    parser.add_argument("--dry-run", action="store_true", help="say what would go; delete nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Prune a run.

    Returns:
        0, or 1 where something could not be deleted.

    Raises:
        MocError: there is no run, it cannot be read, or a number makes no sense.
    """
    for option in ("keep_latest_k", "keep_every"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: at least 1")
    store = open_store(args.run)
    run_info = read_run(store)
    timeline = load_timeline(store)
    protect = unfinished_bases(store, timeline)
    plan = plan_sweep(
        store,
        timeline,
        args.keep_latest_k,
        args.keep_every,
        protect,
        node_local=run_info.node_local,
    )
    named = named_files(store, plan.keep)
    size = sum(store.size(key) for key in plan.delete)
    problems = [] if args.dry_run else prune(store, plan)
    facts: dict[str, Any] = {
        "run": args.run,
        "dry_run": args.dry_run,
        "retire": [step_dir(v) for v in plan.retire],
        "delete": list(plan.delete),
        "bytes": size,
        "keep": {step_dir(v): _why(v, protect, args) for v in plan.keep},
        "needed": _needed(plan, named),
        "problems": problems,
    }
    if args.json:
        draw.put_json(facts)
    else:
        _draw(store.url, facts)
    return 1 if problems else 0


def _why(version: Version, protect: list[Version], args: argparse.Namespace) -> str:
    if version in protect:
        return "a save that is not committed yet builds on it"
    if args.keep_every and version.step % args.keep_every == 0:
        return f"a multiple of {args.keep_every}"
    return f"among the newest {args.keep_latest_k} complete steps, or newer"


def _needed(plan: Sweep, named: dict[str, list[Version]]) -> dict[str, list[str]]:
    """Files of steps that are not kept, and the kept steps that name them."""
    kept = {step_dir(v) for v in plan.keep}
    return {
        key: [step_dir(v) for v in by]
        for key, by in sorted(named.items())
        if key.partition("/")[0] not in kept
    }


def _draw(url: str, facts: dict[str, Any]) -> None:
    console = draw.console()
    would = "would go" if facts["dry_run"] else "gone"
    console.print(
        f"{url}\n{would}: {len(facts['retire'])} steps, {len(facts['delete'])} files, "
        f"{draw.size(facts['bytes'])}"
    )
    for folder in facts["retire"]:
        console.print(f"  {folder}")
    rows = [(folder, why) for folder, why in facts["keep"].items()]
    rows += [
        (key, "named by " + ", ".join(by[-_SHOWN:]) + (", ..." if len(by) > _SHOWN else ""))
        for key, by in facts["needed"].items()
    ]
    console.print(draw.table("What stays", ("what", "why"), rows, "what,why"))
    for problem in facts["problems"]:
        console.print(problem)
