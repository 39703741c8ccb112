"""One picture of both runs: their losses, the difference, and where the node was lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moc.demo.runlog import RunLog

__all__ = ["draw", "smooth"]

_WINDOW = 9
_UNDISTURBED, _FAULTED, _FAULT = "#4c72b0", "#dd8452", "#c44e52"


def smooth(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Mean of the last values at each place, of fewer at the start."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    ]


def draw(target: Path, undisturbed: RunLog, faulted: RunLog, fault_steps: Sequence[int]) -> bool:
    """Write the picture as PNG.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = dict(undisturbed.curves[0])
    upper.plot(
        list(reference), smooth(list(reference.values())), color=_UNDISTURBED, label="undisturbed"
    )
    label = "with a lost node"
    history: list[tuple[int, float]] = []
    for curve in faulted.curves:
        steps = [step for step, _ in curve]
        history = [item for item in history if item[0] < min(steps, default=0)] + curve
        losses = smooth([loss for _, loss in history])[-len(steps) :]
        upper.plot(steps, losses, color=_FAULTED, linestyle="--", label=label)
        label = ""
        lower.plot(
            steps, [loss - reference[step] for step, loss in curve], color=_FAULTED, linewidth=0.9
        )
    for log, colour in ((undisturbed, _UNDISTURBED), (faulted, _FAULTED)):
        held_out = [*log.validation.items(), (max(reference), (log.final or {})["val_loss"])]
        upper.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=4, fillstyle="none")
    upper.plot([], [], "o", color="grey", fillstyle="none", label="on held-out text")
    for axis in (upper, lower):
        for fault, report in zip(fault_steps, faulted.reports[1:], strict=False):
            resumed = report["step"] if report else 0
            axis.axvline(fault, color=_FAULT, linewidth=1.2)
            axis.axvspan(resumed, fault, color=_FAULT, alpha=0.15, linewidth=0)
        axis.grid(alpha=0.3)
    for fault in fault_steps:
        upper.annotate(
            f"node lost at step {fault}",
            (fault, 0.6),
            (4, 0),
            color=_FAULT,
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
    lower.axhline(0, color="grey", linewidth=0.8)
    upper.set_ylabel(f"training loss, nats per byte\n(mean of {_WINDOW} steps)")
    lower.set_ylabel("difference, per step")
    lower.set_xlabel("step (shaded: trained twice)")
    upper.legend(loc="upper right")
    upper.set_title("The same training twice: undisturbed, and with half of its processes lost")
    figure.savefig(target, dpi=120)
    return True
