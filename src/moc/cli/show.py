"""``moc show RUN``: one step from inside: files, age of each expert, attempts, what was lost."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from moc.cli import draw
from moc.core.manifest import Manifest
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import DamagedError, MocError, NothingValid, StepNotFound
from moc.persist.commit import load_manifest
from moc.persist.survey import Survey, survey
from moc.store import Store, open_patiently

__all__ = ["add_arguments", "run"]

_LABEL_COLUMNS = 28  # of a terminal, for the name of a layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc show``."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument("--step", type=int, metavar="N", help="which step (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Show a step.

    Returns:
        0.

    Raises:
        MocError: there is no such run or step, or it cannot be read.
    """
    store = open_patiently(args.run)
    found = survey(store)
    manifest = _pick(store, found, args.step)
    if args.json:
        draw.put_json(_facts(manifest, found.timeline))
    else:
        _draw(store.url, manifest, found.timeline)
    return 0


def _pick(store: Store, found: Survey, step: int | None) -> Manifest:
    """The manifest of a step, or of the newest that can be read."""
    versions = [s.version for s in found.steps if step is None or s.version.step == step]
    reasons = []
    for version in reversed(versions):
        try:
            return load_manifest(store, version)
        except MocError as error:
            if step is not None:
                raise
            reasons.append(str(error))
            print(f"moc show: step {version} passed over: {error}", file=sys.stderr)
    if step is None:
        told = "; ".join(reasons + [f"{a.folder}: {a.why}" for a in found.other])
        if told:
            raise NothingValid(f"{store.url} has no committed step to show: {told}")
        raise StepNotFound(f"{store.url} has no committed step yet")
    asides = [a for a in found.other if a.folder.startswith(f"step-{step:08d}-")]
    told = "; ".join(f"{a.folder}: {a.why}" for a in asides) or "nothing of it was found"
    text = f"step {step} of {store.url} cannot be shown: {told}"
    if any(a.why.startswith("damaged") for a in asides):
        raise DamagedError(text)
    have = ", ".join(str(s.version.step) for s in found.steps) or "none"
    raise StepNotFound(f"{text}; committed steps: {have}")


def _own_bytes(manifest: Manifest) -> int:
    return sum(f.nbytes for f in manifest.files if f.is_of(manifest.version))


# ---------------------------------------------------------------------- for programs


def _facts(manifest: Manifest, timeline: Timeline) -> dict[str, Any]:
    """``bytes`` counts the step's own files, ``needed_bytes`` every file that it needs."""
    head = manifest.head
    return {
        "step": manifest.version.step,
        "attempt": manifest.version.attempt,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "pieces": len(manifest.dense) + len(manifest.experts),
        "bytes": _own_bytes(manifest),
        "needed_bytes": sum(f.nbytes for f in manifest.files),
        "base": _version_facts(head.base) if head.base else None,
        "k_snapshot": head.k_snapshot,
        "k_persist": head.k_persist,
        "layers": head.layers,
        "files": [{"key": f.key, "bytes": f.nbytes} for f in manifest.files],
        "experts": [[_version_facts(v) for v in row] for row in manifest.versions],
        "saved": head.saved,
        "routed": head.routed,
        "lost": head.lost,
        "left_out": [*head.left_out, *head.frozen],
        "attempts": [_attempt_facts(record) for record in timeline.attempts],
    }


def _version_facts(version: Version) -> dict[str, int]:
    return {"attempt": version.attempt, "step": version.step}


def _attempt_facts(record: AttemptRecord) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(record)
    return {**facts, "lost_tokens": sum(map(sum, record.lost))}


# ---------------------------------------------------------------------- for people


def _draw(url: str, manifest: Manifest, timeline: Timeline) -> None:
    console = draw.console()
    head, version = manifest.head, manifest.version
    own, needed = _own_bytes(manifest), sum(f.nbytes for f in manifest.files)
    pieces = len(manifest.dense) + len(manifest.experts)
    console.print(f"{url}, step {version}", style="bold", soft_wrap=True)
    console.print(
        f"committed {draw.when(manifest.created)} UTC by {_count(manifest.world_size, 'rank')}; "
        + (f"builds on step {head.base}" if head.base else "a full save")
    )
    console.print(
        f"{_count(pieces, 'piece')}; wrote {draw.size(own)}, and needs {draw.size(needed - own)} "
        "of older steps"
    )
    if head.layers:
        console.print(
            f"{_count(len(head.layers), 'MoE layer')}; experts per layer and save: K_snapshot "
            f"{head.k_snapshot}, K_persist {head.k_persist}"
        )
    console.print()
    files = [(f.key, draw.size(f.nbytes)) for f in sorted(manifest.files, key=lambda f: f.key)]
    console.print(draw.table("Files that it needs", ("file", "size"), files, "file"))
    if head.layers:
        _draw_ages(manifest)
        _draw_tokens(manifest)
    console.print()
    columns = ("attempt", "started (UTC)", "from step", "ranks", "K", "lost", "host:pid")
    rows = [_attempt_row(record) for record in timeline.attempts]
    title = "Attempts (K: K_snapshot/K_persist; lost: tokens, by the fault before)"
    console.print(draw.table(title, columns, rows, "host:pid"))
    for record in timeline.attempts:
        parts = [
            f"{draw.size(n)} {name.replace('_', ' ')}" for name, n in record.sources.items() if n
        ]
        if parts:
            console.print(f"attempt {record.attempt} restored from: {', '.join(parts)}")
    if head.left_out:
        console.print(f"\nLeft out by rule: {', '.join(head.left_out)}", soft_wrap=True)
    if head.frozen:
        console.print(f"\nLeft out as frozen: {', '.join(head.frozen)}", soft_wrap=True)


def _draw_ages(manifest: Manifest) -> None:
    from rich.text import Text

    console = draw.console()
    step = manifest.version.step
    ages = [[step - v.step for v in row] for row in manifest.versions]
    oldest = max((age for row in ages for age in row), default=0)
    cell = max(3, len(str(oldest)) + 1)
    widest = max(map(len, ages), default=0)
    fit = max(1, (console.width - _LABEL_COLUMNS) // cell)
    # Lines of a power of two, so that experts stand below one another in every layer.
    per_line = widest if widest <= fit else 1 << (fit.bit_length() - 1)
    names = [draw.printable(name) for name in manifest.head.layers]
    label = min(_LABEL_COLUMNS, max(map(len, ["MoE layer", *names])) + 1)
    console.print()
    console.print("Age of each expert, in steps (0: saved by this step)", style="bold")
    console.print(
        f"{'MoE layer':<{label}}" + "".join(f"{e:>{cell}}" for e in range(per_line)), style="dim"
    )
    for name, row in zip(names, ages, strict=True):
        short = name if len(name) < label else ".." + name[3 - label :]
        for start in range(0, len(row), per_line):
            line = Text(f"{f'  from {start}' if start else short:<{label}}")
            for age in row[start : start + per_line]:
                line.append(f"{age:>{cell}}", style=draw.age_style(age, oldest))
            console.print(line, no_wrap=True)


def _draw_tokens(manifest: Manifest) -> None:
    routed = sum(map(sum, manifest.head.routed))
    lost = sum(map(sum, manifest.head.lost))
    share = f" ({lost / routed:.3%})" if routed else ""
    draw.console().print(
        f"\nTokens routed to experts so far: {routed:,}; the state has lost {lost:,}{share}"
    )


def _attempt_row(record: AttemptRecord) -> tuple[str, ...]:
    return (
        str(record.attempt),
        draw.when(record.time),
        str(record.resumed_step) if record.resumed_step else "start",
        str(record.world_size),
        f"{record.k_snapshot}/{record.k_persist}" if record.k_snapshot else "-",
        f"{sum(map(sum, record.lost)):,}",
        f"{record.host}:{record.pid}",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
