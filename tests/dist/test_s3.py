"""A run in a bucket, over HTTP: killed in the middle of a persist, restored from it alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, wait_at
from tests.support.orphans import wait_for_helpers
from tests.support.s3 import Server
from tests.support.start import Start, alone

import moc
from moc.cli.main import main
from moc.core.faults import FaultScript
from moc.core.manifest import step_dir
from moc.persist.commit import load_manifest, load_timeline, versions_in
from moc.store import open_store
from moc.testing.ranks import Died, run_ranks

pytestmark = pytest.mark.dist

PARTIAL = moc.Policy(
    snapshot_every=2,
    persist_every=2,
    k_snapshot=4,
    k_persist=2,
    keep_latest_k=2,
    timeout_secs=60,
    grace_secs=5,
)
DIES_AT = 8


def _die(_rank: int, step: int, manager: Any) -> None:
    """Every commit before is waited for; in the one of this step a helper dies, and all ranks."""
    if step in (2, 4, 6):
        manager.wait()
    if step == DIES_AT + 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_and_restored(
    spec: Spec, before: Callable[[str], None] = lambda _method: None
) -> list[Outcome]:
    """What four ranks have after such a death, from storage alone, and four steps later."""
    # Three objects of each persist are rank 2's: the second of the fourth persist is its last.
    script = FaultScript(nth=3 * 3 + 2, verb="put_new", error="kill")
    first = spec.but(steps=12, after_step=_die, faults=script, faulty_rank=2)
    before("GET")  # a put that is tried again would count
    died = run_ranks(run_job, 4, first, allow_death=True, timeout_secs=100)
    assert died == [Died(rank=rank, signal=signal.SIGKILL) for rank in range(4)]
    wait_for_helpers(spec.memory)
    for node in spec.memory:
        shutil.rmtree(node)
    before("")
    return run_ranks(
        run_job, 4, spec.but(steps=10, after_step=wait_at(8, 10), record=(10,)), timeout_secs=100
    )


@pytest.mark.slow
def test_killed_in_the_middle_of_a_persist_and_restored_from_the_bucket_alone(
    spec: Callable[..., Spec], bucket: str, s3_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte is what a folder gives, while every ninth request fails; then the command line."""
    job = spec(policy=PARTIAL)
    twin = replace(
        job, run_dir=job.run_dir.parent / "twin", memory=tuple(m / "twin" for m in job.memory)
    )
    wanted = _killed_and_restored(twin)
    counted: list[int] = []

    def fail(method: str) -> None:
        counted.append(s3_server.counted())
        s3_server.script(every=9, status=503, **({"method": method} if method else {}))

    found = _killed_and_restored(job.but(run_dir=f"{bucket}/run"), fail)
    counted.append(s3_server.counted())
    s3_server.script()
    assert min(counted[1:]) > 50  # of which one in nine failed
    assert found[0].report.step == wanted[0].report.step == DIES_AT - 2
    assert found[0].report.stale_experts == wanted[0].report.stale_experts > 0
    assert found[0].report.sources["memory"] == 0
    assert_equal(merged(o.restored for o in found), merged(o.restored for o in wanted))
    assert_equal(merged(o.states[10] for o in found), merged(o.states[10] for o in wanted))
    assert [o.losses for o in found] == [o.losses for o in wanted]

    url = f"{bucket}/run"
    store = open_store(url)
    timeline = load_timeline(store)
    steps = [v for v in versions_in(store) if store.exists(f"{step_dir(v)}/manifest.json")]
    assert [v.step for v in steps] == [8, 10]  # keep_latest_k=2
    assert all(timeline.is_live(v) for v in steps)
    capsys.readouterr()
    assert main(["ls", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [s["step"] for s in listed["steps"]] == [8, 10]
    assert main(["verify", url]) == 0
    assert main(["show", url]) == 0
    # One flipped byte of a data file, under the same key, is found and named.
    key = next(f.key for f in load_manifest(store, steps[-1]).files)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, data)
    capsys.readouterr()
    assert main(["verify", url]) == 1
    assert key in capsys.readouterr().out



def test_what_a_save_costs_in_requests(
    spec: Callable[..., Spec], bucket: str, s3_server: Server
) -> None:
    """The numbers of docs/storage.md, for one rank that writes two files, and retention."""

    def cost(job: Spec, steps: range) -> Counter[str]:
        with Start(job, f"{bucket}/run") as start:
            start.manager.restore()
            s3_server.script()
            start.train(*steps)
            start.manager.close()
        return Counter(
            "LIST" if "list-type" in request else request.split()[0]
            for request in s3_server.requests()
        )

    def work(job: Spec) -> None:
        cost(job, range(1, 13))
        one, five = cost(job, range(13, 15)), cost(job, range(15, 25))
        each = {kind: (five[kind] - one[kind]) / 4 for kind in five}
        # A manifest is looked for in every folder: of the two steps that are kept, and of older
        # ones that hold some expert's newest version.
        assert 12 <= each.pop("GET") <= 14
        assert each == {"HEAD": 4, "PUT": 5, "LIST": 3, "DELETE": 4}

    alone(work, spec(policy=PARTIAL, nodes=1, ep=1, zero=False))
