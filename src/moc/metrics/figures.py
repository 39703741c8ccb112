"""Events folded into named figures, and the two sinks that publish them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from moc.core.events import Event
from moc.metrics.sinks import rank_path

__all__ = ["FIGURES", "Figures", "PrometheusTextfileSink", "TensorBoardSink"]


class Figure(NamedTuple):
    """A figure: its TensorBoard and Prometheus names, its type, and what it says."""

    tag: str
    name: str
    type: Literal["gauge", "counter"]
    help: str


def _figure(short: str, name: str, text: str) -> Figure:
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return Figure(f"checkpoint/{short}", f"moc_{name}", kind, text)


FIGURES = tuple(
    _figure(*words)
    for words in (
        ("save_duration_s", "save_seconds", "What training waited for a save, on this rank."),
        (
            "save_async_duration_s",
            "save_async_seconds",
            "From the start of a snapshot to the commit; rank 0.",
        ),
        ("load_duration_s", "load_seconds", "Duration of the restore."),
        ("stall_total_s", "stall_seconds_total", "What training waited for all saves."),
        ("snapshot_duration_s", "snapshot_seconds", "Duration of the overlapped copy."),
        ("snapshot_bytes", "snapshot_bytes", "Bytes of this rank in a snapshot."),
        ("persist_duration_s", "persist_seconds", "Duration of this rank's persist."),
        ("persist_bytes", "persist_bytes", "Bytes that this rank wrote."),
        ("persist_bytes_per_s", "persist_bytes_per_second", "Speed of this rank's persist."),
        ("slowest_persist_s", "slowest_persist_seconds", "Longest persist of any rank; rank 0."),
        ("slowest_rank", "slowest_rank", "The rank with the longest persist; rank 0."),
        ("last_durable_step", "last_durable_step", "Newest committed step; rank 0."),
        ("age_steps", "age_steps", "Steps since the newest committed one; rank 0."),
        ("oldest_expert_age_steps", "oldest_expert_age_steps", "Age of the oldest expert; rank 0."),
        ("failures", "failures_total", "Saves that failed or were abandoned."),
        ("attempt", "attempt", "Number of this start of training."),
    )
)
"""All there are, in the order in which they are written."""


class Figures:
    """The figures of one rank, so far.

    Attributes:
        values: by TensorBoard tag.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.values: dict[str, float] = {}
        self._started: dict[int, float] = {}
        self._waited: dict[int, float] = {}
        self._newest = 0

    def update(self, event: Event) -> dict[str, float]:
        """Take an event in; the figures that it changed, by tag."""
        changed = {f"checkpoint/{k}": float(v) for k, v in self._fold(event).items()}
        self.values |= changed
        return changed

    def _fold(self, event: Event) -> dict[str, float]:
        step = event.step
        match event.kind:
            case "snapshot_started":
                self._newest = max(self._newest, step)
                self._started[step] = event.time
                return {"attempt": event.attempt, **self._age()}
            case "snapshot_done":
                return {"snapshot_duration_s": event.secs, "snapshot_bytes": event.nbytes}
            case "stalled":
                self._waited = {step: self._waited.get(step, 0.0) + event.secs}
                total = self._value("stall_total_s") + event.secs
                return {"save_duration_s": self._waited[step], "stall_total_s": total}
            case "persisted":
                speed = {"persist_bytes_per_s": event.nbytes / event.secs} if event.secs else {}
                return {"persist_duration_s": event.secs, "persist_bytes": event.nbytes, **speed}
            case "committed":
                return self._commit(event)
            case "failed" | "abandoned":
                return {"failures": self._value("failures") + 1}
            case "restored":
                age = event.oldest_expert_age
                return {
                    "attempt": event.attempt,
                    "load_duration_s": event.secs,
                    "oldest_expert_age_steps": age,
                }
        return {}

    def _commit(self, event: Event) -> dict[str, float]:
        found: dict[str, float] = {"oldest_expert_age_steps": event.oldest_expert_age}
        if event.step in self._started:
            found["save_async_duration_s"] = max(0.0, event.time - self._started[event.step])
        self._started = {s: t for s, t in self._started.items() if s > event.step}
        if event.slowest_rank >= 0:
            found |= {"slowest_rank": event.slowest_rank, "slowest_persist_s": event.slowest_secs}
        last = max(event.step, int(self._value("last_durable_step")))
        self.values["checkpoint/last_durable_step"] = last
        return {**found, "last_durable_step": last, **self._age()}

    def _age(self) -> dict[str, float]:
        last = self.values.get("checkpoint/last_durable_step")
        return {} if last is None else {"age_steps": self._newest - last}

    def _value(self, short: str) -> float:
        return self.values.get(f"checkpoint/{short}", 0.0)


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Of `torch.utils.tensorboard.SummaryWriter`, and of many others."""


class TensorBoardSink:
    """Gives every figure that an event changes to a writer, with the event's step.

    Args:
        writer: anything with ``add_scalar(tag, value, step)``.
    """

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._figures = Figures()

    def __call__(self, event: Event) -> None:
        """Add what the event changed."""
        for tag, value in self._figures.update(event).items():
            self._writer.add_scalar(tag, value, event.step)


class PrometheusTextfileSink:
    """Keeps a file for the textfile collector of Prometheus' node exporter up to date.

    Args:
        path: ``moc.prom`` becomes ``moc-00003.prom`` on rank 3, replaced as a whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._figures = Figures()

    def __call__(self, event: Event) -> None:
        """Write the figures, if the event changed any.

        Raises:
            OSError: the file could not be written; the manager warns once and goes on.
        """
        if not self._figures.update(event):
            return
        path = rank_path(self._path, event.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # the collector reads *.prom
        temp.write_text(_exposition(self._figures.values, event.rank), "ascii")
        temp.replace(path)

    def __repr__(self) -> str:
        return f"PrometheusTextfileSink({str(self._path)!r})"


def _exposition(values: dict[str, float], rank: int) -> str:
    lines = []
    for figure in FIGURES:
        if figure.tag in values:
            lines += [
                f"# HELP {figure.name} {figure.help}",
                f"# TYPE {figure.name} {figure.type}",
                f'{figure.name}{{rank="{rank}"}} {values[figure.tag]!r}',
            ]
    return "\n".join([*lines, ""])
