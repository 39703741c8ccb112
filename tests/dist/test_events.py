"""One stream of events from four ranks and two attempts, and the report that is drawn from it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.job import Outcome, Spec, run_job, wait_at
from tests.support.orphans import wait_for_helpers

import moc
from moc.cli.main import main
from moc.core.faults import FaultScript
from moc.metrics.history import read_events
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

EACH = moc.Policy(
    snapshot_every=2, persist_every=4, k_snapshot=4, k_persist=2, keep_latest_k=1, timeout_secs=60
)
SLOW = 2
RETRIES_SECS = 0.15  # the shortest that two pauses between three tries can be


@pytest.fixture
def two_attempts(spec: Callable[..., Spec]) -> tuple[Spec, list[Outcome], list[Outcome]]:
    """A run whose second node is lost after step 8, and what the ranks saw before and after."""
    job = spec(policy=EACH, steps=8, after_step=wait_at(2, 4, 8))
    job = job.but(events=job.run_dir / "events.jsonl")
    # Twice in the persist of step 4: step 2 took four puts (a round, dense, experts, receipt).
    script = FaultScript(nth=5, verb="put_new", times=2)
    first = run_ranks(run_job, 4, job.but(faults=script, faulty_rank=SLOW, drain=False))
    wait_for_helpers(job.memory)
    shutil.rmtree(job.memory[1])
    second = run_ranks(run_job, 4, job.but(steps=12, after_step=wait_at(10, 12)))
    return job, first, second


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def of(outcomes: list[Outcome], kind: str, step: int) -> list[moc.Event]:
    return [e for o in outcomes for e in o.events if (e.kind, e.step) == (kind, step)]


def test_events_of_four_ranks_and_what_is_drawn_from_them(
    two_attempts: tuple[Spec, list[Outcome], list[Outcome]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, first, second = two_attempts
    _check_order(first)
    _check_slowest(first)
    _check_files(job, first, second)
    _check_restored(second)
    _check_report(job, tmp_path, capsys)


def _check_order(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        for step, marked in ((2, True), (4, True), (6, False), (8, True)):
            told = [e for e in outcome.events if e.step == step]
            order = ["snapshot_started", *["marked"] * marked, "snapshot_done"]
            order += [*["persisted"] * marked, *["committed"] * (marked and rank == 0)]
            assert [e.kind for e in told if e.kind in order] == order, (rank, step)
            times = [e.time for e in told if e.kind in order]
            assert times == sorted(times)
            assert sum(e.secs for e in told if e.kind == "stalled") > 0
            by_kind = {e.kind: e for e in told}
            done = by_kind["snapshot_done"]
            assert done.buffer == by_kind["snapshot_started"].buffer >= 0
            assert done.role == ("PERSIST" if marked else "SNAPSHOT")
            assert done.nbytes > 0
            assert {(e.attempt, e.rank) for e in told} == {(1, rank)}
    pruned = [e for o in outcomes for e in o.events if e.kind == "pruned"]
    assert {e.rank for e in pruned} == {0}
    assert all(e.secs > 0 for e in pruned)


def _check_slowest(outcomes: list[Outcome]) -> None:
    for step in (2, 4, 8):
        persisted = {e.rank: e for e in of(outcomes, "persisted", step)}
        assert sorted(persisted) == [0, 1, 2, 3]
        (commit,) = of(outcomes, "committed", step)
        slowest = max(persisted.values(), key=lambda e: (e.secs, -e.rank))
        assert (commit.slowest_rank, commit.slowest_secs) == (slowest.rank, slowest.secs)
        assert commit.nbytes == sum(e.nbytes for e in persisted.values())
    assert of(outcomes, "persisted", 4)[SLOW].secs >= RETRIES_SECS  # failed tries count
    (first,), (last,) = of(outcomes, "committed", 2), of(outcomes, "committed", 8)
    assert (first.oldest_expert_age, last.oldest_expert_age) == (0, 6)


def _check_files(job: Spec, first: list[Outcome], second: list[Outcome]) -> None:
    for rank in range(4):
        read, problems = read_events(str(job.run_dir / f"events-{rank:05d}.jsonl"))
        told = [*first[rank].events, *second[rank].events]
        assert problems == []
        assert read == sorted(told, key=lambda e: (e.attempt, e.time))


def _check_restored(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.report is not None
        (event,) = [e for e in outcome.events if e.kind == "restored"]
        assert (event.step, event.attempt, event.rank) == (8, 2, rank)
        assert event.sources == outcome.report.sources
        assert event.nbytes == sum(event.sources.values())
        assert event.oldest_expert_age == outcome.report.oldest_expert_age
        assert event.slowest_secs >= outcome.report.secs["load"] > 0
        assert "rewind loggers to it" in event.text
    told = {(o.report.slowest_rank, o.report.slowest_secs) for o in outcomes if o.report}
    assert len(told) == 1  # equal on all ranks
    ((rank, secs),) = told
    assert outcomes[rank].report.secs["load"] == secs


def _check_report(job: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, pictures = tmp_path / "report.html", tmp_path / "png"
    capsys.readouterr()
    assert report(job.run_dir, "-o", page, "--png", pictures, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["attempts"], facts["ranks"], facts["saves"]) == (2, 4, 6)
    read, _ = read_events(str(job.run_dir))
    commits = [e.step for e in read if e.kind == "committed"]
    assert (facts["committed"], facts["last_committed_step"]) == (len(commits), 12)
    assert (facts["failed"], facts["abandoned"], facts["not_resolved"]) == (0, 0, 0)
    assert [(r["attempt"], r["step"]) for r in facts["restores"]] == [(2, 8)]
    names = {"timeline-a0001", "timeline-a0002", "stalls", "commits", "bytes", "restores"}
    assert {p.stem for p in pictures.iterdir()} == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures.iterdir())
    _check_page(page.read_text("utf-8"), len(names))

    whole = (job.run_dir / "events-00000.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: -len(whole.splitlines()[-1]) // 2])
    assert report(cut, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 1
    assert "1 lines are no events" in facts["problems"][0]

    (tmp_path / "empty.jsonl").touch()
    assert report(tmp_path / "empty.jsonl", "-o", page) == 2
    assert "no event in" in capsys.readouterr().err
    assert report(job.run_dir, "-o", tmp_path / "no" / "such.html") == 2
    assert "cannot be written" in capsys.readouterr().err


def _check_page(page: str, pictures: int) -> None:
    """Whole, and with nothing that a browser would fetch."""
    assert not re.search(r"https?:|//|\bsrc=|\bhref=|url\(|@import|<link|<script", page)
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(found) == pictures
    for svg in found:
        root: Any = ET.fromstring(svg)
        assert root.get("aria-label")
        width, height = map(float, root.get("viewBox").split()[2:])
        for rect in root.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width + 1
            assert 0 <= y <= y + h <= height + 1


def test_the_report_needs_no_torch_and_no_matplotlib_for_its_page(tmp_path: Path) -> None:
    (tmp_path / "events-00000.jsonl").write_text(
        '{"kind":"snapshot_started","step":1,"attempt":1,"rank":0,"time":5.0,"buffer":0}\n'
        '{"kind":"stalled","step":1,"attempt":1,"rank":0,"time":6.0,"secs":0.5}\n'
    )
    code = (
        "import sys; from moc.cli.main import main; "
        f"code = main(['report', {str(tmp_path)!r}, '-o', {str(tmp_path / 'r.html')!r}]); "
        "sys.exit(code or ('torch' in sys.modules or 'matplotlib' in sys.modules) * 7)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "r.html").stat().st_size > 1000
