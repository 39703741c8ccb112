"""The fault of the demo: one of two virtual nodes is lost with all that it had in memory."""

from __future__ import annotations

import time

from moc.demo.launch import Launch, NodeLoss
from moc.demo.runlog import RunLog
from moc.demo.screen import Screen, named_sources

__all__ = ["NODES", "RANKS", "NodeFault"]

RANKS, NODES = 4, 2
_VICTIMS = range(RANKS // NODES, RANKS)  # node 1


class NodeFault:
    """Waits for the moment, destroys node 1, and tells of the return.

    Attributes:
        loss: what was destroyed, None before.
        recovery_secs: from then to the first step after it, None before.
    """

    def __init__(self, launch: Launch, *, not_before: int, screen: Screen) -> None:
        self.loss: NodeLoss | None = None
        self.recovery_secs: float | None = None
        self._launch, self._not_before, self._screen = launch, not_before, screen

    def poll(self) -> None:
        """Look whether it is time for the next act."""
        log = self._launch.log
        if self.loss is None:
            if log.may_lose_node(self._not_before):
                self.loss = self._launch.lose_node(_VICTIMS, node=1)
                _tell_loss(self._screen, self.loss)
        elif self.recovery_secs is None and len(log.curves) > 1 and log.curves[-1]:
            self.recovery_secs = time.monotonic() - self.loss.at
            _tell_restore(self._screen, log, self.recovery_secs)
        restarting = self.loss is not None and self.recovery_secs is None
        self._screen.update(log, waiting="restarting" if restarting else "")


def _tell_loss(screen: Screen, loss: NodeLoss) -> None:
    screen.line(
        f"step {loss.step:>5}  NODE 1 LOST    ranks {_VICTIMS[0]} and {_VICTIMS[-1]} and their "
        f"helpers killed ({loss.processes} processes), their memory wiped "
        f"({loss.nbytes / 1e6:.1f} MB)",
        style="bold red",
    )


def _tell_restore(screen: Screen, log: RunLog, secs: float) -> None:
    report = log.reports[-1]
    if report is None:
        screen.line("nothing to restore was found; started again", style="bold red")
        return
    screen.line(
        f"step {report['step']:>5}  restored       training goes on {secs:.1f} s after the loss "
        f"(restore itself {report['secs']['total']:.2f} s)",
        style="bold green",
    )
    for name, sources in report["by_class"].items():
        screen.line(f"            {name}: {named_sources(sources)}", style="green")
    for reason in report["reasons"]:
        screen.line(f"            {reason}", style="green")
