"""``moc report``: one page with the pictures of a run, from the events of its ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from moc.cli import draw
from moc.errors import ConfigError
from moc.metrics.charts import draw_all
from moc.metrics.history import fold, read_events
from moc.metrics.page import make_page, summary

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc report``."""
    parser.add_argument(
        "source",
        metavar="RUN_OR_JSONL",
        help="a directory with events-*.jsonl, one such file, or a glob in quotes",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the page (default: report.html)", type=Path
    )
    parser.add_argument(
        "--png", metavar="DIR", type=Path, help="the pictures as PNG files too (needs matplotlib)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object on standard output; no page unless -o names one",
    )


def run(args: argparse.Namespace) -> int:
    """Read events, draw, write.

    Returns:
        0.

    Raises:
        ConfigError: no events, nowhere to write, or no matplotlib for ``--png``.
    """
    events, problems = read_events(args.source)
    history = fold(events)
    charts = draw_all(history)
    written: list[Path] = []
    page = args.output or (None if args.json else Path("report.html"))
    try:
        if page is not None:
            title = Path(args.source).resolve().name
            page.write_text(make_page(title, history, charts.values(), problems), "utf-8")
            written.append(page)
        if args.png is not None:
            args.png.mkdir(parents=True, exist_ok=True)
            for name, chart in charts.items():
                chart.save_png(args.png / f"{name}.png")
                written.append(args.png / f"{name}.png")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    if args.json:
        files = [str(path) for path in written]
        draw.put_json({**summary(history), "problems": problems, "files": files})
        return 0
    for line in (*problems, *(f"wrote {path}" for path in written)):
        print(draw.printable(line))
    return 0
