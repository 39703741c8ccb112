"""What a rank tells the demo: one JSON line per happening, appended to a file of its own.

A line is one write, so that a rank killed at any moment leaves at most one line that is cut off;
the next writer starts on a fresh line and readers pass over what they cannot read. ``at`` is the
machine's monotonic clock: records of several ranks can be put in order. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from moc.core.events import Event
from moc.engine.report import RestoreReport

__all__ = ["Journal", "Tail"]


class Journal:
    """Appends records to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._fd, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record."""
        os.write(
            self._fd, json.dumps({"kind": kind, "at": time.monotonic(), **fields}).encode() + b"\n"
        )

    def write_event(self, event: Event) -> None:
        """Append an event of the manager."""
        fields = {field: getattr(event, field) for field in event.__struct_fields__}
        self.write("event", event=fields.pop("kind"), **fields)

    def write_report(self, report: RestoreReport | None) -> None:
        """Append what a restore found, None where there was nothing."""
        fields = (
            {name: getattr(report, name) for name in report.__struct_fields__} if report else None
        )
        self.write("ready", report=fields)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


class Tail:
    """Reads what was appended since the last look; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New whole records, in order."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [record for line in data[:whole].splitlines() if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
