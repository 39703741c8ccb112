"""A picture as a list of rectangles, lines and words: as SVG without any library, or as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

from moc.errors import ConfigError

__all__ = ["DARK", "LIGHT", "Canvas", "Colour"]

Colour = Literal[
    "ink", "muted", "grid", "paper", "copy", "snapshot", "persist", "recovery", "bad", "second"
]

LIGHT: dict[Colour, str] = {
    "ink": "#1f2328",
    "muted": "#646c76",
    "grid": "#e3e6ea",
    "paper": "#ffffff",
    "copy": "#2f6fb7",
    "snapshot": "#b9d3ee",
    "persist": "#e8923a",
    "recovery": "#4fa36a",
    "bad": "#c93c37",
    "second": "#8468b5",
}
DARK: dict[Colour, str] = {
    "ink": "#e6e8eb",
    "muted": "#9aa3ad",
    "grid": "#343a41",
    "paper": "#16191d",
    "copy": "#5b9be0",
    "snapshot": "#2c4560",
    "persist": "#e0913f",
    "recovery": "#4f9e69",
    "bad": "#e5645f",
    "second": "#a58ad6",
}

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_DPI = 100
_POINTS = 72 / _DPI
_SCALE = 2  # of PNG files, for screens of today
_MARGIN = 16  # around PNG files
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


@dataclass
class Canvas:
    """A picture of so many pixels; y grows downwards.

    Attributes:
        width: pixels.
        height: pixels.
        title: for those who cannot see it.
    """

    width: float
    height: float
    title: str
    _shapes: list[tuple[str, tuple[float, ...], Colour, str, str]] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, colour: Colour, tip: str = ""
    ) -> None:
        """A filled rectangle; ``tip`` shows under the mouse."""
        self._shapes.append(("rect", (x, y, width, height), colour, tip, ""))

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: Colour, width: float = 1.0
    ) -> None:
        """A straight line."""
        self._shapes.append(("line", (x1, y1, x2, y2, width), colour, "", ""))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: Colour = "ink",
        *,
        size: float = 12,
        anchor: Literal["start", "middle", "end"] = "start",
        bold: bool = False,
    ) -> None:
        """Words on a base line at y."""
        self._shapes.append(("text", (x, y, size, float(bold)), colour, words, anchor))

    def legend(self, x: float, y: float, entries: Sequence[tuple[Colour, str]]) -> None:
        """Coloured boxes with words, in a row."""
        for colour, words in entries:
            self.rect(x, y - 10, 12, 12, colour)
            self.text(x + 17, y, words, "muted", size=12)
            x += 36 + 6.6 * len(words)

    def to_svg(self) -> str:
        """An ``<svg>`` element whose colours are the CSS variables ``--ink`` and so on."""
        parts = [
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="{_FONT}">'
        ]
        for kind, at, colour, words, anchor in self._shapes:
            paint = f"var(--{colour})"
            if kind == "rect":
                tip = f"<title>{escape(words)}</title>" if words else ""
                parts.append(
                    f'<rect x="{at[0]:.1f}" y="{at[1]:.1f}" width="{at[2]:.1f}" '
                    f'height="{at[3]:.1f}" fill="{paint}">{tip}</rect>'
                )
            elif kind == "line":
                parts.append(
                    f'<line x1="{at[0]:.1f}" y1="{at[1]:.1f}" x2="{at[2]:.1f}" y2="{at[3]:.1f}" '
                    f'stroke="{paint}" stroke-width="{at[4]:g}"/>'
                )
            else:
                weight = ' font-weight="600"' if at[3] else ""
                parts.append(
                    f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{at[2]:g}" '
                    f'text-anchor="{anchor}" fill="{paint}"{weight}>{escape(words)}</text>'
                )
        return "\n".join([*parts, "</svg>"])

    def save_png(self, path: Path) -> None:
        """The same picture as PNG, in light colours.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Rectangle
        except ImportError:
            raise ConfigError(
                "--png needs matplotlib: pip install 'moc-system[plots]'; the page does without"
            ) from None
        width, height = self.width + 2 * _MARGIN, self.height + 2 * _MARGIN
        figure = Figure((width / _DPI, height / _DPI), facecolor=LIGHT["paper"])
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-_MARGIN, width - _MARGIN)
        axes.set_ylim(height - _MARGIN, -_MARGIN)
        axes.axis("off")
        for order, (kind, at, colour, words, anchor) in enumerate(self._shapes):
            paint = LIGHT[colour]
            if kind == "rect":
                box = Rectangle((at[0], at[1]), at[2], at[3], color=paint, linewidth=0)
                axes.add_patch(box).set_zorder(order)
            elif kind == "line":
                thick = at[4] * _POINTS
                axes.plot(at[0:4:2], at[1:4:2], color=paint, linewidth=thick, zorder=order)
            else:
                axes.text(
                    at[0],
                    at[1],
                    words.replace("$", r"\$"),
                    color=paint,
                    fontsize=at[2] * _POINTS,
                    fontweight="bold" if at[3] else "normal",
                    ha=_ANCHORS[anchor],
                    va="baseline",
                    zorder=order,
                )
        figure.savefig(path, dpi=_DPI * _SCALE)
