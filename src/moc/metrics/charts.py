"""The pictures of a run: its buffers over time, and what each save cost and came to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from moc.metrics.canvas import Canvas, Colour
from moc.metrics.history import Attempt, History, Phase, Save, Span

__all__ = ["draw_all", "secs", "size"]

_WIDTH = 960
_LEFT, _RIGHT, _TOP = 96, 16, 64
_ROW, _GAP = 16, 8
_PLOT = _WIDTH - _LEFT - _RIGHT
_HEIGHT = 190  # of a bar chart's plot
_MOST_RANKS = 8
_MOST_SAVES = 40  # a timeline of more can't be read

_PHASES: dict[Phase, tuple[Colour, str]] = {
    "COPY": ("copy", "SNAPSHOT, being copied"),
    "SNAPSHOT": ("snapshot", "SNAPSHOT, sealed"),
    "PERSIST": ("persist", "PERSIST"),
    "RECOVERY": ("recovery", "RECOVERY (newest commit)"),
}
_FATES: dict[str, tuple[Colour, str]] = {
    "committed": ("recovery", "committed"),
    "failed": ("bad", "failed or abandoned"),
    "not resolved": ("muted", "not resolved when the events end"),
}
_SOURCES: dict[str, tuple[Colour, str]] = {
    "memory": ("copy", "own memory"),
    "memory_older": ("snapshot", "own memory, older experts"),
    "peer": ("second", "another node's memory"),
    "peer_older": ("muted", "another node's memory, older"),
    "storage": ("persist", "storage"),
    "storage_older": ("bad", "storage, older experts"),
}


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.95 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def secs(value: float) -> str:
    """A duration for people: ``0``, ``3.2 ms``, ``1.25 s``."""
    if not value:
        return "0"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def draw_all(history: History) -> dict[str, Canvas]:
    """Every picture that there are events for, by a name for its file."""
    charts = {f"timeline-a{a.number:04d}": draw_timeline(a) for a in history.attempts if a.spans}
    if any(save.stall_secs for save in history.saves):
        charts["stalls"] = draw_stalls(history)
    if any(save.marked for save in history.saves):
        charts["commits"] = draw_commits(history)
    if history.saves:
        charts["bytes"] = draw_bytes(history)
    if any(a.restored for a in history.attempts):
        charts["restores"] = draw_restores(history)
    return charts


def draw_timeline(attempt: Attempt) -> Canvas:
    """Rows are the buffers of each rank, colours their phases (as the paper's Figure 9).

    The steps stand below where their snapshots start, the seconds above.
    """
    starts = attempt.starts[-_MOST_SAVES:]
    begin = attempt.start if len(starts) == len(attempt.starts) else starts[0][1]
    length = max(attempt.end - begin, 1e-9)
    spans = [span for span in attempt.spans if span.end > begin]
    ranks = sorted({span.rank for span in spans})
    shown = ranks[:_MOST_RANKS]
    rows = sorted({(span.rank, span.buffer) for span in spans if span.rank in shown})
    height = len(rows) * _ROW + max(len(shown) - 1, 0) * _GAP
    title = f"Attempt {attempt.number}: buffers over time"
    idle = "idle"
    if attempt.restored is not None:
        title += f", resumed from step {attempt.restored.step}"
        idle = "idle, or of an earlier attempt"
    if len(shown) < len(ranks):
        title += f"; ranks {shown[0]} to {shown[-1]} of {len(ranks)}"
    if len(starts) < len(attempt.starts):
        title += f"; the last {len(starts)} of {len(attempt.starts)} saves"
    canvas = Canvas(_WIDTH, _TOP + 20 + height + 44, title)
    canvas.text(0, 16, title, size=15, bold=True)
    canvas.legend(_LEFT, 40, [*_PHASES.values(), ("grid", idle)])
    top = _TOP + 18

    def across(time: float) -> float:
        return _LEFT + _PLOT * min(max((time - begin) / length, 0.0), 1.0)

    places = {row: top + n * _ROW + shown.index(row[0]) * _GAP for n, row in enumerate(rows)}
    _draw_rows(canvas, places)
    for span in spans:
        if (span.rank, span.buffer) in places:
            _draw_span(canvas, span, places[span.rank, span.buffer], across)
    for value in _ticks(length, 8):
        x = across(begin + value)
        canvas.line(x, top - 6, x, top - 2, "muted")
        canvas.text(x, top - 9, f"{value:g} s", "muted", size=10, anchor="middle")
    bottom, last = top + height, -math.inf
    for step, time in starts:
        x = across(time)
        canvas.line(x, bottom - 2, x, bottom + 3, "muted")
        if x - last > 28:
            canvas.text(x, bottom + 14, str(step), "ink", size=10, anchor="middle")
            last = x
    words = "step whose snapshot starts there"
    canvas.text(_LEFT + _PLOT / 2, bottom + 32, words, "muted", anchor="middle")
    return canvas


def _draw_rows(canvas: Canvas, places: Mapping[tuple[int, int], float]) -> None:
    named = set()
    for (rank, buffer), y in places.items():
        canvas.rect(_LEFT, y, _PLOT, _ROW - 3, "grid")
        canvas.text(_LEFT - 8, y + 10, f"b{buffer}", "muted", size=10, anchor="end")
        if rank not in named:
            canvas.text(0, y + 10, f"rank {rank}", size=12)
            named.add(rank)


def _draw_span(canvas: Canvas, span: Span, y: float, across: Callable[[float], float]) -> None:
    colour, words = _PHASES[span.phase]
    x = across(span.start)
    width = max(across(span.end) - x, 1.0)
    tip = f"rank {span.rank}, b{span.buffer}: step {span.step}, {words}, "
    canvas.rect(x, y, width, _ROW - 3, colour, tip + secs(span.end - span.start))
    if span.phase != "COPY" and width > 8 + 6 * len(str(span.step)):
        canvas.text(x + 4, y + 10, str(span.step), "ink", size=10)


def draw_stalls(history: History) -> Canvas:
    """What training waited for each save: the slowest rank, and the mean over ranks."""
    saves = [save for save in history.saves if save.stall_secs]
    chart = _Bars(
        "Stall per save: what training waited",
        saves,
        [max(save.stall_secs.values()) for save in saves],
        secs,
    )
    chart.canvas.legend(_LEFT, 40, [("copy", "slowest rank"), ("ink", "mean over ranks")])
    for number, save in enumerate(saves):
        worst = max(save.stall_secs, key=lambda r: (save.stall_secs[r], -r))
        mean = sum(save.stall_secs.values()) / len(save.stall_secs)
        tip = f"{_name(save)}: rank {worst} {secs(save.stall_secs[worst])}, mean {secs(mean)}"
        chart.bar(number, save.stall_secs[worst], "copy", tip)
        if len(save.stall_secs) > 1:
            chart.mark(number, mean, "ink")
    return chart.canvas


def draw_commits(history: History) -> Canvas:
    """How long each marked save took from the start of its persist, and what became of it."""
    saves = [save for save in history.saves if save.marked]

    def took(save: Save) -> float:
        return save.commit_secs or max(save.persist_secs.values(), default=0.0)

    chart = _Bars(
        "Persist and commit, per save that was marked to be persisted",
        saves,
        [took(save) for save in saves],
        secs,
    )
    chart.canvas.legend(_LEFT, 40, [*_FATES.values(), ("ink", "slowest rank's persist")])
    for number, save in enumerate(saves):
        fate = "failed" if save.fate == "abandoned" else save.fate
        colour, _ = _FATES[fate]
        tip = f"{_name(save)}: {save.fate}, {secs(took(save))}, {size(save.commit_bytes)}"
        if save.slowest_rank >= 0:
            tip += f", slowest rank {save.slowest_rank}: {secs(save.slowest_secs)}"
        chart.bar(number, took(save), colour, tip)
        if save.slowest_secs:
            chart.mark(number, save.slowest_secs, "ink")
        if fate != "committed":
            chart.cross(number)
    return chart.canvas


def draw_bytes(history: History) -> Canvas:
    """Bytes per rank and tier, summed over all saves."""
    ranks = sorted({r for a in history.attempts for r in a.ranks})

    def total(by_rank: Sequence[dict[int, int]]) -> list[int]:
        return [sum(numbers.get(rank, 0) for numbers in by_rank) for rank in ranks]

    tiers: list[tuple[Colour, str, list[int]]] = [
        ("copy", "to memory (snapshots)", total([s.snapshot_bytes for s in history.saves])),
        ("persist", "to storage (persists)", total([s.persist_bytes for s in history.saves])),
    ]
    shown = ranks[: 4 * _MOST_RANKS]
    most = max((n for _, _, numbers in tiers for n in numbers), default=0) or 1
    title = "Bytes per rank and tier, all saves"
    if len(shown) < len(ranks):
        title += f" (ranks {shown[0]} to {shown[-1]} of {len(ranks)})"
    canvas = Canvas(_WIDTH, _TOP + len(shown) * 36 + 4, title)
    canvas.text(0, 16, title, size=15, bold=True)
    canvas.legend(_LEFT, 40, [(colour, words) for colour, words, _ in tiers])
    for number, rank in enumerate(shown):
        y = _TOP + number * 36
        canvas.text(0, y + 17, f"rank {rank}")
        for tier, (colour, _, numbers) in enumerate(tiers):
            width = (_PLOT - 80) * numbers[number] / most
            canvas.rect(_LEFT, y + 14 * tier, max(width, 1), 12, colour)
            words = size(numbers[number])
            canvas.text(_LEFT + width + 6, y + 14 * tier + 10, words, "muted", size=10)
    return canvas


def draw_restores(history: History) -> Canvas:
    """What each restore read, and from where."""
    found = [(a.number, a.restored) for a in history.attempts if a.restored is not None]
    canvas = Canvas(_WIDTH, _TOP + len(found) * 44 + 4, "Restores and their sources")
    canvas.text(0, 16, canvas.title, size=15, bold=True)
    used = [name for name in _SOURCES if any(e.sources.get(name) for _, e in found)]
    canvas.legend(_LEFT, 40, [_SOURCES[name] for name in used])
    most = max((sum(e.sources.values()) for _, e in found), default=0) or 1
    for number, (attempt, event) in enumerate(found):
        y, x = _TOP + number * 44, float(_LEFT)
        canvas.text(0, y + 14, f"attempt {attempt}")
        for name in used:
            nbytes = event.sources.get(name, 0)
            width = _PLOT * nbytes / most
            colour, words = _SOURCES[name]
            canvas.rect(x, y, width, 18, colour, f"{words}: {size(nbytes)}")
            if width > 60:
                inside: Colour = "ink" if colour == "snapshot" else "paper"
                canvas.text(x + 6, y + 13, size(nbytes), inside, size=10)
            x += width
        words = (
            f"back to step {event.step}: {size(sum(event.sources.values()))} in {secs(event.secs)}"
        )
        if event.oldest_expert_age:
            words += f", oldest expert {event.oldest_expert_age} steps older"
        if event.slowest_rank >= 0:
            words += f", slowest load: rank {event.slowest_rank}, {secs(event.slowest_secs)}"
        canvas.text(_LEFT, y + 31, words, "muted", size=11)
    return canvas


class _Bars:
    """One bar per save, with axes."""

    def __init__(
        self,
        title: str,
        saves: Sequence[Save],
        heights: Sequence[float],
        unit: Callable[[float], str],
    ) -> None:
        self.canvas = canvas = Canvas(_WIDTH, _TOP + _HEIGHT + 46, title)
        self._slot = _PLOT / max(len(saves), 1)
        ticks = _ticks(max(heights, default=0.0) or 1.0, 4)
        self._top_value = max(*ticks, *heights, 1e-12)
        canvas.text(0, 16, title, size=15, bold=True)
        for value in ticks:
            y = self._y(value)
            canvas.line(_LEFT, y, _LEFT + _PLOT, y, "grid")
            canvas.text(_LEFT - 8, y + 4, unit(value), "muted", size=11, anchor="end")
        bottom, last, before = _TOP + _HEIGHT, -math.inf, None
        for number, save in enumerate(saves):
            x = _LEFT + (number + 0.5) * self._slot
            if before not in (None, save.attempt):
                edge = _LEFT + number * self._slot
                canvas.line(edge, _TOP - 12, edge, bottom, "bad")
                canvas.text(edge + 4, _TOP - 4, f"attempt {save.attempt}", "bad", size=11)
            before = save.attempt
            if x - last > 30:
                canvas.text(x, bottom + 15, str(save.step), size=10, anchor="middle")
                last = x
        canvas.text(_LEFT + _PLOT / 2, bottom + 34, "step", "muted", anchor="middle")

    def _y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / self._top_value)

    def bar(self, number: int, value: float, colour: Colour, tip: str) -> None:
        """The bar of a save."""
        width = min(max(self._slot * 0.7, 1.0), 40.0)
        x, y = _LEFT + (number + 0.5) * self._slot - width / 2, self._y(value)
        self.canvas.rect(x, y, width, max(_TOP + _HEIGHT - y, 1.0), colour, tip)

    def mark(self, number: int, value: float, colour: Colour) -> None:
        """A short line across the bar."""
        width = min(max(self._slot * 0.8, 2.0), 46.0)
        x, y = _LEFT + (number + 0.5) * self._slot, self._y(value)
        self.canvas.line(x - width / 2, y, x + width / 2, y, colour, 2)

    def cross(self, number: int) -> None:
        """Something went wrong there."""
        x, y = _LEFT + (number + 0.5) * self._slot, _TOP + _HEIGHT - 10
        for up in (-5, 5):
            self.canvas.line(x - 5, y - up, x + 5, y + up, "ink", 2.5)


def _name(save: Save) -> str:
    return f"step {save.step}, attempt {save.attempt}"


def _ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to no more than ``most``, about so many."""
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return [round(n * gap, 12) for n in range(int(most / gap + 1e-9) + 1)]
