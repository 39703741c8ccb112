"""The demo's parts: text, loader, gate, expert parallelism, and what it makes of its records."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it at first use: once here, not in each rank
import torch.distributed as dist
from torch import Tensor

from moc.demo.corpus import split_windows, standard_library_files, write_corpus
from moc.demo.journal import Journal, Tail
from moc.demo.launch import first_error
from moc.demo.loader import Loader
from moc.demo.model import ModelConfig, MoE, Router, Transformer
from moc.demo.picture import draw, smooth
from moc.demo.run import Plan, _result, add_arguments, run_demo
from moc.demo.runlog import RunLog
from moc.demo.screen import result_table
from moc.demo.trainer import Ranks, Trainer, average_gradients, make_groups, parse_arguments
from moc.testing.ranks import run_ranks

CPU = torch.device("cpu")
SMALL = ModelConfig(
    vocab=256, seq_len=16, dim=16, layers=4, heads=2, experts=4, expert_dim=24, top_k=2
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes((7 * i * i + i // 3) % 251 for i in range(40_000)))
    return path


# ------------------------------------------------------------------------------------------- text


def test_corpus_is_the_standard_library_without_its_tests(tmp_path: Path) -> None:
    files = list(standard_library_files())
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)
    assert files == list(standard_library_files())
    nbytes = write_corpus(tmp_path / "corpus.bin")
    assert nbytes == (tmp_path / "corpus.bin").stat().st_size > 5_000_000


def test_corpus_of_the_users_own_file(text: Path, tmp_path: Path) -> None:
    assert write_corpus(tmp_path / "corpus.bin", text) == 40_000
    assert (tmp_path / "corpus.bin").read_bytes() == text.read_bytes()


def test_empty_corpus_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="--data FILE"):
        write_corpus(tmp_path / "corpus.bin", tmp_path / "empty")
    assert not (tmp_path / "corpus.bin").exists()


@pytest.mark.parametrize("windows", [16, 17, 31, 100, 1023, 1024, 5000, 91_472])
def test_an_epoch_visits_every_window_of_its_half_once(windows: int) -> None:
    split = split_windows(windows * 129, 129)
    train = [split.train_window(sample, seed=3) for sample in range(split.train)]
    held_out = [split.validation_window(sample) for sample in range(split.validation)]
    assert len(set(train)) == split.train
    assert len(set(held_out)) == split.validation
    assert not set(train) & set(held_out)
    assert max(train + held_out) < windows
    assert split.train + split.validation > windows - split.block
    assert 1 / 32 <= split.validation / windows <= 1 / 16


def test_text_too_short_to_split() -> None:
    with pytest.raises(ValueError, match="at least 2064"):
        split_windows(1000, 129)


def test_loader_goes_on_where_its_state_says(text: Path) -> None:
    first = Loader(text, batch=2, seq_len=16, seed=5)
    for _ in range(3):
        first.next_batch(CPU)
    second = Loader(text, batch=2, seq_len=16, seed=5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.validation_batch(0, CPU)  # moves nothing
    for _ in range(3):
        for ours, theirs in zip(first.next_batch(CPU), second.next_batch(CPU), strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="seed 5"):
        Loader(text, batch=2, seq_len=16, seed=6).load_state_dict(first.state_dict())


def test_ranks_share_out_the_batch_of_one(text: Path) -> None:
    one = Loader(text, batch=4, seq_len=16, seed=1)
    two = [Loader(text, batch=2, seq_len=16, seed=1, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        whole, _ = one.next_batch(CPU)
        assert torch.equal(whole, torch.cat([loader.next_batch(CPU)[0] for loader in two]))
    inputs, targets = one.next_batch(CPU)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


# ------------------------------------------------------------------------------------------ model


def test_gate_keeps_the_top_k_of_a_softmax() -> None:
    torch.manual_seed(0)
    router = Router(SMALL).eval()
    tokens = torch.randn(9, SMALL.dim)
    logits, weights, indices = router(tokens)
    assert torch.equal(logits, router.gate(tokens))
    assert indices.shape == weights.shape == (9, 2)
    assert indices.dtype == torch.int64
    probabilities = logits.softmax(-1)
    assert torch.equal(weights, probabilities.gather(1, indices))
    assert torch.equal(weights, probabilities.sort(descending=True).values[:, :2])


def test_gate_noise_comes_from_torchs_generator() -> None:
    router = Router(SMALL)
    tokens = torch.randn(9, SMALL.dim)
    state = torch.get_rng_state()
    first = router(tokens)[0]
    assert not torch.equal(first, router(tokens)[0])
    torch.set_rng_state(state)
    assert torch.equal(first, router(tokens)[0])


def test_moe_is_the_weighted_sum_of_experts_where_none_is_full() -> None:
    moe = MoE(replace(SMALL, capacity_factor=4.0), None).eval()
    x = torch.randn(2, 5, SMALL.dim)
    tokens = x.flatten(0, 1)
    _, weights, indices = moe.router(tokens)
    every = torch.stack([moe.experts(tokens.expand(4, -1, -1))[e] for e in range(4)])
    expected = sum(
        weights[:, j, None] * every[indices[:, j], torch.arange(10)] for j in range(SMALL.top_k)
    )
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(moe(x)[0].flatten(0, 1), expected)


def test_full_experts_drop_second_choices_first() -> None:
    moe = MoE(replace(SMALL, experts=2, capacity_factor=0.5), None).eval()
    with torch.no_grad():
        moe.router.gate.weight.copy_(torch.stack([torch.ones(16), -torch.ones(16)]))
    # ten tokens, both experts each: five seats; the first choice of all is expert 0
    x = torch.rand(1, 10, SMALL.dim)
    out, balance = moe(x)
    _, weights, _ = moe.router(x[0])
    first = weights[:5, :1] * moe.experts(x.expand(2, -1, -1))[0, :5]
    second = weights[:5, 1:] * moe.experts(x.expand(2, -1, -1))[1, :5]
    torch.testing.assert_close(out[0, :5], first + second)
    assert torch.equal(out[0, 5:], torch.zeros(5, SMALL.dim))
    assert balance.item() == pytest.approx(1.0)  # both are asked for equally often


def test_size_is_what_the_documentation_says() -> None:
    parameters = sum(p.numel() for p in Transformer(ModelConfig()).parameters())
    assert 1.6e6 < parameters < 1.7e6


def test_expert_parallel_gradients_equal_those_of_one_process() -> None:
    def gradients_agree() -> None:
        ranks = make_groups(2, CPU)
        batches = torch.arange(4 * 2 * 17).view(4, 2, 17).mul(37).remainder(251)

        def loss_of(model: Transformer, rank: int) -> Tensor:
            torch.manual_seed(100 + rank)
            loss, balance = model(batches[rank, :, :-1], batches[rank, :, 1:])
            return loss + balance

        torch.manual_seed(0)
        model = Transformer(SMALL, ranks.ep)
        loss = loss_of(model, ranks.rank)
        loss.backward()
        dense, experts = model.parameters_by_kind()
        mean = average_gradients(dense, ranks.dp, 4, loss.detach())
        average_gradients(experts, ranks.edp, 4)

        torch.manual_seed(0)
        alone = Transformer(SMALL)
        expected = torch.stack([loss_of(alone, rank) for rank in range(4)]).mean()
        expected.backward()
        torch.testing.assert_close(mean, expected.detach())
        owned = slice(2 * (ranks.rank // 2), 2 * (ranks.rank // 2) + 2)
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            whole = theirs.grad[owned] if ".experts." in name else theirs.grad
            torch.testing.assert_close(ours.grad, whole, msg=name)

    run_ranks(gradients_agree, 4)


def test_training_is_the_same_twice_and_replicas_stay_equal(text: Path) -> None:
    argv = ["--data", str(text), "--run-dir", ".", "--batch", "1", "--seq-len", "32"]

    def train() -> tuple[float, float]:
        trainer = Trainer(parse_arguments(argv), make_groups(2, CPU))
        losses = [float(trainer.step()) for _ in range(3)]
        flat = torch.cat([p.detach().flatten() for p in trainer.dense])
        all_flat = [torch.empty_like(flat) for _ in range(4)]
        dist.all_gather(all_flat, flat)
        assert all(torch.equal(flat, other) for other in all_flat)
        return losses[-1], float(flat.double().sum())

    first, second = run_ranks(train, 4), run_ranks(train, 4)
    assert first == second
    assert len(set(first)) == 1


def test_one_process_trains_without_a_group(text: Path) -> None:
    args = parse_arguments(["--data", str(text), "--run-dir", ".", "--seq-len", "32"])

    def train(_rank: int) -> list[float]:
        trainer = Trainer(args, Ranks(device=CPU))
        return [float(trainer.step()) for _ in range(4)]

    [losses] = run_ranks(train, 1, init=False)
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------- records


def test_a_record_cut_off_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with Journal(path) as journal:
        journal.write("start", pid=1)
    with path.open("ab") as file:
        file.write(b'{"kind": "st')
    assert [record["kind"] for record in tail.read()] == ["start"]
    with Journal(path) as journal:
        journal.write("step", step=7)
    assert [record["step"] for record in tail.read()] == [7]
    assert tail.read() == []


def make_log(*, resumed: int | None = None) -> RunLog:
    log = RunLog(world_size=2)
    log.feed(0, {"kind": "ready", "report": None})
    for step in range(1, 21):
        log.feed(0, {"kind": "step", "step": step, "loss": 5 - step / 10, "tokens": 8, "secs": 1})
    if resumed is not None:
        log.feed(0, {"kind": "ready", "report": report(resumed)})
        for step in range(resumed + 1, 25):
            log.feed(0, {"kind": "step", "step": step, "loss": 3.0, "tokens": 8, "secs": 1})
    else:
        for step in range(21, 25):
            log.feed(0, {"kind": "step", "step": step, "loss": 3.0, "tokens": 8, "secs": 1})
    for rank in range(2):
        for _ in range(2):  # the save itself, and what the next optimizer step waits for
            feed_event(log, rank, "stalled", 10, secs=0.01 * (rank + 1))
        log.feed(rank, {"kind": "blocking", "step": 12, "secs": 0.5, "nbytes": 9})
    log.feed(0, {"kind": "validation", "step": 10, "loss": 4.0})
    for step, nbytes in ((5, 20), (10, 9), (20, 10)):
        feed_event(log, 0, "committed", step, nbytes=nbytes)
    log.feed(0, {"kind": "end", "val_loss": 2.5, "stats": {}})
    return log


def report(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "lost_tokens": 12,
        "plt": 0.01,
        "sources": {"memory": 5, "storage": 7},
        "by_class": {"dense": {"storage": 7}, "experts": {"memory": 5}},
        "oldest_expert_age": 4,
        "secs": {"total": 0.1},
        "reasons": [],
    }


def feed_event(log: RunLog, rank: int, kind: str, step: int, **fields: Any) -> list[str]:
    record = {"kind": "event", "event": kind, "attempt": 1, "step": step, "nbytes": 10**6}
    return log.feed(rank, {**record, "secs": 0.0, "text": "", **fields})


def test_a_node_is_lost_when_memory_is_ahead_of_storage() -> None:
    log = RunLog(world_size=2)
    log.feed(0, {"kind": "ready", "report": None})
    seen = []
    for step in range(1, 30):
        log.feed(0, {"kind": "step", "step": step, "loss": 1.0, "tokens": 8, "secs": 1.0})
        if step % 5 == 0:
            assert feed_event(log, 0, "snapshot_done", step) == []
            [line] = feed_event(log, 1, "snapshot_done", step)
            assert "snapshot done  2.0 MB" in line
        if step % 10 == 0:
            feed_event(log, 0, "marked", step)
        if step % 10 == 2 and step > 10:
            [line] = feed_event(log, 0, "committed", step - 2)
            assert f"{step - 2}  committed" in line
        seen += [step] if log.may_lose_node(not_before=12) else []
    assert seen == [17, 18, 19, 27, 28, 29]


def test_a_commit_is_told_after_its_snapshot() -> None:
    log = RunLog(world_size=2)
    assert feed_event(log, 0, "snapshot_done", 5) == []
    assert feed_event(log, 0, "committed", 5) == []
    assert log.commit == 5
    snapshot, commit = feed_event(log, 1, "snapshot_done", 5)
    assert "snapshot done" in snapshot
    assert "committed" in commit
    [rolled_forward] = feed_event(log, 0, "committed", 10)
    assert "committed" in rolled_forward


def test_result_has_what_programs_expect() -> None:
    undisturbed, faulted = make_log(), make_log(resumed=16)
    result = _result(undisturbed, faulted, 20, 9.5)
    assert result["undisturbed"] == {"val_loss": 2.5}
    assert result["faulted"] == {"val_loss": 2.5, "resumed_at": [16], "fault_steps": [20]}
    assert result["bytes"] == {"full": 20, "partial": 10}
    assert result["stall_secs"] == {"blocking": 0.5, "moc": 0.04}
    assert (result["lost_tokens"], result["plt"]) == (12, 0.01)
    assert result["sources"]["memory"] == 5
    assert result["oldest_expert_age_steps"] == 4
    assert json.loads(json.dumps(result)) == result
    assert result_table(result).row_count > 6


def test_picture_of_both_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(tmp_path / "loss.png", make_log(), make_log(resumed=16), [20])
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"
    assert smooth([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


def test_the_rank_to_blame_is_not_the_one_that_lost_its_peer(tmp_path: Path) -> None:
    assert first_error(tmp_path) == ""
    errors = {
        0: "RuntimeError: [gloo] Connection closed by peer",
        1: "Traceback\n[rank1]: KeyError: 'lr'\nmore",
    }
    for rank, text in errors.items():
        for attempt in range(2):
            folder = tmp_path / "logs" / "run" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text if attempt else "ValueError: old")
    assert first_error(tmp_path).startswith("KeyError: 'lr' (see ")
    assert "attempt_1/1/stderr.log" in first_error(tmp_path)
    (tmp_path / "logs" / "run" / "attempt_1" / "1" / "stderr.log").unlink()
    assert "onnection" in first_error(tmp_path)
    (tmp_path / "torchrun.log").write_text("traceback : Signal 9 (SIGKILL) received by PID 12\n")
    assert first_error(tmp_path).startswith("Signal 9 (SIGKILL) received by PID 12 (see ")


# ---------------------------------------------------------------------------------------- command


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_a_run_directory_in_use_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "something").touch()
    assert run_demo(parse("--run-dir", str(tmp_path))) == 2
    assert "not empty" in capsys.readouterr().err


def test_too_few_steps_to_lose_a_node_in(tmp_path: Path, capsys: Any) -> None:
    assert run_demo(parse("--run-dir", str(tmp_path / "new"), "--steps", "20")) == 2
    assert "--steps 20" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("steps", [80, 160, 420])
def test_blocking_saves_keep_clear_of_others(steps: int) -> None:
    plan = Plan(steps=steps, snapshot_every=10)
    assert 1 <= len(plan.blocking_at) <= 5
    for step in plan.blocking_at:
        assert 0 < step <= steps
        assert step % plan.snapshot_every == 8
        assert step % plan.persist_every > plan.snapshot_every
