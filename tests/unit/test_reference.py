"""Unchanged pieces are referenced, not written: the rule, and what it saves in real runs."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.job import assert_equal
from tests.support.tiny import (
    EACH,
    EXPERTS,
    Managers,
    adamw,
    dense,
    moe,
    run_steps,
    state_of,
    stored,
    train,
    version_of,
)
from torch import Tensor, nn

import moc
from moc.choose.reference import Split, split, unchanged
from moc.choose.retention import ManifestFacts, sweep
from moc.core.box import Box
from moc.core.faults import FaultScript
from moc.core.manifest import (
    CommitHead,
    FileInfo,
    Manifest,
    Receipt,
    assemble,
    encode_json,
    manifest_key,
    receipt_key,
    step_dir,
)
from moc.core.piece import DENSE, Piece, PieceRecord
from moc.core.safetensors import HEADER_ALIGN, file_bytes, in_file_order, lay_out
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import DamagedError, NothingValid
from moc.persist.commit import load_manifest
from moc.persist.survey import survey
from moc.persist.verify import verify
from moc.store.local import LocalStore
from moc.testing.ranks import run_ranks

WIDE = 4096  # floats of a piece: four times a header area


# ------------------------------------------------------------------------------------ the rule


def piece(number: int, expert: int = DENSE, dtype: str = "F32", size: int = WIDE) -> Piece:
    return Piece(
        f"p{number}", "weight", Box((0,), (size,)), dtype, DENSE if expert < 0 else 0, expert
    )


def write(step: int, name: str, values: dict[Piece, int]) -> tuple[FileInfo, list[PieceRecord]]:
    """A file as the helper writes it; a digest is the value."""
    pieces = in_file_order(values)
    nbytes = file_bytes(pieces)
    start = nbytes - sum(p.nbytes for p in pieces)
    key = f"{step_dir(Version(step, 1))}/{name}-00000.safetensors"
    placed = [
        PieceRecord(r.piece, 0, r.offset, str(values[r.piece])) for r in lay_out(pieces, start)
    ]
    return FileInfo(key, nbytes, f"h{step}"), placed


def commit(
    step: int, values: dict[Piece, int], base: Manifest | None, unsound: tuple[str, ...] = ()
) -> tuple[Manifest, list[FileInfo], Split]:
    """One rank's save, as the helper makes it; the manifest, and the files written."""
    version = Version(step, 1)
    saved = [sorted({p.expert for p in values if p.is_expert})]
    fate = Split()
    if base is not None:
        records = [PieceRecord(p, 0, 0, str(v)) for p, v in values.items()]
        fate = split(unchanged(records, base), saved, base, unsound)
    skipped = {r.piece for r in fate.referenced}
    files: list[FileInfo] = []
    pieces: list[PieceRecord] = []
    for kind in ("dense", "experts"):
        for moving in (False, True):
            group = {
                p: v
                for p, v in values.items()
                if p.is_expert == (kind == "experts")
                and p not in skipped
                and (p in fate.moving) == moving
            }
            if group:
                info, placed = write(step, kind + "-unchanged" * moving, group)
                pieces += [PieceRecord(r.piece, len(files), r.offset, r.digest) for r in placed]
                files.append(info)
    written = list(files)
    for record in fate.referenced:
        assert base is not None
        pieces.append(msgspec.structs.replace(record, file=len(files)))
        files.append(base.files[record.file])
    head = CommitHead(
        model="m",
        base=base.version if base else None,
        layers=["l"],
        saved=saved,
        routed=[[step] * EXPERTS],
        lost=[[0] * EXPERTS],
        k_snapshot=1,
        k_persist=1,
    )
    receipt = Receipt(version=version, rank=0, world_size=1, files=files, pieces=pieces, head=head)
    return assemble([receipt], base), written, fate


EVERYTHING = {piece(i): 1 for i in range(4)} | {piece(9, e): 1 for e in range(EXPERTS)}


def test_what_has_not_changed_is_not_written() -> None:
    first, _, _ = commit(1, EVERYTHING, None)
    second, written, _ = commit(2, EVERYTHING | {piece(0): 2}, first)
    assert [f.key for f in written] == [f"{step_dir(Version(2, 1))}/dense-00000.safetensors"]
    assert written[0].nbytes == file_bytes([piece(0)])
    assert second.versions == [[Version(2, 1)] * EXPERTS]
    assert second.referenced_bytes == 7 * piece(0).nbytes
    third, written, _ = commit(3, EVERYTHING | {piece(0): 2}, second)
    assert written == []  # and no file without pieces
    owners = {third.files[r.file].key.partition("/")[0] for r in third.dense}
    assert owners == {step_dir(Version(1, 1)), step_dir(Version(2, 1))}  # one file deep, for ever


@pytest.mark.parametrize(
    "other", [piece(0, dtype="BF16"), piece(0, size=WIDE - 1), piece(1), piece(0, expert=0)]
)
def test_another_name_dtype_length_or_owner_is_another_piece(other: Piece) -> None:
    first, _, _ = commit(1, {piece(0): 1, **{piece(9, e): 1 for e in range(EXPERTS)}}, None)
    assert unchanged([PieceRecord(other, 0, 0, "1")], first) == []
    assert len(unchanged([PieceRecord(piece(0), 0, 0, "1")], first)) == 1
    assert unchanged([PieceRecord(piece(0), 0, 0, "2")], first) == []


def test_what_leaves_a_file_that_is_mostly_out_of_use_moves_once() -> None:
    values = {piece(i): 1 for i in range(8)} | {piece(9, e): 1 for e in range(EXPERTS)}
    manifest, _, _ = commit(1, values, None)
    sizes = []
    for step in (2, 3, 4):
        values |= {piece(i): step for i in range(6)}
        manifest, written, fate = commit(step, values, manifest)
        sizes.append([f.nbytes for f in written])
        assert fate.moving == ({piece(6), piece(7)} if step == 2 else set())
    changing = file_bytes([piece(i) for i in range(6)])
    assert sizes == [[changing, file_bytes([piece(6), piece(7)])], [changing], [changing]]


def test_a_few_bytes_go_with_the_changing_ones() -> None:
    small = piece(6, size=HEADER_ALIGN // 4 - 1)
    values = {piece(0): 1, small: 1, **{piece(9, e): 1 for e in range(EXPERTS)}}
    first, _, _ = commit(1, values, None)
    _, written, fate = commit(2, values | {piece(0): 2}, first)
    assert fate.moving == set()
    assert [f.nbytes for f in written] == [file_bytes([piece(0), small])]


def test_inherited_experts_keep_a_file_in_use() -> None:
    """Frozen experts, one saved at a time: its file is named anyway."""
    first, _, _ = commit(1, EVERYTHING, None)
    values = {p: v for p, v in EVERYTHING.items() if p.expert in (DENSE, 2)}
    second, written, _ = commit(2, values, first)
    assert written == []
    assert second.versions == [[Version(1, 1), Version(1, 1), Version(2, 1), Version(1, 1)]]


def test_a_file_known_to_be_bad_is_not_referenced() -> None:
    first, _, _ = commit(1, EVERYTHING, None)
    bad = tuple(f.key for f in first.files if "dense" in f.key)
    _, written, _ = commit(2, EVERYTHING, first, bad)
    assert [f.key for f in written] == [f"{step_dir(Version(2, 1))}/dense-00000.safetensors"]


def test_a_reference_that_the_base_does_not_confirm_is_refused() -> None:
    first, _, _ = commit(1, EVERYTHING, None)
    second, _, _ = commit(2, EVERYTHING, first)
    receipt = Receipt(
        version=Version(2, 1),
        rank=0,
        world_size=1,
        files=second.files,
        pieces=[*second.dense, *second.experts],
        head=second.head,
    )
    assert assemble([receipt], first) == second
    record = receipt.pieces[0]
    for wrong in (
        msgspec.structs.replace(record, offset=record.offset + 8),
        msgspec.structs.replace(record, digest="other"),
        msgspec.structs.replace(record, piece=piece(17)),
    ):
        bad = msgspec.structs.replace(receipt, pieces=[wrong, *receipt.pieces[1:]])
        with pytest.raises(DamagedError, match="base does not hold"):
            assemble([bad], first)
    orphan = msgspec.structs.replace(receipt, head=msgspec.structs.replace(second.head, base=None))
    with pytest.raises(DamagedError, match="base does not hold"):
        assemble([orphan], None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_kept_manifest_can_be_read_whatever_changes(data: st.DataObject) -> None:
    """Saves and sweeps: each kept step gives the bytes that it saved, from files that are there."""
    history = Timeline.of([AttemptRecord(attempt=1, parent=0, resumed_step=0, world_size=1,
                                         k_snapshot=1, k_persist=1)])  # fmt: skip
    keep = data.draw(st.integers(1, 3))
    live = dict(EVERYTHING)
    on_disk: dict[str, dict[tuple[Piece, int], str]] = {}
    size: dict[str, int] = {}
    steps: dict[Version, tuple[Manifest, dict[Piece, str]]] = {}
    manifest: Manifest | None = None
    for step in range(1, data.draw(st.integers(2, 7)) + 1):
        for changed in data.draw(st.sets(st.sampled_from(sorted(live)))) if step > 1 else ():
            live[changed] = step
        chosen = data.draw(st.sets(st.integers(0, EXPERTS - 1))) if step > 1 else range(EXPERTS)
        values = {p: v for p, v in live.items() if not p.is_expert or p.expert in chosen}
        base = manifest
        manifest, written, _ = commit(step, values, base)
        own = {f.key for f in written}
        for info in written:
            size[info.key] = info.nbytes
            on_disk[info.key] = {
                (r.piece, r.offset): r.digest
                for r in (*manifest.dense, *manifest.experts)
                if manifest.files[r.file] == info
            }
        expected = {r.piece: r.digest for r in base.experts} if base else {}
        expected |= {p: str(v) for p, v in values.items()}
        steps[manifest.version] = manifest, expected
        # Nothing is kept for less than half of its bytes by a reference.
        for index in {r.file for r in manifest.own_records}:
            info = manifest.files[index]
            used = [r.piece for r in (*manifest.dense, *manifest.experts) if r.file == index]
            assert info.key in own or 2 * file_bytes(used) >= info.nbytes
        keys = [*size, *(manifest_key(v) for v in steps), *(receipt_key(v, 0) for v in steps)]
        facts = [ManifestFacts(v, frozenset(f.key for f in m.files)) for v, (m, _) in steps.items()]
        plan = sweep(facts, sorted(keys), history, keep, None)
        for version in plan.retire:
            del steps[version]
        for key in plan.delete:
            size.pop(key, None)
            on_disk.pop(key, None)
        for kept, wanted in steps.values():
            found = {}
            for r in (*kept.dense, *kept.experts):
                found[r.piece] = on_disk[kept.files[r.file].key][r.piece, r.offset]
                assert found[r.piece] == r.digest
            assert found == wanted


# ------------------------------------------------------------------------------------ real runs


class Adapted(nn.Module):
    """A frozen base of 128 kB, and adapters of 1 kB, as LoRA has them."""

    def __init__(self, seed: int, rank: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(128, 128).requires_grad_(False)
        self.other = nn.Linear(128, 128).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(128, rank))
        self.up = nn.Parameter(torch.zeros(rank, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.base(x) + x @ self.down @ self.up)

    @property
    def frozen_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters() if not p.requires_grad)


def tune(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()


def lora(seed: int = 0, rank: int = 1) -> tuple[Any, torch.optim.AdamW]:
    model = Adapted(seed, rank)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def tune_steps(manager: Any, model: nn.Module, optimizer: Any, steps: Any) -> None:
    for step in steps:
        tune(model, optimizer, step)
        manager.step(step)
        manager.wait()


def folder(run: Path, step: int) -> Path:
    return run / step_dir(version_of(run, step))


def owners(run: Path, step: int) -> dict[str, int]:
    """Step that wrote each weight of a step."""
    manifest = load_manifest(LocalStore(run), version_of(run, step))
    return {
        r.piece.fqn: int(manifest.files[r.file].key[5:13])
        for r in (*manifest.dense, *manifest.experts)
        if r.piece.part == "weight"
    }


def restored(managers: Managers, seed: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """A fresh model, from storage alone."""
    model, optimizer = lora(seed)
    manager = managers(model, optimizer, memory_dir=managers.memory_dir / f"wiped{seed}", **options)
    return model, optimizer, manager.restore()


def test_a_lora_run_shrinks_to_its_adapters(managers: Managers) -> None:
    events: list[moc.Event] = []
    model, optimizer = lora()
    with managers(model, optimizer, on_event=events.append) as manager:
        tune_steps(manager, model, optimizer, range(1, 6))
        stats = manager.stats()
    written, referenced = stats["committed_bytes"], stats["referenced_bytes"]
    assert written[1] > model.frozen_bytes
    assert referenced[1] == 0
    # Two adapters with two moments and a step each, the generators' states, and a header.
    for step in range(2, 6):
        assert written[step] < model.frozen_bytes / 5
        assert referenced[step] >= model.frozen_bytes
        (event,) = [e for e in events if (e.kind, e.step) == ("committed", step)]
        assert event.nbytes == written[step]
        assert event.text == f"{referenced[step]} bytes unchanged, referenced"
        adapters = 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
        state = {n: t.nbytes for n, t in stored(managers.run, step).items()}
        own = sum(n for name, n in state.items() if "extra" in name) + adapters
        assert written[step] <= own + 2 * HEADER_ALIGN
        assert set(owners(managers.run, step).values()) == {1, step}
    listed = survey(LocalStore(managers.run)).steps
    assert [s.own_bytes for s in listed] == [written[s] for s in range(1, 6)]
    for step in range(1, 6):  # what `moc ls` calls bytes is what lies in the folder
        data = folder(managers.run, step).glob("*.safetensors")
        assert sum(p.stat().st_size for p in data) == written[step]
    assert verify(LocalStore(managers.run)).ok
    again, fresh, report = restored(managers)
    assert report.step == 5
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_the_bytes_outlive_the_step_that_wrote_them(managers: Managers) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=1)
    model, optimizer = lora()
    with managers(model, optimizer, policy=policy) as manager:
        tune_steps(manager, model, optimizer, range(1, 5))
    assert manager.all_steps() == [4]  # the helper prunes once it has told of the commit
    store = LocalStore(managers.run)
    left = {p.parent.name[5:13].lstrip("0") for p in managers.run.glob("step-*/*.safetensors")}
    assert left == {"1", "4"}
    assert "kept for files that later steps need" in survey(store).other[0].why
    assert verify(store).ok
    again, fresh, report = restored(managers, policy=policy)
    assert report.sources["storage"] == sum(report.sources.values()) > 0
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_frozen_layers_of_a_trained_model_are_written_twice_and_then_kept_alone(
    managers: Managers,
) -> None:
    """With its moments, what is trained is most of the first file, which retention can drop."""
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=1)
    model, _ = lora()
    model.other.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    with managers(model, optimizer, policy=policy) as manager:
        tune_steps(manager, model, optimizer, range(1, 6))
        written = manager.stats()["committed_bytes"]
    assert owners(managers.run, 5)["base.weight"] == 2
    names = [f"{p.parent.name[5:13]}/{p.name}" for p in managers.run.glob("step-*/*.safetensors")]
    assert sorted(names) == [
        "00000002/dense-00000-unchanged.safetensors",
        "00000005/dense-00000.safetensors",
    ]
    assert written[2] > written[1]  # one header more
    assert written[3] == written[4] == written[5] < written[1] - model.base.weight.nbytes
    assert verify(LocalStore(managers.run)).ok


def test_what_changes_is_written_again(managers: Managers) -> None:
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        with torch.no_grad():
            model.base.weight[3, 4] += 1
        tune_steps(manager, model, optimizer, [3, 4])
    found = [owners(managers.run, step)["base.weight"] for step in range(1, 5)]
    assert found == [1, 1, 3, 3]
    assert owners(managers.run, 4)["other.weight"] in (1, 3)  # moved, if little else is left in 1
    again, fresh, _ = restored(managers)
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_full_save_writes_everything(managers: Managers) -> None:
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        tune(model, optimizer, 3)
        manager.save(3, full=True)
        manager.wait()
        tune_steps(manager, model, optimizer, [4])
        stats = manager.stats()
    assert stats["referenced_bytes"][3] == 0
    assert stats["committed_bytes"][3] == stats["committed_bytes"][1]
    assert set(owners(managers.run, 4).values()) == {3, 4}


def test_damage_in_a_shared_file_costs_every_step_that_shares_it(managers: Managers) -> None:
    """The price; a full save is the remedy, and what one falls back to or from."""
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        then = state_of(model, optimizer)
        tune(model, optimizer, 3)
        manager.save(3, full=True)
        tune_steps(manager, model, optimizer, [4])
    store = LocalStore(managers.run)
    record, key = _place(managers.run, 4, "base.weight")
    assert key.startswith("step-00000003")
    _flip(managers.run / key, record.offset + 5)
    (damage,) = verify(store).damaged
    assert (damage.file, damage.piece) == (key, record.piece.name)
    again, fresh, report = restored(managers)
    assert report.step == 2
    assert len(report.reasons) == 2  # steps 4 and 3
    assert all("base.weight" in reason for reason in report.reasons)
    assert_equal(state_of(again, fresh), then)


def test_damage_in_the_only_file_leaves_nothing(managers: Managers) -> None:
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2, 3])
    record, key = _place(managers.run, 3, "base.weight")
    _flip(managers.run / key, record.offset)
    with pytest.raises(NothingValid, match=r"base\.weight"):
        restored(managers)


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_file_that_is_not_there_is_not_referenced(managers: Managers, harm: str) -> None:
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        path = folder(managers.run, 1) / "dense-00000.safetensors"
        if harm == "gone":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 1)
        tune_steps(manager, model, optimizer, [3])
    assert set(owners(managers.run, 3).values()) == {3}
    again, fresh, report = restored(managers)
    assert report.step == 3
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_verify_holds_references_against_the_base(managers: Managers) -> None:
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
    store = LocalStore(managers.run)
    manifest = load_manifest(store, version_of(managers.run, 2))
    name = next(r.piece.name for r in manifest.dense if r.piece.fqn == "base.weight")
    moved = [
        msgspec.structs.replace(r, offset=r.offset + 8) if r.piece.name == name else r
        for r in manifest.dense
    ]
    unbased = msgspec.structs.replace(manifest.head, base=None)
    for wrong, why in (
        (msgspec.structs.replace(manifest, dense=moved), "does not hold it there"),
        (msgspec.structs.replace(manifest, head=unbased), "a full save did not write it"),
    ):
        (managers.run / manifest_key(manifest.version)).write_bytes(encode_json(wrong))
        assert any(d.piece == name and why in d.why for d in verify(store).damaged)


def test_a_commit_with_references_can_be_rolled_forward(managers: Managers) -> None:
    """As if killed after the receipt: the next start needs that and the base, nothing else."""
    model, optimizer = lora()
    with managers(model, optimizer) as manager:
        tune_steps(manager, model, optimizer, [1, 2, 3])
    path = folder(managers.run, 3) / "manifest.json"
    before = load_manifest(LocalStore(managers.run), version_of(managers.run, 3))
    path.unlink()
    again, fresh, report = restored(managers)
    assert report.step == 3
    after = load_manifest(LocalStore(managers.run), before.version)
    assert msgspec.structs.replace(after, created="") == msgspec.structs.replace(before, created="")
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_helper_that_follows_a_killed_one_references_as_well(managers: Managers) -> None:
    policy = moc.Policy(snapshot_every=1, persist_every=1, keep_latest_k=None, on_error="warn")
    model, optimizer = lora()
    with managers(model, optimizer, policy=policy) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        helper = manager._saver._handover._helper
        assert helper is not None
        os.kill(helper.pid, signal.SIGKILL)
        helper._process.wait(30)
        tune(model, optimizer, 3)
        manager.step(3)  # may be lost with the helper, or be the next one's
        tune_steps(manager, model, optimizer, [4])
    assert 1 in owners(managers.run, 4).values()
    again, fresh, report = restored(managers)
    assert report.step == 4
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_transient_error_ends_in_the_same_references(managers: Managers) -> None:
    """The dense file is there when the receipt fails: the second try must write the same."""
    model, optimizer = lora()
    faults = FaultScript(nth=5, verb="put_new", times=1)  # data, receipt, manifest; data, *receipt*
    with managers(model, optimizer, faults=faults) as manager:
        tune_steps(manager, model, optimizer, [1, 2])
        assert manager.stats()["warnings"] == 1
    assert set(owners(managers.run, 2).values()) == {1, 2}
    assert verify(LocalStore(managers.run)).ok


def frozen_experts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Experts that are not trained."""
    model = moe(seed)
    model[1].experts.w1.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.01)


def test_an_expert_that_is_referenced_is_of_the_new_step(managers: Managers) -> None:
    model, optimizer = frozen_experts()
    policy = dataclasses.replace(EACH, k_snapshot=2, k_persist=1)
    with managers(model, optimizer, policy=policy) as manager:
        run_steps(manager, model, optimizer, [1, 2, 3], after=lambda _: manager.wait())
    store = LocalStore(managers.run)
    manifest = load_manifest(store, version_of(managers.run, 3))
    assert sorted(v.step for v in manifest.versions[0]) == [1, 1, 2, 3]
    assert {manifest.files[r.file].key[5:13] for r in manifest.experts} == {"00000001"}
    assert [s.experts_saved for s in survey(store).steps] == [EXPERTS, 1, 1]
    assert verify(store).ok
    again, fresh = frozen_experts(1)
    report = managers(again, fresh, memory_dir=managers.memory_dir / "wiped").restore()
    assert report is not None
    assert report.step == 3
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def test_a_place_that_a_restore_struck_is_not_referenced_again(managers: Managers) -> None:
    """A frozen expert has the bytes that the bad file should have: its digest fits for ever."""
    model, optimizer = frozen_experts()
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1], after=lambda _: manager.wait())
        train(model, optimizer, 2)
        manager.save(2, full=True)
    record, key = _place(managers.run, 2, "1.experts.w1")
    assert key.startswith("step-00000002")
    _flip(managers.run / key, record.offset)
    again, fresh = frozen_experts(1)
    with managers(again, fresh, memory_dir=managers.memory_dir / "wiped") as manager:
        report = manager.restore()
        assert report is not None
        assert (report.step, report.stale_experts) == (2, 1)
        run_steps(manager, again, fresh, [3], after=lambda _: manager.wait())
    assert owners(managers.run, 3)["1.experts.w1"] == 3
    assert verify(LocalStore(managers.run), [3]).ok


@pytest.mark.dist
def test_other_ranks_reference_what_these_have_written(managers: Managers) -> None:
    """Two ranks share the writing; the one that goes on alone names the files of both."""

    def on_a_rank() -> tuple[dict[str, Any], dict[str, Tensor]]:
        model, optimizer = lora()
        with managers(model, optimizer) as manager:
            tune_steps(manager, model, optimizer, [1, 2, 3])
            return manager.stats(), state_of(model, optimizer)

    (stats, then), _ = run_ranks(on_a_rank, 2)
    frozen = lora()[0].frozen_bytes
    for step in (2, 3):
        assert stats["committed_bytes"][step] < frozen / 3
        assert stats["referenced_bytes"][step] >= frozen
    again, fresh = lora(1)
    manager = managers(again, fresh, memory_dir=managers.memory_dir / "wiped")
    assert manager.restore() is not None
    assert_equal(state_of(again, fresh), then)
    tune_steps(manager, again, fresh, [4])
    assert manager.stats()["referenced_bytes"][4] >= frozen
    manifest = load_manifest(LocalStore(managers.run), version_of(managers.run, 4))
    writers = {f.key for f in manifest.files if not f.is_of(manifest.version)}
    assert {Path(key).name for key in writers} >= {f"dense-0000{r}.safetensors" for r in range(2)}
    assert verify(LocalStore(managers.run)).ok


@pytest.mark.parametrize("make", [dense, moe])
def test_nothing_changes_at_all(managers: Managers, make: Any) -> None:
    """A save of the same values: a receipt and a manifest, and hardly any bytes."""
    model = make(0)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        run_steps(manager, model, optimizer, [1], after=lambda _: manager.wait())
        manager.save(2)
        manager.wait()
    assert not list(folder(managers.run, 2).glob("experts*"))
    again = make(1)
    fresh = adamw(again)
    report = managers(again, fresh, memory_dir=managers.memory_dir / "wiped").restore()
    assert report is not None
    assert report.step == 2
    assert_equal(state_of(again, fresh), state_of(model, optimizer))


def _place(run: Path, step: int, fqn: str) -> tuple[PieceRecord, str]:
    """First weight piece of a tensor, and the key of its file."""
    manifest = load_manifest(LocalStore(run), version_of(run, step))
    record = next(
        r
        for r in (*manifest.dense, *manifest.experts)
        if (r.piece.fqn, r.piece.part) == (fqn, "weight")
    )
    return record, manifest.files[record.file].key


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)
