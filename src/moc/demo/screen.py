"""What the user of ``moc demo`` sees: progress while it runs, a table at the end."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from moc.demo.runlog import RunLog

__all__ = ["Screen", "named_sources", "result_table"]


class Screen:
    """Progress of one run at a time, with lines above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    def begin(self, title: str, steps: int) -> None:
        """Start the bar of a run."""
        self.console.print(f"\n[bold]{title}[/bold]")
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting processes", total=steps, figures="")
        self._progress.start()

    def update(self, log: RunLog, *, waiting: str = "") -> None:
        """Move the bar to where the run is."""
        if self._progress is None:
            return
        figures = ""
        if log.curves and log.curves[-1]:
            figures = f"loss {log.curves[-1][-1][1]:.3f}  {log.rate:,.0f} tokens/s"
        text = waiting or ("training" if log.curves else "starting processes")
        self._progress.update(self._task, completed=log.step, description=text, figures=figures)

    def line(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self.console.print(f"  {text}", style=style, highlight=False, soft_wrap=True)

    def __enter__(self) -> Screen:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def result_table(result: dict[str, Any]) -> Table:
    """The figures at the end, all measured in these two runs."""
    table = Table(title="What it cost", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    undisturbed, faulted = result["undisturbed"], result["faulted"]
    sizes, stalls = result["bytes"], result["stall_secs"]
    difference = faulted["val_loss"] - undisturbed["val_loss"]
    table.add_row(
        "final validation loss",
        f"{undisturbed['val_loss']:.4f} undisturbed, {faulted['val_loss']:.4f} with the lost node "
        f"({difference:+.4f})",
    )
    table.add_row(
        "one checkpoint",
        f"{sizes['partial'] / 1e6:.1f} MB partial, {sizes['full'] / 1e6:.1f} MB full "
        f"({sizes['partial'] / sizes['full']:.0%})",
    )
    table.add_row(
        "training stood still per save",
        f"{_secs(stalls['moc'])} with MoC, {_secs(stalls['blocking'])} with a blocking save of "
        "the whole state (medians)",
    )
    resumed, lost = faulted["resumed_at"], faulted["fault_steps"]
    table.add_row(
        "node lost, resumed",
        ", ".join(
            f"after step {fault}, from step {step} ({fault - step} steps trained twice)"
            for fault, step in zip(lost, resumed, strict=True)
        ),
    )
    table.add_row("back at work after", _recovery(result))
    for name, sources in result["by_class"].items():
        table.add_row(f"{name} restored from", named_sources(sources))
    table.add_row("oldest expert", f"{result['oldest_expert_age_steps']} steps behind")
    table.add_row("tokens lost to experts", f"{result['lost_tokens']:,} (PLT {result['plt']:.2%})")
    return table


def _recovery(result: dict[str, Any]) -> str:
    restore = result["restore_secs"]
    told = f"{result['recovery_secs']:.1f} s, nearly all of it new processes starting"
    return told if restore is None else f"{told}; the restore itself took {restore:.2f} s"


def _secs(secs: float | None) -> str:
    return "?" if secs is None else f"{1000 * secs:.1f} ms"


def named_sources(sources: dict[str, int]) -> str:
    """Where bytes came from, for people."""
    words = {
        "memory": "memory, same step",
        "memory_older": "memory, older step",
        "peer": "a peer's memory, same step",
        "peer_older": "a peer's memory, older step",
        "storage": "storage, same step",
        "storage_older": "storage, older step",
    }
    parts = [
        f"{nbytes / 1e6:.1f} MB {words.get(name, name)}"
        for name, nbytes in sources.items()
        if nbytes
    ]
    return "; ".join(parts) or "nothing"
