"""How results look: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["age_style", "console", "put_json", "size", "table", "when"]

_PLAIN_WIDTH = 160  # columns, where no terminal says how wide it is: lines are not broken up


def put_json(value: object) -> None:
    """Print one object on standard output, whatever names it holds."""
    print(json.dumps(value))


def console() -> Console:
    """Standard output for people; rich is imported here and not before."""
    from rich.console import Console

    found = Console(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found = Console(highlight=False, markup=False, emoji=False, width=_PLAIN_WIDTH)
    found.soft_wrap = True
    return found


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], left: str = ""
) -> Table:
    """A table without lines down the middle; numbers stand right.

    Args:
        title: above it.
        columns: headings.
        rows: cells; text is taken letter by letter.
        left: headings of columns that hold words, separated by commas.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        title=Text(printable(title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    words = left.split(",")
    for name in columns:
        is_word = name in words
        drawn.add_column(
            name, justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word
        )
    for row in rows:
        drawn.add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in row))
    return drawn


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: ``512 B``, ``33.4 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.95 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def when(time: str) -> str:
    """An ISO-8601 UTC time for people."""
    return time.replace("T", " ").removesuffix("+00:00") or "?"


def age_style(age: int, oldest: int) -> str:
    """Colour of an age in steps: green for this step, over yellow, to red for the oldest."""
    if age == 0:
        return "green"
    share = age / oldest
    return "yellow" if share <= 1 / 3 else "dark_orange" if share <= 2 / 3 else "red"


def printable(text: str) -> str:
    """The text in a form that the terminal can take: file names may be no valid text."""
    encoding = sys.stdout.encoding or "utf-8"
    safe = text.encode(encoding, "backslashreplace").decode(encoding)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in safe)
