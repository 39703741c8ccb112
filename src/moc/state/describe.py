"""What was recognised, for people, before a step is spent: the dry run."""

from __future__ import annotations

from moc.core.piece import DENSE, WEIGHT
from moc.state.experts import dry_run_table
from moc.state.live import LiveState

__all__ = ["describe"]

_SHOWN = 20


def describe(live: LiveState) -> str:
    """One line per kind of parameter, then what is treated otherwise than one might think.

    Optimizer state is listed once it is there: state of an expert that has neither its parameter's
    shape nor a leading dimension over the experts (Adafactor's factors, 8-bit blocks) cannot be
    cut by expert; it is dense, so every save holds all of it.
    """
    rows = dry_run_table(live.experts, live.shapes)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name:<{width}}  {verdict}" for name, verdict in rows]
    experts = {live.global_name(name) for name in live.experts.entries}
    uncut: dict[str, list[str]] = {}
    for region in live.regions():
        is_state = region.part not in (WEIGHT, "step") and region.fqn in experts
        if is_state and region.layer == DENSE:
            uncut.setdefault(region.fqn, []).append(region.part)
    told = [
        (
            "optimizer state of experts that is dense all the same",
            [f"{name} ({', '.join(parts)})" for name, parts in sorted(uncut.items())],
        ),
        ("parameters whose master copy is saved", list(map(live.global_name, live.masters))),
        ("parameters left out as frozen", live.frozen),
        ("buffers left out (not persistent, outside MoE layers)", live.left_out),
    ]
    for title, names in told:
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{title} ({len(names)}): {'; '.join(names[:_SHOWN])}{more}")
    return "\n".join(lines)
