"""Sinks: what they write, and what they cost when they fail."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import Managers, adamw, dense, run_steps

import moc
from moc.core.faults import FaultScript
from moc.errors import ConfigError, SaveError
from moc.metrics import JsonlSink, LoggingSink, PrometheusTextfileSink, TensorBoardSink, fan_out
from moc.metrics.charts import draw_all
from moc.metrics.history import Save, fold, read_events
from moc.metrics.page import make_page, summary

_SAMPLE = re.compile(r'([a-z_:][a-z0-9_:]*)\{rank="(\d+)"\} (\S+)')


class Writer:
    """Takes scalars as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


def event(kind: Any, step: int = 1, *, attempt: int = 1, rank: int = 0, **facts: Any) -> moc.Event:
    return moc.Event(kind=kind, step=step, attempt=attempt, rank=rank, **facts)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parse_exposition(text: str) -> dict[str, tuple[str, int, float]]:
    """Prometheus' text format, strictly: HELP, TYPE, one sample; type, rank and value by name."""
    found: dict[str, tuple[str, int, float]] = {}
    assert text.endswith("\n")
    rest = iter(text.splitlines())
    for told in rest:
        _, word, name, help_text = told.split(" ", 3)
        assert (told[0], word) == ("#", "HELP")
        assert help_text
        kind = next(rest).removeprefix(f"# TYPE {name} ")
        assert kind in ("gauge", "counter")
        assert (kind == "counter") == name.endswith("_total")
        sample = _SAMPLE.fullmatch(next(rest))
        assert sample is not None
        assert sample[1] == name
        assert name not in found
        found[name] = (kind, int(sample[2]), float(sample[3]))
    return found


def test_a_run_fills_every_sink(managers: Managers, tmp_path: Path) -> None:
    model, writer = dense(), Writer()
    optimizer = adamw(model)
    told: list[moc.Event] = []
    sinks = fan_out(
        told.append,
        JsonlSink(tmp_path / "e" / "events.jsonl"),
        TensorBoardSink(writer),
        PrometheusTextfileSink(tmp_path / "p" / "moc.prom"),
    )
    with managers(model, optimizer, on_event=sinks) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3], after=lambda _: manager.wait())
    again = dense()
    with managers(again, adamw(again), on_event=sinks) as manager:
        assert manager.restore() is not None

    read, problems = read_events(str(tmp_path / "e"))
    assert problems == []
    assert sorted(read, key=lambda e: e.time) == sorted(told, key=lambda e: e.time)
    assert all(e.time > 0 for e in read)

    by_kind = {e.kind: e for e in told}
    scalars = writer.scalars
    assert [step for step, _ in scalars["checkpoint/last_durable_step"]] == [1, 2, 3]
    assert [v for _, v in scalars["checkpoint/age_steps"]] == [0, 1, 0, 1, 0]
    assert scalars["checkpoint/load_duration_s"] == [(3, by_kind["restored"].secs)]
    stalled = sum(e.secs for e in told if (e.kind, e.step) == ("stalled", 3))
    assert scalars["checkpoint/save_duration_s"][-1] == (3, pytest.approx(stalled))
    waited = sum(e.secs for e in told if e.kind == "stalled")
    assert scalars["checkpoint/stall_total_s"][-1][1] == pytest.approx(waited)
    persisted = by_kind["persisted"]
    assert scalars["checkpoint/persist_bytes_per_s"][-1] == (
        3,
        pytest.approx(persisted.nbytes / persisted.secs),
    )
    assert by_kind["committed"].slowest_rank == 0
    assert by_kind["committed"].slowest_secs == persisted.secs

    found = parse_exposition((tmp_path / "p" / "moc-00000.prom").read_text("ascii"))
    assert {f"checkpoint/{n}" for n in ("failures",)} & scalars.keys() == set()
    assert found["moc_last_durable_step"] == ("gauge", 0, 3.0)
    assert found["moc_attempt"][2] == 2
    assert found["moc_stall_seconds_total"] == ("counter", 0, pytest.approx(waited))
    assert len(found) == len(scalars)
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["moc-00000.prom"]


def test_a_step_made_again_is_told_apart_by_its_attempt(tmp_path: Path) -> None:
    for attempt in (1, 2):
        JsonlSink(tmp_path / "events.jsonl")(event("snapshot_done", 7, attempt=attempt, rank=3))
    told = lines(tmp_path / "events-00003.jsonl")
    assert [(e["step"], e["attempt"]) for e in told] == [(7, 1), (7, 2)]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    JsonlSink(tmp_path / "events.jsonl")(event("marked", 1))
    path.write_bytes(path.read_bytes() + b'{"kind":"committ')
    JsonlSink(tmp_path / "events.jsonl")(event("marked", 2, attempt=2))
    read, problems = read_events(str(path))
    assert [e.step for e in read] == [1, 2]
    assert len(problems) == 1
    assert "1 lines" in problems[0]
    assert problems[0].endswith(": 2")


def test_a_sink_that_raises_is_named_once_and_costs_nothing_else(
    managers: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept: list[moc.Event] = []
    broken = JsonlSink(tmp_path / "file" / "events.jsonl")

    def grumble(_: moc.Event) -> None:
        raise KeyError("nothing")

    model = dense()
    optimizer = adamw(model)
    # Every put fails: what the save has to say must come through beside the sinks' own trouble.
    script = FaultScript(nth=1, verb="put_new", times=0)
    sinks = fan_out(broken, grumble, kept.append)
    manager = managers(model, optimizer, on_event=sinks, faults=script)
    with caplog.at_level(logging.WARNING, "moc"), pytest.raises(SaveError, match="scripted fault"):
        run_steps(manager, model, optimizer, [1], after=lambda _: manager.wait())
    assert "failed" in {e.kind for e in kept}
    grumbles = [r.getMessage() for r in caplog.records if "goes on without it" in r.getMessage()]
    assert len(grumbles) == 2
    assert f"JsonlSink('{tmp_path}/file/events.jsonl')" in grumbles[0]
    assert "grumble" in grumbles[1]


def test_a_callback_of_ones_own_that_raises_is_no_end_of_training(managers: Managers) -> None:
    def grumble(_: moc.Event) -> None:
        raise ValueError("no")

    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer, on_event=grumble) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    assert managers(dense(), ()).latest_step() == 2


def test_a_receipt_whose_answer_was_lost_is_the_same_receipt(managers: Managers) -> None:
    """The second try takes another time, and finds the first one's receipt."""
    model = dense()
    optimizer = adamw(model)
    told: list[moc.Event] = []
    script = FaultScript(nth=2, verb="put_new", when="after")  # the first put is the dense file
    with managers(model, optimizer, on_event=told.append, faults=script) as manager:
        run_steps(manager, model, optimizer, [1])
    (warning,) = [e for e in told if e.kind == "warning"]
    assert ".receipt" in warning.text
    assert [e.step for e in told if e.kind == "committed"] == [1]


def test_a_disk_that_is_full_for_a_while_costs_the_lines_of_that_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink(event("marked", 1))
    whole = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: whole(fd, data[:9]))
        with pytest.raises(OSError, match="part of a line"):
            sink(event("marked", 2))
    sink(event("marked", 3))
    read, problems = read_events(str(tmp_path / "events-*.jsonl"))
    assert [e.step for e in read] == [1, 3]
    assert len(problems) == 1


def test_rank_0_and_trouble_are_logged_the_others_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = LoggingSink(logging.getLogger("of.somebody"))
    with caplog.at_level(logging.DEBUG, "of.somebody"):
        sink(event("committed", 5, secs=1.5, nbytes=2_000_000, slowest_rank=3, slowest_secs=1.25))
        sink(event("persisted", 5, rank=3))
        sink(event("torn", 5, rank=3))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "INFO",
            "moc: committed, step 5, rank 0; 2.0 MB; 1.500 s; slowest rank 3, 1.250 s",
        ),
        ("DEBUG", "moc: persisted, step 5, rank 3"),
        ("WARNING", "moc: torn, step 5, rank 3"),
    ]


def test_buffers_turn_from_phase_to_phase() -> None:
    def save(step: int, at: float, buffer: int, role: str) -> list[moc.Event]:
        return [
            event("snapshot_started", step, time=at, buffer=buffer, role="SNAPSHOT"),
            event("snapshot_done", step, time=at + 1, buffer=buffer, role=role),
        ]

    history = fold(
        [
            *save(1, 10, 0, "PERSIST"),
            event("committed", 1, time=13),
            *save(2, 14, 1, "SNAPSHOT"),
            *save(3, 16, 2, "PERSIST"),
            event("committed", 3, time=20),
            *save(4, 21, 1, "PERSIST"),
            event("abandoned", 4, time=23, text="rank 1 is missing"),
            event("stalled", 4, time=24, secs=0.5),
        ]
    )
    spans = [(s.buffer, s.step, s.phase, s.start, s.end) for s in history.attempts[0].spans]
    assert sorted(spans) == [
        (0, 1, "COPY", 10, 11),
        (0, 1, "PERSIST", 11, 13),
        (0, 1, "RECOVERY", 13, 20),
        (0, 1, "SNAPSHOT", 20, 24),
        (1, 2, "COPY", 14, 15),
        (1, 2, "SNAPSHOT", 15, 21),
        (1, 4, "COPY", 21, 22),
        (1, 4, "PERSIST", 22, 23),
        (1, 4, "SNAPSHOT", 23, 24),
        (2, 3, "COPY", 16, 17),
        (2, 3, "PERSIST", 17, 20),
        (2, 3, "RECOVERY", 20, 24),
    ]
    assert isinstance(history.saves[3], Save)
    assert history.saves[3].why == "rank 1 is missing"


def test_a_long_run_of_many_ranks_is_drawn_in_part_and_says_so() -> None:
    events = [
        event(kind, step, rank=rank, time=step + late, buffer=step % 3, nbytes=5, secs=late)
        for rank in range(40)
        for step in range(1, 91)
        for kind, late in (("snapshot_started", 0.1), ("snapshot_done", 0.3), ("stalled", 0.2))
    ]
    charts = draw_all(fold(events))
    assert "ranks 0 to 7 of 40; the last 40 of 90 saves" in charts["timeline-a0001"].title
    assert "ranks 0 to 31 of 40" in charts["bytes"].title


def test_what_a_text_says_is_never_markup() -> None:
    history = fold([event("warning", text="<script>alert(1)</script> & more")])
    page = make_page("<b>run</b>", history, draw_all(history).values(), ["<i>"])
    assert "<script" not in page
    assert "<b>run" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert summary(history)["saves"] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.jsonl", "no file is named"),
        ("none-*.jsonl", "no file is named"),
        ("folder", "no events-"),
        ("empty.jsonl", "no event in"),
        ("s3://bucket/run", "local disk"),
    ],
)
def test_nothing_to_read_is_one_clear_error(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=said):
        read_events(name if "://" in name else str(tmp_path / name))
