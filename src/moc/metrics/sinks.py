"""Where events go: to several callbacks, to a logger, to a file of JSON lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from moc.core.events import Event

__all__ = ["JsonlSink", "LoggingSink", "Sink", "fan_out", "rank_path"]

log = logging.getLogger("moc")

Sink = Callable[[Event], None]

_LOUD = ("failed", "torn", "abandoned", "preempted", "warning")


def fan_out(*sinks: Sink) -> Sink:
    """One callback that calls several, in order.

    A sink that raises does not keep an event from the others, nor does it stop training: it is
    named in one warning, and called again at the next event.
    """
    broken: set[int] = set()

    def deliver(event: Event) -> None:
        for number, sink in enumerate(sinks):
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, training comes first
                if number not in broken:
                    broken.add(number)
                    log.warning(
                        "moc: %s fails, training goes on without it (said once): %s: %s",
                        _name(sink),
                        type(error).__name__,
                        error,
                    )

    return deliver


class LoggingSink:
    """A log line per event: rank 0 at INFO, the others at DEBUG, trouble of any rank at WARNING.

    The manager has one for the logger ``moc``; another one is for another logger.
    """

    def __init__(self, logger: logging.Logger = log) -> None:
        self._logger = logger

    def __call__(self, event: Event) -> None:
        """Log an event."""
        level = logging.INFO if event.rank == 0 else logging.DEBUG
        self._logger.log(logging.WARNING if event.kind in _LOUD else level, "%s", _line(event))


class JsonlSink:
    """Appends a JSON object per event to a file of this rank; ``moc report`` reads them.

    A line is one write, so a rank that is killed leaves one line cut off at most; the next start
    goes on below it. Steps that a restart makes again appear twice, with two attempt numbers.

    Args:
        path: ``events.jsonl`` becomes ``events-00003.jsonl`` on rank 3. The folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._fd = -1
        self._is_cut = False

    def __call__(self, event: Event) -> None:
        """Append an event.

        Raises:
            OSError: it could not be written; the manager warns once and goes on.
        """
        if self._fd < 0:
            self._open(event.rank)
        line = b"\n" * self._is_cut + msgspec.json.encode(event) + b"\n"
        self._is_cut = True
        if os.write(self._fd, line) != len(line):
            raise OSError(f"only a part of a line could be written to {self._path}")
        self._is_cut = False

    def __repr__(self) -> str:
        return f"JsonlSink({str(self._path)!r})"

    def _open(self, rank: int) -> None:
        path = rank_path(self._path, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        self._is_cut = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


def rank_path(path: Path, rank: int) -> Path:
    """The file of one rank: ``events.jsonl`` gives ``events-00003.jsonl``."""
    return path.with_name(f"{path.stem}-{rank:05d}{path.suffix}")


def _name(sink: Sink) -> str:
    return getattr(sink, "__qualname__", None) or repr(sink)


def _line(event: Event) -> str:
    """An event for people: who speaks, what happened, and figures where there are any."""
    parts = [f"moc: {event.kind.replace('_', ' ')}, step {event.step}, rank {event.rank}"]
    if event.text:
        parts.append(event.text)
    if event.nbytes:
        parts.append(f"{event.nbytes / 1e6:.1f} MB")
    if event.secs:
        parts.append(f"{event.secs:.3f} s")
    if event.slowest_rank >= 0:
        parts.append(f"slowest rank {event.slowest_rank}, {event.slowest_secs:.3f} s")
    return "; ".join(parts)
