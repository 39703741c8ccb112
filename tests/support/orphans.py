"""Helper processes of a test's ranks, after the ranks are gone."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path

from moc.persist.client import orphans, stop


def helpers_of(node: Path) -> list[int]:
    """Process ids of the helpers that work on one node's memory."""
    return [pid for folder in node.glob("moc-*") for pid in orphans(str(folder))]


def lose_helpers(node: Path) -> None:
    """End a node's helpers at once."""
    stop(helpers_of(node), 10)


def wait_for_helpers(nodes: Iterable[Path], timeout_secs: float = 30) -> None:
    """Until all of them have finished what they had to do and have left."""
    for pid in [pid for node in nodes for pid in helpers_of(node)]:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            left, _, _ = select.select([descriptor], [], [], timeout_secs)
            assert left, f"helper {pid} does not leave"
        finally:
            os.close(descriptor)
