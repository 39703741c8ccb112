"""The command ``moc`` over real runs: what it lists, shows and finds, and how it exits."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moc
from moc.cli import doctor
from moc.cli.main import main
from moc.core.manifest import RunInfo, encode_json, sign
from moc.errors import ConfigError, StepNotFound
from moc.persist.commit import load_manifest, load_timeline
from moc.persist.survey import survey
from moc.persist.verify import verify
from moc.store import LocalStore, open_store

VERBS = ("demo", "ls", "show", "verify", "report", "prune", "clean", "bench", "doctor")


class Router(nn.Module):
    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return logits, weights, chosen


class MoE(nn.Module):
    def __init__(self, dim: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.router(x)
        out = x
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * ((chosen == e).float() * weights).sum(-1, keepdim=True)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


POLICY = moc.Policy(
    snapshot_every=2, persist_every=2, total_steps=40, k_snapshot=2, k_persist=1, keep_latest_k=3
)


def train(run_dir: Path, memory: Path, last: int, resume: int | None = None) -> None:
    """Train up to step ``last``, on from the newest step or from ``resume``."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with moc.CheckpointManager(
        run_dir, model=model, optimizer=optimizer, policy=POLICY, memory_dir=memory
    ) as manager:
        report = manager.restore(resume)
        for step in range(report.step + 1 if report else 1, last + 1):
            model(torch.randn(16, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                manager.save(step)
                manager.wait()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts: up to step 12, back to step 10, on to step 14."""
    folder = tmp_path_factory.mktemp("cli")
    memory = Path("/dev/shm") / f"moc-test-cli-{os.getpid()}"
    run_dir = folder / "run"
    try:
        train(run_dir, memory, 12)
        train(run_dir, memory, 14, resume=10)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return run_dir


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    """A copy to do harm to; a moved tree, too."""
    target = tmp_path / "moved" / "run"
    shutil.copytree(original, target)
    return target


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Runs a verb with ``--json``: exit code, the one object, what stood on standard error."""

    def call(*words: object) -> tuple[int, dict[str, Any], str]:
        code = main([*map(str, words), "--json"])
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        return code, json.loads(captured.out), captured.err

    return call


Ask = Callable[..., tuple[int, dict[str, Any], str]]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def rewrite(path: Path, facts: dict[str, Any]) -> None:
    """Put other facts into a file, under a digest that fits."""
    path.write_bytes(resigned(json.dumps(facts).encode()))


def resigned(data: bytes) -> bytes:
    """The same JSON, changed or not, under a digest that fits."""
    return sign(re.sub(rb'"digest": ?"[0-9a-f]{16}", ?', b"", data, count=1).strip())


def newest(run_dir: Path) -> Path:
    return run_dir / max(p.name for p in run_dir.glob("step-*") if (p / "manifest.json").exists())


def as_nobody(work: Callable[[], int]) -> int:
    """The exit code of the work in a child without root's rights."""
    child = os.fork()
    if not child:
        code = 99
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestLs:
    def test_it_lists_what_the_manager_would_restore(self, run_dir: Path, ask: Ask) -> None:
        code, facts, err = ask("ls", run_dir)
        assert (code, err) == (0, "")
        assert [(s["step"], s["attempt"]) for s in facts["steps"]][-2:] == [(12, 2), (14, 2)]
        assert facts["run"] == str(run_dir)
        assert facts["run_id"] == json.loads((run_dir / "run.json").read_text())["run_id"]
        assert facts["attempts"] == 2
        for step in facts["steps"]:
            folder = run_dir / f"step-{step['step']:08d}-a{step['attempt']:04d}"
            files = folder.glob("*.safetensors")
            assert step["bytes"] == sum(f.stat().st_size for f in files) > 0
            assert step["experts_saved"] == 2  # one of each layer
            assert 0 < step["oldest_expert_age_steps"] <= 10
            assert step["created"].endswith("+00:00")
            assert step["world_size"] == 1

    def test_a_step_that_training_went_back_from_is_not_live(self, run_dir: Path, ask: Ask) -> None:
        dead = run_dir / "step-00000012-a0001"
        shutil.copytree(newest(run_dir), dead, dirs_exist_ok=True)  # retention had removed it
        _, facts, _ = ask("ls", run_dir)
        why = {o["folder"]: o["why"] for o in facts["other"]}
        assert "not live: attempt 2 went back to step 10" in why[dead.name]
        assert (12, 1) not in [(s["step"], s["attempt"]) for s in facts["steps"]]

    def test_files_that_later_steps_need_are_said_to_be_kept(self, run_dir: Path, ask: Ask) -> None:
        _, facts, _ = ask("ls", run_dir)
        kept = [o for o in facts["other"] if o["why"].startswith("retired, and kept")]
        assert kept
        assert all(not (run_dir / o["folder"] / "manifest.json").exists() for o in kept)

    # field-reports A05: half steps are passed over, with the reason
    @pytest.mark.parametrize(
        ("harm", "why"),
        [
            ("lose a shard", "damaged: it needs step-00000300-a0002/dense"),
            ("lose the manifest", "not committed, though all receipts are there"),
            ("lose manifest and receipt", "not committed: no receipts"),
            ("cut the manifest", "damaged: step-00000300-a0002/manifest.json is damaged"),
            ("take another's manifest", "damaged: step-00000300-a0002/manifest.json is the mani"),
        ],
    )
    def test_half_steps(self, run_dir: Path, ask: Ask, harm: str, why: str) -> None:
        good = newest(run_dir)
        half = run_dir / "step-00000300-a0002"
        shutil.copytree(good, half)
        manifest = half / "manifest.json"
        if harm != "take another's manifest":
            text = manifest.read_text().replace("[14,2]", "[300,2]")
            manifest.write_bytes(resigned(text.replace(good.name, half.name).encode()))
        if harm == "lose a shard":
            (half / "dense-00000.safetensors").unlink()
        elif harm.startswith("lose"):
            manifest.unlink()
        elif harm == "cut the manifest":
            manifest.write_bytes(manifest.read_bytes()[:-100])
        if harm.endswith("receipt"):
            (half / "rank-00000.receipt").unlink()
        _, facts, _ = ask("ls", run_dir)
        assert max(s["step"] for s in facts["steps"]) == 14
        found = {o["folder"]: o["why"] for o in facts["other"]}
        assert found[half.name].startswith(why)
        _, shown, _ = ask("show", run_dir)
        assert shown["step"] == 14
        code, told, err = ask("show", run_dir, "--step", 300)
        assert code == (1 if "damaged" in why else 2)
        assert why.removeprefix("damaged: ") in told["error"]
        assert err == f"moc show: {told['error']}\n"

    def test_order_is_that_of_the_step_not_of_names_or_times(
        self, tmp_path: Path, ask: Ask, original: Path
    ) -> None:
        """Field report A08."""
        run_dir = tmp_path / "run"
        shutil.copytree(original, run_dir)
        good = newest(run_dir)
        for step in (99999999, 100000000, 1000):  # the first two sort the other way round as text
            folder = run_dir / f"step-{step:08d}-a0002"
            shutil.copytree(good, folder)
            text = (folder / "manifest.json").read_text().replace("[14,2]", f"[{step},2]")
            renamed = text.replace(good.name, folder.name).encode()
            (folder / "manifest.json").write_bytes(resigned(renamed))
        os.utime(newest(original))
        _, facts, _ = ask("ls", run_dir)
        assert [s["step"] for s in facts["steps"]][-3:] == [1000, 99999999, 100000000]

    def test_names_that_merely_look_like_steps(self, run_dir: Path, ask: Ask) -> None:
        """Field report A09."""
        before = ask("ls", run_dir)[1]["steps"]
        names = ["step-100.bak", "step-1e3", "step--5", "step-", ".step-300.tmp", "step-300"]
        names += ["step-0000300-a0002", "step-00000300-a2", "step-00000300-a0002.bak"]
        for name in names:
            shutil.copytree(newest(run_dir), run_dir / name)
        for name in ("step-700", "notes.txt"):
            (run_dir / name).write_text("x")
        code, facts, _ = ask("ls", run_dir)
        assert code == 0
        assert facts["steps"] == before
        alike = {o["folder"] for o in facts["other"] if "not a name" in o["why"]}
        assert alike == {*names, "step-700"} - {".step-300.tmp"}
        assert ask("verify", run_dir)[1]["ok"]

    def test_a_run_without_a_commit_is_a_run(self, tmp_path: Path, ask: Ask) -> None:
        store = LocalStore(tmp_path)
        store.put_new("run.json", [encode_json(RunInfo(run_id="r", model="m"))])
        assert ask("ls", tmp_path)[:2] == (
            0,
            {"run": str(tmp_path), "run_id": "r", "steps": [], "other": [], "attempts": 0},
        )
        code, told, _ = ask("show", tmp_path)
        assert code == 2
        assert "no committed step yet" in told["error"]
        assert ask("verify", tmp_path)[1]["ok"]
        assert main(["ls", str(tmp_path)]) == 0

    def test_object_stores_work_alike(self, run_dir: Path) -> None:
        found = survey(open_store(f"local://{run_dir}"))
        assert found == survey(LocalStore(run_dir))
        assert verify(open_store(f"local://{run_dir}")) == verify(LocalStore(run_dir))


class TestShow:
    def test_it_shows_what_the_manifest_says(self, run_dir: Path, ask: Ask) -> None:
        store = LocalStore(run_dir)
        version = max(s.version for s in survey(store).steps)
        manifest = load_manifest(store, version)
        code, facts, err = ask("show", run_dir)
        assert (code, err) == (0, "")
        assert (facts["step"], facts["attempt"]) == (14, 2)
        assert facts["pieces"] == len(manifest.dense) + len(manifest.experts)
        assert {f["key"]: f["bytes"] for f in facts["files"]} == {
            f.key: f.nbytes for f in manifest.files
        }
        assert all((run_dir / f["key"]).stat().st_size == f["bytes"] for f in facts["files"])
        assert facts["bytes"] < facts["needed_bytes"] == sum(f["bytes"] for f in facts["files"])
        assert facts["experts"] == [
            [{"attempt": v.attempt, "step": v.step} for v in row] for row in manifest.versions
        ]
        assert facts["routed"] == manifest.head.routed
        assert facts["lost"] == manifest.head.lost
        assert sum(map(sum, facts["lost"])) == facts["attempts"][1]["lost_tokens"] > 0
        assert facts["layers"] == ["blocks.0.moe", "blocks.1.moe"]
        assert facts["left_out"] == manifest.head.left_out
        assert [a["resumed_step"] for a in facts["attempts"]] == [0, 10]
        assert sum(facts["attempts"][1]["sources"].values()) > 0

    def test_a_step_by_number(self, run_dir: Path, ask: Ask) -> None:
        assert ask("show", run_dir, "--step", 12)[1]["step"] == 12

    def test_the_table_names_every_layer_age_and_file(
        self, run_dir: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
    ) -> None:
        facts = ask("show", run_dir)[1]
        assert main(["show", str(run_dir)]) == 0
        out = capsys.readouterr().out
        for layer, row in zip(facts["layers"], facts["experts"], strict=True):
            ages = [str(facts["step"] - v["step"]) for v in row]
            assert [layer, *ages] in [line.split() for line in out.splitlines()]
        assert all(f["key"] in out for f in facts["files"])
        assert "\x1b" not in out  # no colours where nobody sees them

    def test_markup_in_names_stays_text(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = run_dir.parent / "[red]run"
        run_dir.rename(other)
        assert main(["ls", str(other)]) == 0
        assert main(["show", str(other)]) == 0
        assert capsys.readouterr().out.count("[red]run") == 2

    def test_many_experts_fold_into_lines(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = newest(run_dir) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["versions"] = [[[step % 15, 1] for step in range(100)]] * 2
        rewrite(path, manifest)
        assert main(["show", str(run_dir)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        starts = [line[1] for line in lines if line[:1] == ["from"]]
        assert starts == ["32", "64", "96"] * 2


class TestVerify:
    def test_a_whole_run_is_ok(self, run_dir: Path, ask: Ask) -> None:
        code, facts, err = ask("verify", run_dir)
        assert (code, err) == (0, "")
        assert facts["ok"]
        assert facts["damaged"] == []
        store = LocalStore(run_dir)
        manifests = [load_manifest(store, s.version) for s in survey(store).steps]
        keys = {f.key for m in manifests for f in m.files}
        assert facts["files"] == len(keys)
        # Every file is read once, though several steps need it, and to its last byte.
        assert facts["bytes"] == sum((run_dir / key).stat().st_size for key in keys)
        records = {
            (m.files[r.file].key, r.offset, r.piece.name)
            for m in manifests
            for r in (*m.dense, *m.experts)
        }
        assert facts["pieces"] == len(records)

    def test_one_step_reads_what_it_needs(self, run_dir: Path, ask: Ask) -> None:
        _, shown, _ = ask("show", run_dir, "--step", 14)
        code, facts, _ = ask("verify", run_dir, "--step", 14)
        assert code == 0
        assert facts["pieces"] == shown["pieces"]
        assert facts["steps"] == [14]
        code, told, _ = ask("verify", run_dir, "--step", 13)
        assert code == 2
        assert "no committed step 13" in told["error"]

    def test_every_flipped_bit_of_a_data_file_is_found(self, run_dir: Path) -> None:
        """Field report A31: at random offsets, the file and the piece are named."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        store = LocalStore(run_dir)
        steps = [load_manifest(store, s.version) for s in survey(store).steps]
        keys = sorted({f.key for m in steps for f in m.files})
        for _ in range(40):
            key = rng.choice(keys)
            path = run_dir / key
            offset, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
            flip(path, offset, bit)
            report = verify(store)
            assert [d.file for d in report.damaged] == [key], (key, offset, bit)
            inside = [
                r.piece.name
                for m in steps
                for r in (*m.dense, *m.experts)
                if m.files[r.file].key == key and r.offset <= offset < r.offset + r.piece.nbytes
            ]
            assert report.damaged[0].piece == (inside[0] if inside else ""), (key, offset, bit)
            flip(path, offset, bit)
        assert verify(store).ok

    @pytest.mark.parametrize("name", ["manifest.json", "rank-00000.receipt"])
    def test_flipped_bits_of_records_are_found(self, run_dir: Path, name: str) -> None:
        """All but those in a time, and in counts that only this step remembers."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        store = LocalStore(run_dir)
        path = newest(run_dir) / name
        text = path.read_bytes()
        quiet = range(text.find(b'"created"'), len(text)) if b'"created"' in text else range(0)
        for _ in range(60):
            offset, bit = rng.randrange(len(text)), rng.randrange(8)
            if offset in quiet or text[offset : offset + 1].isspace():
                continue
            flip(path, offset, bit)
            report = verify(store)
            assert not report.ok, (offset, bit)
            path.write_bytes(text)

    @pytest.mark.parametrize(
        ("harm", "file", "why"),
        [
            ("cut a data file", "dense-00000.safetensors", "bytes long"),
            ("lose a data file", "dense-00000.safetensors", "missing"),
            ("lengthen a data file", "experts-00000.safetensors", "bytes long"),
            ("lose a receipt", "rank-00000.receipt", "missing, though no restore"),
            ("cut a receipt", "rank-00000.receipt", "is damaged"),
            ("take another's manifest", "manifest.json", "is the manifest of step 12"),
            ("cut the manifest", "manifest.json", "is damaged"),
        ],
    )
    def test_damage_to_a_step(
        self, run_dir: Path, ask: Ask, harm: str, file: str, why: str
    ) -> None:
        path = newest(run_dir) / file
        if harm.startswith("cut"):
            path.write_bytes(path.read_bytes()[:-3])
        elif harm.startswith("lose"):
            path.unlink()
        elif harm.startswith("lengthen"):
            path.write_bytes(path.read_bytes() + b"x")
        else:
            shutil.copy(run_dir / "step-00000012-a0002" / file, path)
        code, facts, err = ask("verify", run_dir)
        assert (code, err) == (1, "")
        assert not facts["ok"]
        assert any(
            d["file"] == f"{path.parent.name}/{file}" and why in d["why"] for d in facts["damaged"]
        )
        if harm == "cut a data file":
            assert any(d["piece"] and "only" in d["why"] for d in facts["damaged"])

    def test_two_steps_that_tell_different_things_of_one_expert(
        self, run_dir: Path, ask: Ask
    ) -> None:
        path = newest(run_dir) / "manifest.json"
        manifest = json.loads(path.read_text())
        layer, expert = next(
            (i, e)
            for i, row in enumerate(manifest["versions"])
            for e, version in enumerate(row)
            if version == [12, 2]
        )
        manifest["version_routed"][layer][expert] += 1
        rewrite(path, manifest)
        _, facts, _ = ask("verify", run_dir)
        assert [d["file"] for d in facts["damaged"]] == [f"{path.parent.name}/manifest.json"]
        assert f"expert {expert} of MoE layer {layer}" in facts["damaged"][0]["why"]

    def test_a_reference_to_a_dead_version(self, run_dir: Path, ask: Ask) -> None:
        path = newest(run_dir) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["versions"][0][0] = [12, 1]  # attempt 2 went on from step 10
        manifest["files"][0]["key"] = "step-00000012-a0001/dense-00000.safetensors"
        rewrite(path, manifest)
        told = [d["why"] for d in ask("verify", run_dir)[1]["damaged"]]
        assert any("is of step 12 (attempt 1), which is not live" in why for why in told)
        assert any("is of no live step before it" in why for why in told)

    def test_tables_that_do_not_fit_end_the_look_at_that_step(
        self, run_dir: Path, ask: Ask
    ) -> None:
        path = newest(run_dir) / "manifest.json"
        manifest = json.loads(path.read_text())
        for change in (
            {"versions": manifest["versions"][:1]},
            {"files": []},
            {"head": {**manifest["head"], "layers": []}},
            {"head": {**manifest["head"], "saved": [[9], [0]]}},
            {"dense": manifest["experts"]},
        ):
            rewrite(path, {**manifest, **change})
            facts = ask("verify", run_dir)[1]
            assert [d["file"] for d in facts["damaged"]] == [f"{path.parent.name}/manifest.json"]

    def test_the_chain_of_attempts(self, run_dir: Path, ask: Ask) -> None:
        first, second = run_dir / "attempts/0001.json", run_dir / "attempts/0002.json"
        text = second.read_text()
        for harmed, why in (
            (text.replace('"parent":1', '"parent":7'), "attempt 7 as its parent"),
            (text.replace('"attempt":2', '"attempt":3'), "the record of attempt 3"),
            (text.replace('"world_size":1', '"world_size":0'), "make no sense"),
            (text[:40], "is damaged"),
        ):
            assert harmed != text
            second.write_bytes(resigned(harmed.encode()))
            damaged = ask("verify", run_dir)[1]["damaged"]
            assert damaged[0]["file"] == "attempts/0002.json"
            assert why in damaged[0]["why"]
        second.write_text(text.replace('"resumed_step":10', '"resumed_step":90'))
        damaged = ask("verify", run_dir)[1]["damaged"]
        assert "digest does not fit" in damaged[0]["why"]
        second.write_text(text)
        first.unlink()
        damaged = ask("verify", run_dir)[1]["damaged"]
        assert damaged[0]["file"] == "attempts/0001.json"
        assert damaged[0]["why"].startswith("missing")

    def test_run_json(self, run_dir: Path, ask: Ask) -> None:
        path = run_dir / "run.json"
        text = path.read_text()
        model = json.loads(text)["model"]
        path.write_bytes(resigned(text.replace(model, "0" * 16).encode()))
        _, facts, _ = ask("verify", run_dir)
        assert {d["why"] for d in facts["damaged"]} == {"it is of another model than run.json"}
        path.unlink()
        code, facts, _ = ask("verify", run_dir)
        assert code == 1
        assert facts["damaged"][0]["file"] == "run.json"
        code, told, _ = ask("ls", run_dir)
        assert code == 1
        assert "run.json is missing" in told["error"]

    def test_a_step_retired_meanwhile_is_no_damage(self, run_dir: Path) -> None:
        class Retiring(LocalStore):
            """Retention runs in the training job while this reads."""

            def size(self, key: str) -> int:
                for path in sorted(run_dir.glob("step-00000010-*/*")):
                    path.unlink()
                return super().size(key)

        needed = survey(LocalStore(run_dir)).steps
        assert [s.version.step for s in needed] == [10, 12, 14]
        report = verify(Retiring(run_dir), [10])
        assert report.ok

    def test_it_tells_how_far_it_is(self, run_dir: Path) -> None:
        told: list[tuple[int, int]] = []
        report = verify(
            LocalStore(run_dir), progress=lambda done, total: told.append((done, total))
        )
        assert told[0][0] == 0
        assert told[-1] == (report.nbytes, report.nbytes)
        assert told == sorted(told)

    def test_the_table_names_file_and_piece(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", str(run_dir)]) == 0
        assert capsys.readouterr().out.startswith("ok: ")
        path = newest(run_dir) / "dense-00000.safetensors"
        flip(path, path.stat().st_size - 1)
        assert main(["verify", str(run_dir)]) == 1
        out = capsys.readouterr().out
        assert f"{path.parent.name}/{path.name}" in out
        assert "|0" in out
        assert "DAMAGED" in out


class TestOtherPlaces:
    def test_a_read_only_tree(self, run_dir: Path) -> None:
        for path in [run_dir, *run_dir.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        for folder in run_dir.parents:
            if folder.stat().st_uid == os.getuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o055)
        before = sorted((p, p.stat().st_mtime_ns) for p in run_dir.rglob("*"))

        def look() -> int:
            names = ("ls", "show", "verify")
            if os.access(run_dir, os.W_OK):
                return 98
            return max(main([verb, str(run_dir), "--json"]) for verb in names)

        assert as_nobody(look) == 0
        assert sorted((p, p.stat().st_mtime_ns) for p in run_dir.rglob("*")) == before
        for path in [run_dir, *run_dir.rglob("*")]:
            path.chmod(0o755)

    def test_a_tree_that_may_not_be_read(
        self, run_dir: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run_dir.chmod(0o700)
        assert as_nobody(lambda: main(["ls", str(run_dir)])) == 1

    def test_no_run_says_where_it_may_be(self, run_dir: Path, tmp_path: Path, ask: Ask) -> None:
        code, told, err = ask("ls", tmp_path)
        assert code == 2
        assert f"did you mean {run_dir}?" in told["error"]
        assert err.count("\n") == 1
        for verb in ("ls", "show", "verify"):
            code, told, _ = ask(verb, tmp_path / "nothing")
            assert code == 2
            assert str(tmp_path / "nothing") in told["error"]
        code, told, _ = ask("ls", "nope://bucket/run")
        assert code == 2
        assert "nope://" in told["error"]

    def test_errors_of_the_functions(self, run_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no run at"):
            verify(LocalStore(tmp_path / "nothing"))
        with pytest.raises(StepNotFound, match="no committed step 1, 2 on"):
            verify(LocalStore(run_dir), [1, 2, 14])


class TestDoctor:
    def test_this_machine_passes(self, tmp_path: Path, ask: Ask) -> None:
        target = tmp_path / "runs" / "new"
        code, facts, err = ask("doctor", "--run", target, "--memory-dir", tmp_path)
        assert (code, facts["ok"], err) == (0, True, "")
        assert [c["name"] for c in facts["checks"]] == [
            "memory tier",
            "memory room",
            "memory limit",
            "memory write",
            "memlock",
            "umask",
            "kernel",
            "start method",
            "torch",
            "helper process",
            "rendezvous",
            "store",
        ]
        for check in facts["checks"]:
            assert set(check) == {"name", "status", "found", "remedy"}
            assert check["status"] == "ok" or check["remedy"]
        assert list(tmp_path.iterdir()) == []  # it took back what it made

    def test_without_run_no_store_is_touched(self, ask: Ask) -> None:
        assert "store" not in [c["name"] for c in ask("doctor")[1]["checks"]]

    def test_a_run_directory_that_is_there_stays(self, run_dir: Path, ask: Ask) -> None:
        before = sorted(run_dir.rglob("*"))
        assert ask("doctor", "--run", run_dir)[0] == 0
        assert sorted(run_dir.rglob("*")) == before

    def test_a_store_whose_keys_can_be_written_twice_fails(self, tmp_path: Path) -> None:
        class Overwriting(LocalStore):
            def put_new(self, key: str, chunks: Any) -> int:
                data = b"".join(chunks)
                self.put(key, data)
                return len(data)

        check = doctor._store(Overwriting(tmp_path))
        assert check.status == "fail"
        assert "written twice" in check.found
        assert list(tmp_path.iterdir()) == []

    def test_what_may_not_be_written_fails(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o555)
        for folder in tmp_path.parents:
            if folder.stat().st_uid == os.getuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o055)
        assert as_nobody(lambda: main(["doctor", "--memory-dir", str(tmp_path)])) == 1
        assert as_nobody(lambda: main(["doctor", "--run", str(tmp_path)])) == 1
        tmp_path.chmod(0o755)

    def test_a_disk_is_a_warning(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(doctor, "_mount_kind", lambda _: "ext4")
        check = doctor._memory_kind(tmp_path)
        assert check.status == "warn"
        assert "tmpfs" in check.remedy

    def test_shared_memory_is_tmpfs(self) -> None:
        assert doctor._mount_kind(Path("/dev/shm")) == "tmpfs"

    @pytest.mark.parametrize(("mask", "status"), [(0o022, "ok"), (0o000, "warn"), (0o777, "fail")])
    def test_umask(self, mask: int, status: str) -> None:
        old = os.umask(mask)
        try:
            assert doctor._umask().status == status
            assert os.umask(mask) == mask
        finally:
            os.umask(old)

    def test_the_store_of_torchrun_can_be_switched_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "moc.init_process_group" in doctor._rendezvous().remedy
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        assert doctor._rendezvous().remedy == ""

    def test_for_people(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor"]) == 0
        assert "memory tier" in capsys.readouterr().out


class TestCommand:
    def test_flags_are_frozen(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert all(f"    {verb} " in out for verb in VERBS)
        assert "exit codes:" in out
        flags = {
            "ls": ["--json"],
            "show": ["--step N", "--json"],
            "verify": ["--step N", "--json"],
            "doctor": ["--memory-dir D", "--run RUN", "--json"],
        }
        for verb, names in flags.items():
            with pytest.raises(SystemExit):
                main([verb, "--help"])
            out = capsys.readouterr().out
            assert all(f"  {name}" in out for name in names)
            assert "exit codes:" in out

    @pytest.mark.parametrize(
        "words", [["lss"], ["ls"], ["ls", "a", "--jso"], ["show", "a", "--step", "x"]]
    )
    def test_wrong_usage_is_2(self, words: list[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2

    def test_no_verb_prints_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "verbs:" in capsys.readouterr().err

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["--version"])
        assert (stop.value.code, capsys.readouterr().out) == (0, f"moc {moc.__version__}\n")

    @pytest.mark.parametrize("words", [["ls"], ["show"], ["verify"], ["ls", "--json"]])
    def test_nothing_slow_is_imported(self, run_dir: Path, words: list[str]) -> None:
        """So that they answer in under 0.3 s; a timed assertion would be one about the machine."""
        code = (
            "import sys; from moc.cli.main import main; code = main(sys.argv[1:]);"
            "slow = {'torch', 'numpy', 'fsspec', 'asyncio', 'matplotlib', 'moc.cli.doctor'};"
            "sys.exit(code or ' '.join(slow & sys.modules.keys()) or None)"
        )
        words = [words[0], str(run_dir), *words[1:]]
        subprocess.run(
            [sys.executable, "-c", code, *words], check=True, timeout=60, capture_output=True
        )

    def test_doctor_imports_no_torch_and_json_no_rich(self, run_dir: Path) -> None:
        code = (
            "import sys; from moc.cli.main import main; code = main(sys.argv[2:]);"
            "sys.exit(code or sys.argv[1] in sys.modules)"
        )
        for name, *words in (
            ("torch", "doctor"),
            ("rich", "ls", str(run_dir), "--json"),
            ("rich", "show", str(run_dir), "--json"),
            ("rich", "verify", str(run_dir), "--json"),
        ):
            command = [sys.executable, "-c", code, name, *words]
            subprocess.run(command, check=True, timeout=60, capture_output=True)

    def test_exit_codes_of_the_process(self, run_dir: Path) -> None:
        def code(*words: object) -> int:
            command = [sys.executable, "-m", "moc", *map(str, words)]
            done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
            assert "Traceback" not in done.stderr
            return done.returncode

        assert code("ls", run_dir) == 0
        assert code("verify", run_dir) == 0
        assert code("show", run_dir, "--step", 1) == 2
        assert code("ls", run_dir / "nothing") == 2
        assert code() == 2
        path = newest(run_dir) / "experts-00000.safetensors"
        flip(path, path.stat().st_size - 1)
        assert code("verify", run_dir) == 1

    def test_a_reader_that_goes_away_is_no_error(self, run_dir: Path) -> None:
        command = f"{sys.executable} -m moc show {run_dir} | true"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, timeout=60, check=False, text=True
        )
        assert done.stderr == ""

    def test_a_pure_ascii_terminal(self, run_dir: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "moc", "ls", str(run_dir)],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.isascii()


def test_the_run_of_these_tests_is_what_they_think(original: Path) -> None:
    timeline = load_timeline(LocalStore(original))
    assert [(a.parent, a.resumed_step) for a in timeline.attempts] == [(0, 0), (1, 10)]
