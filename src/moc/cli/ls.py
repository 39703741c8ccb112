"""``moc ls RUN``: the steps that can be restored, and why other folders are none."""

from __future__ import annotations

import argparse
from typing import Any

from moc.cli import draw
from moc.persist.survey import Survey, survey
from moc.store import open_patiently

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc ls``."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """List a run.

    Returns:
        0, also where the run has no step yet.

    Raises:
        MocError: there is no run, or it cannot be read.
    """
    store = open_patiently(args.run)
    found = survey(store)
    if args.json:
        draw.put_json(_facts(args.run, found))
    else:
        _draw(store.url, found)
    return 0


def _facts(name: str, found: Survey) -> dict[str, Any]:
    return {
        "run": name,
        "run_id": found.run.run_id,
        "steps": [
            {
                "step": step.version.step,
                "attempt": step.version.attempt,
                "bytes": step.own_bytes,
                "experts_saved": step.experts_saved,
                "oldest_expert_age_steps": step.oldest_expert_age,
                "created": step.created,
                "world_size": step.world_size,
            }
            for step in found.steps
        ],
        "other": [{"folder": aside.folder, "why": aside.why} for aside in found.other],
        "attempts": len(found.timeline.attempts),
    }


def _draw(url: str, found: Survey) -> None:
    console = draw.console()
    columns: tuple[str, ...]
    attempts = len(found.timeline.attempts)
    title = f"{url}  run {found.run.run_id}, {attempts} attempt{'s' * (attempts != 1)}"
    if found.steps:
        columns = ("step", "attempt", "committed (UTC)", "bytes", "experts", "oldest", "ranks")
        rows = [
            (
                str(step.version.step),
                str(step.version.attempt),
                draw.when(step.created),
                draw.size(step.own_bytes),
                f"{step.experts_saved}/{sum(map(len, step.versions))}",
                str(step.oldest_expert_age),
                str(step.world_size),
            )
            for step in found.steps
        ]
        console.print(draw.table(title, columns, rows))
        console.print("bytes, experts: of the step's own files; oldest: an expert's age in steps")
    else:
        console.print(f"{title}\nno committed step yet")
    if found.other:
        console.print()
        asides = [(aside.folder, aside.why) for aside in found.other]
        columns = ("folder", "why")
        console.print(draw.table("Folders that are no steps", columns, asides, "folder,why"))
