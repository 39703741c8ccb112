"""`CheckpointManager` in one process: what goes in comes out, and errors say what is wrong."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import (
    DIM,
    EXPERTS,
    Managers,
    adamw,
    bare,
    dense,
    kinds,
    moe,
    run_steps,
    sealed,
    state_of,
    stored,
    train,
    version_of,
    whole,
)
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

import moc
from moc.choose.retention import BufferFacts, role
from moc.core.faults import FaultScript
from moc.core.versions import Version
from moc.errors import (
    ConfigError,
    DamagedError,
    MismatchError,
    NothingValid,
    RestoreError,
    RunBusy,
    SaveError,
    StepNotFound,
)
from moc.persist.commit import load_manifest
from moc.snapshot.copier import CopyJob
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

BROKEN = FaultScript(nth=1, verb="put_new", times=0)
"""The helper's store takes no file any more."""


# ------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("make", [dense, moe, lambda seed: moe(seed, stacked=False)])
def test_a_fresh_process_goes_on_as_if_nothing_was(managers: Managers, make: Any) -> None:
    model = make(0)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3])
    then = state_of(model, optimizer)
    expected = [train(model, optimizer, step) for step in (4, 5, 6)]

    again = make(1)
    fresh = adamw(again)  # has never stepped: its moments come from the file (A28)
    manager = managers(again, fresh)
    report = manager.restore()
    assert report is not None
    assert report.step == 3
    assert report.optimizer_entries == 3 * len(list(model.parameters()))
    assert_equal(state_of(again, fresh), then)
    assert [train(again, fresh, step) for step in (4, 5, 6)] == expected
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_from_storage_when_memory_is_gone(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
    again = moe(1)
    fresh = adamw(again)
    manager = managers(again, fresh, memory_dir=managers.memory_dir / "another")
    report = manager.restore()
    assert report is not None
    assert report.sources["storage"] == sum(report.sources.values()) > 0
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_without_an_optimizer_every_call_saves(managers: Managers) -> None:
    model = dense()
    with managers(model) as manager:
        manager.step(1)
        manager.wait()
        manager.step(2)
    assert manager.stats()["saves"] == 2
    again = dense(1)
    report = managers(again).restore()
    assert report is not None
    assert report.step == 2
    assert_equal(state_of(again), state_of(model))


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, last = model[0].parameters(), model[2].parameters()
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(last, lr=0.01)]


def test_two_optimizers(managers: Managers) -> None:
    model = dense()
    optimizers = two_optimizers(model)
    with managers(model, optimizers) as manager:
        run_steps(manager, model, optimizers, [1, 2])
    again = dense(1)
    fresh = two_optimizers(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), state_of(model, optimizers))
    assert train(again, fresh, 3) == train(model, optimizers, 3)


def test_an_expert_that_gets_its_first_token_later_is_saved_from_then_on(
    managers: Managers,
) -> None:
    model = moe(stacked=False)
    model[1].router.allowed = [0]
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
        model[1].router.allowed = [0, 2]
        run_steps(manager, model, optimizer, [3])
    again = moe(1, stacked=False)
    fresh = adamw(again)
    report = managers(again, fresh, memory_dir=managers.memory_dir / "another").restore()
    assert report is not None
    assert report.step == 3
    assert "1.experts.2.weight/exp_avg" in state_of(again, fresh)
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


# ---------------------------------------------------------------------------- steps and positions


def test_a_step_without_an_optimizer_step_is_ignored_and_told_once(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    with managers(model, optimizer, on_event=events.append) as manager:
        run_steps(manager, model, optimizer, [1])
        manager.wait()
        manager.step(2)
        manager.step(3)
        run_steps(manager, model, optimizer, [4])
    told = [e for e in events if e.kind == "warning" and "optimizer step" in e.text]
    assert [e.step for e in told] == [2]
    assert manager.stats()["saves"] == 2
    assert manager.all_steps() == [1, 4]


def test_a_loop_that_repeats_the_restored_step_is_told(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1, 2])
    again = dense(1)
    fresh = adamw(again)
    manager = managers(again, fresh)
    assert manager.restore() is not None
    manager.step(2)  # no optimizer step was made: nothing is mislabelled
    with pytest.raises(ConfigError, match=r"step\(2\).*report\.step \+ 1.*here 3"):
        run_steps(manager, again, fresh, [2])


def test_nothing_yet_is_none(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        assert manager.restore() is None
        assert manager.all_steps() == []
        assert manager.latest_step() is None
        run_steps(manager, model, optimizer, [1])
    assert manager.latest_step() == 1


def test_a08_a09_steps_are_numbers_and_other_names_are_left_alone(managers: Managers) -> None:
    model = dense()
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=2)
    strange = ["step-100.bak", "step-1e3", "step--5", "step-", ".step-300.tmp", "notes.txt"]
    with managers(model, policy=policy) as manager:
        for step in (9, 10, 100, 1000):
            manager.step(step)
            manager.wait()
            for name in strange:
                (managers.run / name).mkdir(exist_ok=True)
            (managers.run / "step-700").touch()
    os.utime(managers.run / "step-00000100-a0001")
    assert manager.all_steps() == [100, 1000]
    assert manager.latest_step() == 1000
    assert {*strange, "step-700"} <= {path.name for path in managers.run.iterdir()}


# ------------------------------------------------------------------------------ what is refused


def test_a38_a_step_that_is_not_there_is_an_error(managers: Managers) -> None:
    """There is no falling back from a step that was asked for, whatever is there."""
    model = dense()
    with managers(model) as manager:
        manager.step(400)
    again = dense(1)
    before = state_of(again)
    with pytest.raises(StepNotFound, match=r"step 500 .*400"):
        managers(again).restore(500)
    empty = managers.run.parent / "empty"
    empty.mkdir()
    for elsewhere in (empty, managers.run.parent / "tpyo", managers.run.parent):
        with pytest.raises(StepNotFound, match="step 500 "):
            managers(again, directory=elsewhere).restore(500)
    assert_equal(state_of(again), before)
    assert not list(empty.iterdir())
    assert not (managers.run.parent / "tpyo").exists()


def test_a38_nothing_there_yet_is_no_error_and_a_run_nearby_is_told(managers: Managers) -> None:
    with managers(dense()) as manager:
        manager.step(400)
    empty = managers.run.parent / "empty"
    empty.mkdir()
    told: dict[Path, list[str]] = {}
    for elsewhere in (managers.run.parent, empty, managers.run.parent / "tpyo"):
        events: list[moc.Event] = []
        manager = managers(dense(1), directory=elsewhere, on_event=events.append)
        assert manager.restore() is None
        told[elsewhere] = [e.text for e in events if e.kind == "warning"]
    (text,) = told.pop(managers.run.parent)
    assert f"did you mean {managers.run}?" in text
    assert not any(told.values())


def test_a38_something_there_but_nothing_valid_is_an_error(managers: Managers) -> None:
    model = dense()
    with managers(model) as manager:
        manager.step(1)
    identity = managers.run / "run.json"
    kept = identity.read_bytes()
    identity.unlink()
    with pytest.raises(DamagedError, match=r"run\.json is missing beside steps"):
        managers(dense(1)).restore()
    identity.write_bytes(kept)
    for path in managers.run.glob("step-*/dense-*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    manager = managers(dense(1), memory_dir=managers.memory_dir / "another")
    with pytest.raises(NothingValid, match=r"dense-00000\.safetensors"):
        manager.restore()
    with pytest.raises(RestoreError, match="undefined"):  # half of the model may be filled
        manager.step(2)


def test_saving_over_a_run_without_a_restore_is_refused(managers: Managers) -> None:
    model = dense()
    with managers(model) as manager:
        manager.step(1)
    with pytest.raises(RestoreError, match=r"restore\(\).*fresh=True"):
        managers(model).step(2)
    with managers(model, fresh=True) as manager:
        assert manager.restore() is None
        manager.step(1)
    assert version_of(managers.run, 1).attempt == 2


def test_a_restore_comes_first_and_once(managers: Managers) -> None:
    manager = managers(dense())
    manager.restore()
    with pytest.raises(RestoreError, match="once"):
        manager.restore()


def test_other_moe_layers_are_a_mismatch_however_lenient(managers: Managers) -> None:
    with managers(moe(stacked=False)) as manager:
        manager.step(1)
    target = moe(1, stacked=False)
    target[1].experts = nn.ModuleList([*target[1].experts, nn.Linear(DIM, DIM)])
    before = state_of(target)
    for strict in (True, False):
        with pytest.raises(MismatchError, match="experts"):
            managers(target).restore(strict=strict)
        assert_equal(state_of(target), before)


def test_another_model_may_not_start_in_the_same_directory(managers: Managers) -> None:
    with managers(bare({"a": (2,)})) as manager:
        manager.step(1)
    with pytest.raises(RunBusy, match="another model"):
        managers(bare({"b": (2,)}), fresh=True).restore()


def test_another_optimizer_is_a_mismatch(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
    again = dense(1)
    before = state_of(again)
    with pytest.raises(MismatchError, match=r"AdamW.*SGD"):
        managers(again, torch.optim.SGD(again.parameters(), lr=0.1)).restore()
    assert_equal(state_of(again), before)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"snapshot_every": 0}, "snapshot_every=0"),
        ({"persist_every": -1}, "persist_every=-1.*None"),
        ({"keep_latest_k": 0}, "keep_latest_k=0.*None keeps all"),
        ({"keep_latest_k": -1}, "keep_latest_k=-1"),
        ({"keep_every": 0}, "keep_every"),
        ({"total_steps": 0}, "total_steps"),
        ({"timeout_secs": 0}, "timeout_secs"),
        ({"grace_secs": -1.0}, "grace_secs"),
        ({"buffers": 2}, "buffers=2.*at least 3"),
        ({"k_snapshot": 2}, "k_persist"),
        ({"k_snapshot": 1, "k_persist": 2}, "k_snapshot=1, k_persist=2"),
        ({"k_persist": 0}, "k_persist=0"),
        ({"skip": "some"}, "skip='some'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        moc.Policy(**options)


def test_more_experts_than_there_are_are_refused(managers: Managers) -> None:
    policy = moc.Policy(k_snapshot=EXPERTS + 1, k_persist=1)
    with pytest.raises(ConfigError, match=f"k_snapshot={EXPERTS + 1}.*{EXPERTS} experts"):
        managers(moe(), policy=policy)


def test_an_optimizer_of_another_model_is_refused(managers: Managers) -> None:
    with pytest.raises(ConfigError, match="parameter"):
        managers(dense(), adamw(dense()))


# ------------------------------------------------------------------------- errors of saving, ends


def test_a_clean_exit_drains(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
    assert managers(model).latest_step() == 1  # another manager sees it


def test_on_an_exception_nothing_waits_and_the_first_error_is_seen(managers: Managers) -> None:
    """The helper is stopped: whoever waited for it would meet the deadline instead."""
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    manager.restore()
    helper = manager._saver._handover._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGSTOP)

    def work() -> None:
        with manager:
            run_steps(manager, model, optimizer, [1])
            manager.gate()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    os.kill(helper.pid, signal.SIGCONT)
    helper._process.wait(30)  # it finishes what was handed over before it goes
    assert manager.all_steps() == [1]


def test_close_may_be_repeated_and_ends_the_manager(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    run_steps(manager, model, optimizer, [1])
    manager.close()
    manager.close()
    for call in (lambda: manager.step(2), lambda: manager.save(2), manager.wait, manager.restore):
        with pytest.raises(ConfigError, match="closed"):
            call()
    train(model, optimizer, 2)  # no hook is left that would wait
    assert manager.latest_step() == 1


def test_a_manager_that_saved_nothing_ends_quietly(managers: Managers) -> None:
    with managers(dense()) as manager:
        pass
    manager.close()
    assert not managers.run.exists()


def test_wait_raises_what_failed_and_names_it(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    manager = managers(model, optimizer, faults=BROKEN, on_event=events.append)
    run_steps(manager, model, optimizer, [1])
    with pytest.raises(SaveError, match=r"step 1 .*dense-00000\.safetensors") as caught:
        manager.wait()
    assert caught.value.step == 1
    assert manager.stats()["failed"] == 1
    assert "failed" in kinds(events, 1)
    assert manager.all_steps() == []


def test_step_raises_what_failed_if_the_policy_says_so(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=1000, on_error="raise", timeout_secs=30)
    manager = managers(model, optimizer, faults=BROKEN, policy=policy)
    with pytest.raises(SaveError, match=r"step 1 .*dense-00000\.safetensors"):
        run_steps(manager, model, optimizer, range(1, 100_000))


def test_a_warning_policy_trains_on_and_the_end_still_tells(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    policy = moc.Policy(snapshot_every=1, persist_every=1000)
    manager = managers(model, optimizer, faults=BROKEN, policy=policy, on_event=events.append)
    step = 0
    while not any(e.kind == "failed" for e in events):
        step += 1
        run_steps(manager, model, optimizer, [step])
    run_steps(manager, model, optimizer, [step + 1])  # raises nothing
    with pytest.raises(SaveError, match="was not committed"):
        manager.close()


def test_an_explicit_save_is_persisted_though_another_is_under_way(managers: Managers) -> None:
    model = dense()
    with managers(model) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    assert manager.all_steps() == [1, 2, 3]


def test_an_explicit_save_tells_of_the_one_that_failed_before(managers: Managers) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, on_error="raise")
    manager = managers(dense(), faults=BROKEN, policy=policy)
    manager.save(1)
    with pytest.raises(SaveError, match="step 1 "):
        manager.save(2)


def test_a_full_save_holds_every_expert(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3], after=lambda _: manager.wait())
        train(model, optimizer, 4)
        manager.save(4, full=True)
        manager.wait()

    def ages(step: int) -> list[int]:
        manifest = load_manifest(LocalStore(managers.run), Version(step, 1))
        return sorted(v.step for v in manifest.versions[0])

    assert ages(1) == [1, 1, 1, 1]  # the first save is full
    assert ages(3) == [1, 1, 2, 3]
    assert ages(4) == [4, 4, 4, 4]
    again = moe(1)
    fresh = adamw(again)
    report = managers(again, fresh, memory_dir=managers.memory_dir / "another").restore()
    assert report is not None
    assert report.stale_experts == 0
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_memory_directory_that_cannot_be_written_is_refused(managers: Managers) -> None:
    def as_nobody(_rank: int) -> str:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(ConfigError) as caught:
            managers(dense())
        return str(caught.value)

    (told,) = run_ranks(as_nobody, 1, init=False)
    assert str(managers.memory_dir) in told
    assert "MOC_MEMORY_DIR" in told


def test_too_little_memory_is_an_error_with_numbers_and_a_remedy(managers: Managers) -> None:
    manager = managers(dense(), memory_bytes=10_000)
    for _ in range(2):  # and stays that error
        with pytest.raises(SaveError, match=r"3 buffers of \d+ bytes .*10000 bytes.*memory_dir="):
            manager.save(1)


# ------------------------------------------------------------------------- memory tier and files


def test_every_sealed_buffer_is_a_safetensors_file(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=2, k_snapshot=2, k_persist=1)
    states: dict[int, dict[str, Tensor]] = {}
    checked = set()
    with managers(model, optimizer, policy=policy) as manager:

        def look(step: int) -> None:
            manager.gate()
            states[step] = state_of(model, optimizer)
            for sealed_step, (path, seal) in sealed(managers.memory_dir).items():
                with safe_open(path, "pt") as opened:
                    pieces = {
                        name: opened.get_tensor(name)
                        for name in opened.keys()  # noqa: SIM118 - no mapping
                        if not name.startswith("__pad__")
                    }
                assert len(pieces) == len(seal["pieces"])
                compare(pieces, states[sealed_step])
                checked.add(sealed_step)

        run_steps(manager, model, optimizer, range(1, 8), after=look)
    assert checked == set(range(1, 8))
    for step in manager.all_steps():
        found = stored(managers.run, step)
        compare({n: v for n, v in found.items() if ".experts." not in n}, states[step])


def compare(pieces: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Every piece has the bytes of its region in the state."""
    compared = 0
    for name, value in pieces.items():
        fqn, part, box = name.split("|")
        if fqn.startswith("moc.") or part == "step@expert":
            continue
        now = state[fqn if part in ("weight", "buffer") else f"{fqn}/{part}"]
        offsets, sizes = ([int(n) for n in side.split(",") if n] for side in box.split(":"))
        now = now[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert same_bytes(value, now), name
        compared += 1
    assert compared >= len(pieces) // 2


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_stock_tools_read_all_experts(managers: Managers, stacked: bool) -> None:
    model = moe(stacked=stacked)
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    seen: dict[int, dict[str, Tensor]] = {}

    def after(step: int) -> None:
        manager.wait()
        seen[step] = state_of(model, optimizer)

    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, range(1, 6), after=after)
    pieces = stored(managers.run, 5)
    versions = load_manifest(LocalStore(managers.run), Version(5, 1)).versions[0]
    assert sorted(v.step for v in versions) == [2, 3, 4, 5]
    experts = [n for n in seen[5] if n.startswith("1.experts.") and "/" not in n]
    for name in experts:
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            value = whole(pieces, name, part)
            for expert, version in enumerate(versions):
                then = seen[version.step][name if part == "weight" else f"{name}/{part}"]
                if stacked:
                    assert same_bytes(value[expert], then[expert]), (name, part, expert)
                elif f".{expert}." in name:
                    assert same_bytes(value, then), (name, part)


def test_buffers_have_the_number_asked_for_and_roles(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=3, k_snapshot=1, k_persist=1, buffers=3)
    with managers(model, optimizer, policy=policy) as manager:

        def look(step: int) -> None:
            manager.wait()
            manager.gate()
            held = sealed(managers.memory_dir)
            committed = manager.latest_step()
            # what storage has newest stays in memory, and so does the newest snapshot
            assert {committed, step} <= set(held)
            assert [
                role(
                    BufferFacts(0, Version(s, 1)),
                    commit=Version(committed, 1),
                    persisting=None,
                )
                for s in sorted(held)
            ].count("RECOVERY") == 1

        run_steps(manager, model, optimizer, range(1, 9), after=look)
    files = sorted(p.name for p in managers.memory_dir.glob("moc-*/*.safetensors"))
    assert files == ["00000-0.safetensors", "00000-1.safetensors", "00000-2.safetensors"]


def test_by_default_memory_keeps_a_window_of_every_expert(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=100, k_snapshot=1, k_persist=1)
    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, range(1, 10))
        manager.gate()
        held = sealed(managers.memory_dir)
        experts = {e for _, seal in held.values() for _, e, _ in seal["expert_pieces"]}
    assert experts == {0, 1, 2, 3}
    files = list(managers.memory_dir.glob("moc-*/*.safetensors"))
    assert len(files) <= EXPERTS + 3


def test_overlap_off_copies_before_step_returns(managers: Managers) -> None:
    model = dense()
    optimizer = adamw(model)
    policy = moc.Policy(snapshot_every=1, persist_every=1, overlap=False)
    with managers(model, optimizer, policy=policy) as manager:
        train(model, optimizer, 1)
        manager.step(1)
        then = state_of(model, optimizer)
        for param in model.parameters():
            param.detach().zero_()  # by no optimizer: allowed at once
    again = dense(1)
    fresh = adamw(again)
    managers(again, fresh).restore()
    assert_equal(state_of(again, fresh), then)


# ------------------------------------------------------------------------------- torn, told, told


def test_a_tensor_that_changes_while_it_is_copied_is_found() -> None:
    sources = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(5)}
    pairs = [(torch.empty_like(s), s) for s in sources.values()]
    assert CopyJob(sources).run(pairs) is None
    job = CopyJob(sources)
    sources["b"].add_(1)
    assert job.run(pairs) == "b"


def test_a_torn_snapshot_is_never_sealed(managers: Managers) -> None:
    """The worker is kept busy until somebody besides the optimizer has written a parameter."""
    model = dense()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    manager = managers(model, optimizer, on_event=events.append)
    run_steps(manager, model, optimizer, [1])
    manager.wait()
    go = threading.Event()
    manager._saver._snapshots.worker._pool.submit(go.wait, 30)
    run_steps(manager, model, optimizer, [2])
    with torch.no_grad():
        model[0].weight.add_(1)
    go.set()
    with pytest.raises(SaveError, match=r"step 2 .*torn.*0\.weight.*overlap=False"):
        manager.wait()
    assert 2 not in sealed(managers.memory_dir)
    assert manager.stats()["torn"] == 1
    assert kinds(events, 2)[-3:] == ["stalled", "torn", "failed"]
    run_steps(manager, model, optimizer, [3])
    manager.wait()
    assert manager.all_steps() == [1, 3]


def test_the_optimizer_waits_for_the_copy(managers: Managers) -> None:
    """The copy starts only when the optimizer is at the fence, and still has the old values."""
    go = threading.Event()
    model = dense()
    optimizer = adamw(model)
    manager = managers(model, optimizer)
    ahead = register_optimizer_step_pre_hook(lambda *_: go.set())
    _global_optimizer_pre_hooks.move_to_end(ahead.id, last=False)  # before the fence's
    run_steps(manager, model, optimizer, [1])
    manager.wait()
    train(model, optimizer, 2)
    go.clear()
    manager._saver._snapshots.worker._pool.submit(go.wait, 30)
    manager.step(2)
    then = state_of(model, optimizer)
    assert not go.is_set()
    train(model, optimizer, 3)
    ahead.remove()
    manager.wait()
    assert manager.stats()["torn"] == 0
    found = stored(managers.run, 2)
    compare(found, then)


def test_events_tell_each_save_in_order(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    events: list[moc.Event] = []
    with managers(model, optimizer, on_event=events.append) as manager:
        run_steps(manager, model, optimizer, [1, 2], after=lambda _: manager.wait())
    told = kinds(events, 2)
    assert sorted(told) == [
        "committed",
        "marked",
        "persisted",
        "snapshot_done",
        "snapshot_started",
        "stalled",
    ]
    order = [told.index(kind) for kind in ("snapshot_started", "marked", "snapshot_done")]
    assert order == sorted(order)
    assert told[-1] == "committed"
    by_kind = {e.kind: e for e in events if e.step == 2}
    assert {e.rank for e in events} == {0}
    assert {e.attempt for e in events} == {1}
    state_bytes = sum(v.numel() * v.element_size() for v in state_of(model, optimizer).values())
    assert by_kind["snapshot_done"].nbytes >= state_bytes
    assert by_kind["committed"].nbytes >= state_bytes
    assert by_kind["committed"].secs > 0
    assert by_kind["stalled"].secs > 0
    assert by_kind["marked"].text == f"{EXPERTS} experts"
    assert next(e for e in events if e.kind == "marked" and e.step == 1).text == "full"


def test_stats_count_what_happened(managers: Managers) -> None:
    model = moe()
    optimizer = adamw(model)
    policy = moc.Policy(
        snapshot_every=2, persist_every=4, k_snapshot=2, k_persist=1, keep_latest_k=None
    )
    with managers(model, optimizer, policy=policy) as manager:
        assert manager.stats()["full_bytes"] == 0
        run_steps(manager, model, optimizer, range(1, 9), after=lambda _: manager.wait())
    stats = manager.stats()
    assert stats["saves"] == 4
    assert stats["marked"] == stats["committed"] == len(manager.all_steps()) == 3  # 2, 4, 8
    assert stats["failed"] == stats["torn"] == stats["abandoned"] == stats["warnings"] == 0
    assert set(stats["stall_secs"]) == set(stats["saved_bytes"]) == {2, 4, 6, 8}
    assert set(stats["committed_bytes"]) == {2, 4, 8}
    expert = DIM * DIM * 4 * 3 + 4  # a weight, two moments, its own step
    assert stats["full_bytes"] - stats["partial_bytes"] == expert * (EXPERTS - 1)
    assert stats["committed_bytes"][2] > stats["committed_bytes"][8]


def test_a_clean_exit_makes_up_for_a_persist_that_was_passed_over(managers: Managers) -> None:
    """Step 2 was due while step 1 was outstanding, and stayed in memory; no step follows."""
    model = dense()
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1])
        manager.wait()
        helper = manager._saver._handover._helper
        assert helper is not None
        os.kill(helper.pid, signal.SIGSTOP)
        run_steps(manager, model, optimizer, [2, 3])
        assert manager.stats()["marked"] == 2
        os.kill(helper.pid, signal.SIGCONT)
    assert manager.stats()["marked"] == 3
    assert manager.all_steps() == [1, 2, 3]
    compare(stored(managers.run, 3), state_of(model, optimizer))
