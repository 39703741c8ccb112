"""One HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from moc.metrics.canvas import DARK, LIGHT, Canvas, Colour
from moc.metrics.charts import secs, size
from moc.metrics.history import History

__all__ = ["make_page", "summary"]

_STYLE = """\
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ margin: 2rem auto; max-width: 1000px; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
h1 {{ font-size: 1.4rem; margin-bottom: 0; }}
figure {{ margin: 2.2rem 0; }} svg {{ width: 100%; height: auto; display: block; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }}
.tiles div {{ border: 1px solid var(--grid); border-radius: 8px; padding: .5rem .9rem; }}
.tiles b {{ display: block; font-size: 1.25rem; }} .muted, .tiles span {{ color: var(--muted); }}
table {{ border-collapse: collapse; font-size: 13px; }}
td, th {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); }}
ul {{ font-size: 13px; }} summary {{ cursor: pointer; margin: 1rem 0 .5rem; }}
"""


def summary(history: History) -> dict[str, object]:
    """The figures of a whole run, for a program."""
    saves = history.saves
    stalls = [max(save.stall_secs.values()) for save in saves if save.stall_secs]
    fates = [save.fate for save in saves]
    done = [save for save in saves if save.fate == "committed"]
    return {
        "attempts": len(history.attempts),
        "ranks": len({r for a in history.attempts for r in a.ranks}),
        "saves": len(saves),
        "committed": fates.count("committed"),
        "failed": fates.count("failed"),
        "abandoned": fates.count("abandoned"),
        "not_resolved": fates.count("not resolved"),
        "last_committed_step": max((s.step for s in done), default=None),
        "stall_secs_total": sum(stalls),
        "stall_secs_worst": max(stalls, default=0.0),
        "committed_bytes": sum(save.commit_bytes for save in done),
        "restores": [
            {
                "attempt": a.number,
                "step": a.restored.step,
                "secs": a.restored.secs,
                "sources": a.restored.sources,
                "oldest_expert_age_steps": a.restored.oldest_expert_age,
            }
            for a in history.attempts
            if a.restored is not None
        ],
    }


def make_page(
    title: str, history: History, charts: Iterable[Canvas], problems: Sequence[str]
) -> str:
    """The page.

    Args:
        title: its heading.
        history: for the figures, the table and the list of troubles.
        charts: pictures, in order.
        problems: what could not be read.
    """
    facts = summary(history)
    lost = len(history.saves) and sum(s.fate in ("failed", "abandoned") for s in history.saves)
    tiles = {
        "attempts": facts["attempts"],
        "ranks": facts["ranks"],
        "saves": facts["saves"],
        "committed": facts["committed"],
        "failed or abandoned": lost,
        "last committed step": facts["last_committed_step"] or "none",
        "stall in all": secs(float(str(facts["stall_secs_total"]))),
        "worst stall": secs(float(str(facts["stall_secs_worst"]))),
        "committed bytes": size(float(str(facts["committed_bytes"]))),
    }
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE.format(light=_variables(LIGHT), dark=_variables(DARK))}</style></head>",
        f"<body><h1>Checkpoints of {escape(title)}</h1>",
        '<div class="tiles">',
        *(f"<div><b>{v}</b><span>{escape(k)}</span></div>" for k, v in tiles.items()),
        "</div>",
        *(f'<p class="muted">{escape(line)}</p>' for line in problems),
        *(f"<figure>{chart.to_svg()}</figure>" for chart in charts),
        _troubles(history),
        _table(history),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _variables(colours: Mapping[Colour, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _troubles(history: History) -> str:
    if not history.troubles:
        return ""
    lines = [
        f"<li>attempt {e.attempt}, step {e.step}, rank {e.rank}: <b>{e.kind}</b> "
        f"{escape(e.text)}</li>"
        for e in history.troubles
    ]
    return (
        f"<details open><summary>{len(lines)} warnings and failures</summary><ul>"
        + "\n".join(lines)
        + "</ul></details>"
    )


def _table(history: History) -> str:
    names = (
        "attempt",
        "step",
        "fate",
        "worst stall",
        "longest copy",
        "bytes in memory",
        "commit",
        "bytes in storage",
        "slowest rank",
    )
    rows = [
        (
            save.attempt,
            save.step,
            save.fate,
            secs(max(save.stall_secs.values(), default=0.0)),
            secs(max(save.snapshot_secs.values(), default=0.0)),
            size(sum(save.snapshot_bytes.values())),
            secs(save.commit_secs) if save.commit_secs else "",
            size(save.commit_bytes) if save.commit_bytes else "",
            f"{save.slowest_rank}: {secs(save.slowest_secs)}" if save.slowest_rank >= 0 else "",
        )
        for save in history.saves
    ]
    return "\n".join(
        [
            "<details><summary>all saves</summary><table>",
            "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>",
            *("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows),
            "</table></details>",
        ]
    )
