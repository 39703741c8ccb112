"""Byte-exactness: what comes back is what was there, and training goes on as if nothing was."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, same_bytes, wait_at

import moc
from moc.core.versions import Version
from moc.persist.commit import load_manifest
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

EVERYTHING = moc.Policy(snapshot_every=2, persist_every=4, total_steps=12)
PARTIAL = moc.Policy(snapshot_every=2, persist_every=4, k_snapshot=4, k_persist=1, total_steps=16)


def undisturbed(spec: Spec, steps: int) -> list[Outcome]:
    """The reference: no manager, every step recorded."""
    return run_ranks(
        run_job, 4, spec.but(policy=None, steps=steps, record=tuple(range(1, steps + 1)))
    )


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_a_run_with_fresh_experts_goes_on_byte_for_byte(
    spec: Callable[..., Spec], stacked: bool
) -> None:
    job = spec(policy=EVERYTHING, stacked=stacked)
    reference = undisturbed(job, 12)
    run_ranks(run_job, 4, job.but(steps=7, drain=False, after_step=wait_at(2, 6)))
    again = run_ranks(run_job, 4, job.but(steps=12, record=(12,)))
    report = again[0].report
    assert report is not None
    assert report.step == 6
    assert report.stale_experts == 0
    assert_equal(
        merged(o.restored for o in again), merged(o.states[report.step] for o in reference)
    )
    assert_equal(merged(o.states[12] for o in again), merged(o.states[12] for o in reference))
    assert {s: v for s, v in reference[0].losses.items() if s > 6} == again[0].losses


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_from_storage_alone(spec: Callable[..., Spec], stacked: bool) -> None:
    job = spec(policy=EVERYTHING, stacked=stacked)
    reference = undisturbed(job, 10)
    run_ranks(run_job, 4, job.but(steps=9, after_step=wait_at(2, 4, 8)))
    for memory in job.memory:
        shutil.rmtree(memory)
    again = run_ranks(run_job, 4, job.but(steps=10))
    report = again[0].report
    assert report is not None
    assert report.step == 8
    assert report.sources["storage"] == sum(report.sources.values()) > 0
    assert_equal(
        merged(o.restored for o in again), merged(o.states[report.step] for o in reference)
    )
    assert again[0].losses[9] == reference[0].losses[9]


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_partial_experts_come_back_at_exactly_the_version_named(
    spec: Callable[..., Spec], stacked: bool
) -> None:
    job = spec(policy=PARTIAL, stacked=stacked)
    reference = undisturbed(job, 16)
    every_commit = wait_at(*range(2, 15, 2))
    first = run_ranks(run_job, 4, job.but(steps=15, drain=False, after_step=every_commit))
    assert first[0].losses == {s: v for s, v in reference[0].losses.items() if s <= 15}
    shutil.rmtree(job.memory[1])
    again = run_ranks(run_job, 4, job.but(steps=16, after_step=wait_at(16)))
    report = again[0].report
    assert report is not None
    restored = merged(o.restored for o in again)
    states = {s: merged(o.states[s] for o in reference) for s in range(1, 17)}
    now = states[report.step]
    assert_equal(
        {n: v for n, v in restored.items() if ".experts." not in n},
        {n: v for n, v in now.items() if ".experts." not in n},
    )
    # Node 0 (experts 0-3) kept its memory; node 1's experts come from storage, some of them older.
    manifest = load_manifest(LocalStore(job.run_dir), Version(report.step, 1))
    versions = versions_of(restored, states)
    for (layer, expert), step in versions.items():
        stored = manifest.versions[layer][expert].step
        assert step == stored or (expert < 4 and step > stored), (layer, expert, step, stored)
    assert min(versions.values()) < report.step
    assert report.oldest_expert_age == report.step - min(versions.values())
    assert report.sources["memory"] > 0
    assert report.sources["storage"] > 0
    assert report.sources["storage_older"] > 0
    assert report.lost_tokens > 0


def versions_of(
    restored: dict[str, torch.Tensor], states: dict[int, dict[str, torch.Tensor]]
) -> dict[tuple[int, int], int]:
    """The step whose undisturbed state each expert equals, part by part, byte for byte.

    Moments of a stacked tensor are compared after the rescaling that a shared ``step`` needs.
    """
    experts: dict[tuple[int, int], list[str]] = {}
    newest = max(s for s in states if states[s].keys() == restored.keys())
    for name in restored:
        if ".experts." in name and "|step@expert|" not in name and "|step|" not in name:
            experts.setdefault(_expert_of(name), []).append(name)
    found = {}
    for key, names in experts.items():
        steps = [s for s in states if all(_equals(restored, states[s], n) for n in names)]
        assert len(steps) == 1, (key, steps, newest)
        found[key] = steps[0]
    return found


def _expert_of(name: str) -> tuple[int, int]:
    fqn, _, box = name.split("|")
    layer = int(fqn.split(".")[1]) // 2
    index = fqn.split(".experts.")[1].split(".")[0]
    return layer, int(index) if index.isdigit() else int(box.split(",")[0])


def _equals(restored: dict[str, torch.Tensor], state: dict[str, torch.Tensor], name: str) -> bool:
    """Whether an expert's part has the bytes of a state, rescaled where its ``step`` is shared."""
    fqn, part, _ = name.split("|")
    value = state[name]
    shared = [n for n in restored if n.startswith(f"{fqn}|step|:")]
    if part.startswith("exp_avg") and shared and ".experts.w" in fqn:
        now, own = float(restored[shared[0]]), float(state[shared[0]])
        beta = {"exp_avg": 0.9, "exp_avg_sq": 0.95}[part]
        if own < now:
            value = value * ((1 - beta**now) / (1 - beta**own))
    return same_bytes(restored[name], value)
