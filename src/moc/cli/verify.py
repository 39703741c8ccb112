"""``moc verify RUN``: read the bytes, and name file and piece of whatever is damaged."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from moc import knobs
from moc.cli import draw
from moc.persist.verify import VerifyReport, verify
from moc.store import open_patiently

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["add_arguments", "run"]

_QUIET_SECS = 2.0  # what takes no longer needs no progress bar
_SHOWN = 50  # pieces; a lost disk damages thousands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc verify``."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument(
        "--step", type=int, metavar="N", help="only this step, and what it needs (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Verify a run.

    Returns:
        0 where all is as it was written, 1 where something is damaged.

    Raises:
        MocError: there is no such run or step.
    """
    store = open_patiently(args.run)
    began = knobs.monotonic()
    with _bar() as bar:
        report = verify(store, None if args.step is None else [args.step], bar.update)
    if args.json:
        draw.put_json(
            {
                "ok": report.ok,
                "steps": [v.step for v in report.steps],
                "files": report.files,
                "pieces": report.pieces,
                "bytes": report.nbytes,
                "damaged": [msgspec.to_builtins(d) for d in report.damaged],
            }
        )
    else:
        _draw(store.url, report, knobs.monotonic() - began)
    return 0 if report.ok else 1


class _Bar:
    """A progress bar on standard error that shows itself only when the wait is long."""

    def __init__(self) -> None:
        self._began = knobs.monotonic()
        self._progress: Progress | None = None

    def update(self, done: int, total: int) -> None:
        """Bytes done, of how many."""
        if self._progress is None:
            if knobs.monotonic() - self._began < _QUIET_SECS:
                return
            self._progress = _open_progress()
            self._task = self._progress.add_task("verifying", total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take it away."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def _bar() -> Iterator[_Bar]:
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


def _open_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _draw(url: str, report: VerifyReport, secs: float) -> None:
    console = draw.console()
    file = ""
    for damage in report.damaged[:_SHOWN]:
        if damage.file != file:
            file = damage.file
            console.print(draw.printable(file), style="bold", soft_wrap=True)
        piece = f"{damage.piece}: " if damage.piece else ""
        console.print(draw.printable(f"    {piece}{damage.why}"), style="red", soft_wrap=True)
    if len(report.damaged) > _SHOWN:
        console.print(f"and {len(report.damaged) - _SHOWN:,} more; --json lists all")
    steps = [v.step for v in report.steps]
    told = f"{len(steps)} committed steps, {steps[0]} to {steps[-1]}" if steps else "no step yet"
    console.print(
        f"{'DAMAGED' if report.damaged else 'ok'}: {report.pieces:,} pieces, "
        f"{draw.size(report.nbytes)} in {report.files} files of {url} read in {secs:.1f} s; "
        f"{told}",
        style="bold red" if report.damaged else "bold green",
        soft_wrap=True,
    )
    if report.damaged:
        console.print(
            "A restore finds this too and takes an older step, or older versions of the experts."
        )
