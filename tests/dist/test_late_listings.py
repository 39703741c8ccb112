"""New names that listings lack, while their keys can be read: what is decided stays right."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, wait_at

import moc
from moc.core.manifest import Manifest, encode_json, manifest_key, step_dir
from moc.core.versions import Version
from moc.persist.commit import (
    commit,
    load_manifest,
    load_timeline,
    plan_sweep,
    roll_forward,
    versions_in,
)
from moc.persist.survey import survey
from moc.persist.verify import verify
from moc.store.local import LocalStore
from moc.store.memory import MemoryStore
from moc.store.wrap import RetryingStore
from moc.testing.late_store import LateStore
from moc.testing.ranks import run_ranks
from moc.testing.store_suite import StoreSuite

pytestmark = pytest.mark.dist

KEPT = moc.Policy(
    snapshot_every=2, persist_every=2, k_snapshot=4, k_persist=2, keep_latest_k=None, grace_secs=5
)
STEPS = (2, 4, 6, 8)


class TestLateStore(StoreSuite):
    """Without a lag it is a store like any other."""

    @pytest.fixture
    def store(self) -> LateStore:
        return LateStore(MemoryStore(), lag=0)


def test_a_new_key_is_listed_late_and_found_at_once() -> None:
    store = LateStore(MemoryStore(), lag=3)
    store.put_new("folder/key", [b"x"])
    assert store.list() == store.children("folder") == []
    assert store.get("folder/key") == b"x"
    assert store.children() == ["folder"]
    assert store.list("folder") == ["folder/key"]


@dataclass(frozen=True)
class Original:
    """A run of two starts on four ranks with four partial commits.

    Attributes:
        job: its spec.
        folder: a copy of the run directory, with nothing else.
        state: of all ranks at the last step.
    """

    job: Spec
    folder: Path
    state: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Iterator[Original]:
    memory = Path(tempfile.mkdtemp(prefix="moc-test-", dir="/dev/shm"))
    run_dir = tmp_path_factory.mktemp("late") / "run"
    job = Spec(run_dir=run_dir, memory=(memory,), text=text, policy=KEPT, record=(8,))
    job = job.but(after_step=wait_at(*STEPS))
    run_ranks(run_job, 4, job.but(steps=4))
    last = run_ranks(run_job, 4, job.but(steps=8))
    shutil.rmtree(memory)
    yield Original(job, run_dir, merged(o.states[8] for o in last))
    shutil.rmtree(memory, ignore_errors=True)


@pytest.fixture
def store(original: Original, tmp_path: Path) -> LocalStore:
    """A copy to be spoilt."""
    shutil.copytree(original.folder, tmp_path / "run")
    return LocalStore(tmp_path / "run")


def hiding(store: LocalStore, *parts: str) -> LateStore:
    """Its listings lack every key with one of these in it."""
    return LateStore(store, hides=lambda key: any(part in key for part in parts))


def manifests(store: LocalStore) -> dict[Version, Manifest]:
    return {v: load_manifest(store, v) for v in versions_in(store)}


def test_attempts_and_steps_are_found_without_a_listing(store: LocalStore) -> None:
    timeline = load_timeline(store)
    assert timeline.head == 2
    for parts in (["attempts/0002"], ["attempts/0001"], ["attempts"], ["step-"], ["step-", "attempts"]):
        late = hiding(store, *parts)
        assert load_timeline(late) == timeline
        assert load_timeline(late, replace(timeline, attempts=timeline.attempts[:1])) == timeline
        assert versions_in(late, timeline) == versions_in(store)
    # Nothing is believed of a hint that is wrong, out of date or no number.
    for hint in (b"6\n", b"7\n", b"999\n", b"-8\n", b"junk", b""):
        store.put("latest", hint)
        assert set(versions_in(hiding(store, "step-00000008"), timeline)) <= set(
            versions_in(store)
        )
        assert versions_in(store, timeline) == versions_in(store)


def test_a_commit_counts_receipts_by_their_keys(store: LocalStore) -> None:
    """All are there and none is listed: it is committed, now or by the next attempt."""
    newest = versions_in(store)[-1]
    wanted = load_manifest(store, newest)
    for lag in (None, 1, 3, 10):
        store.delete(manifest_key(newest))
        late = LateStore(store, lag=lag, hides=lambda key: key.endswith(".receipt"))
        made = commit(late, newest)
        assert replace(made, created="") == replace(wanted, created="")
        assert commit(late, newest) == made
    store.delete(manifest_key(newest))
    assert roll_forward(hiding(store, ".receipt"), load_timeline(store)) == ([newest], [])
    store.delete(manifest_key(newest))
    store.delete(f"{step_dir(newest)}/rank-00003.receipt")
    assert commit(hiding(store, ".receipt"), newest) is None


def test_retention_deletes_no_file_of_a_step_that_a_listing_lacks(store: LocalStore) -> None:
    timeline, all_of_it = load_timeline(store), manifests(store)
    folders = [step_dir(v) for v in all_of_it]
    hidden = [[], *([f] for f in folders), *map(list, combinations(folders, 2)), folders]
    hidden += [["manifest.json"], ["safetensors"], [".receipt"], ["step-00000008", "manifest"]]
    for keep in (1, 2, 3):
        real = plan_sweep(store, timeline, keep, None)
        assert real.delete
        for parts in hidden:
            plan = plan_sweep(hiding(store, *parts), timeline, keep, None)
            kept = set(all_of_it) - set(plan.retire)
            assert kept >= set(real.keep), parts
            needed = {f.key for v in kept for f in all_of_it[v].files}
            assert not needed.intersection(plan.delete), parts
    assert plan_sweep(hiding(store), timeline, 2, None) == plan_sweep(store, timeline, 2, None)


def test_retention_finds_a_step_that_stays_for_ever_by_what_builds_on_it(
    store: LocalStore,
) -> None:
    """The newest step is full and needs no other; of step 6 a listing shows nothing."""
    *_, lasting, newest = versions_in(store)
    made = load_manifest(store, newest)
    own = [f for f in made.files if f.is_of(newest)]
    store.put(manifest_key(newest), encode_json(replace(made, files=own)))
    plan = plan_sweep(hiding(store, step_dir(lasting)), load_timeline(store), 1, 6)
    assert plan.keep == (lasting, newest)
    assert plan.delete
    assert not {f.key for f in load_manifest(store, lasting).files}.intersection(plan.delete)


def test_ls_and_verify_say_of_late_listings_what_they_say_later(store: LocalStore) -> None:
    wanted, sound = survey(store), verify(store)
    assert [s.version.step for s in wanted.steps] == [*STEPS]
    assert sound.ok
    for parts in (["step-00000008"], ["manifest.json"], ["safetensors"], ["attempts"], ["step-"]):
        late = hiding(store, *parts)
        assert survey(late) == wanted, parts
        assert verify(late) == sound, parts
    pending = versions_in(store)[-1]
    store.delete(manifest_key(pending))
    store.delete(f"{step_dir(pending)}/rank-00002.receipt")
    (aside,) = survey(hiding(store, "rank-00001", "rank-00003")).other
    assert "of 4 receipts, those of ranks [2] are missing" in aside.why


def test_a_restore_finds_the_newest_commit_and_only_rank_0_lists(
    original: Original, store: LocalStore, memory_dir: Path
) -> None:
    """What other ranks would see in a listing, nothing, is asked of none of them."""
    job = original.job.but(memory=(memory_dir,), steps=9, record=())

    def work() -> Outcome:
        hides = ("step-00000008", "attempts") if dist.get_rank() == 0 else ("",)
        return run_job(job.but(run_dir=RetryingStore(hiding(store, *hides))))

    restored = run_ranks(work, 4)
    assert [o.report.step for o in restored] == [8] * 4
    plain = run_ranks(
        run_job, 4, job.but(run_dir=original.folder, memory=(memory_dir / "plain",), drain=False)
    )
    assert_equal(merged(o.restored for o in restored), merged(o.restored for o in plain))
    assert [o.losses for o in restored] == [o.losses for o in plain]
    assert load_timeline(store).head == 3
