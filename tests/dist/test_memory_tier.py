"""A40: what is in the memory of several nodes is the newest step, or a line says why it is not.

Four ranks on two virtual nodes, as a real start left them that was killed after step 7: step 4 is
in storage, steps 5 to 7 are sealed in memory. Each case spoils a copy of that and restores it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.job import Outcome, Spec, assert_equal, merged, run_job, same_bytes, wait_at
from tests.support.oracle import Files
from tests.support.orphans import wait_for_helpers
from torch import Tensor

import moc
from moc.testing.ranks import RankFailed, run_ranks, start_ranks

pytestmark = pytest.mark.dist

POLICY = moc.Policy(snapshot_every=1, persist_every=4, timeout_secs=30, grace_secs=2)
LAST = 7
VICTIM = 1
BEHIND = 3


def lose_node(spec: Spec) -> None:
    """A node with its memory."""
    shutil.rmtree(spec.memory[1])


def lose_all(spec: Spec) -> None:
    """Both nodes with their memory."""
    for node in spec.memory:
        shutil.rmtree(node)


def hold_back(spec: Spec) -> None:
    """A rank that had not sealed the newest step when it died."""
    seal_of(spec, BEHIND)[0].unlink()


def damage_dense(spec: Spec) -> str:
    """A byte of dense state in one node's memory."""
    buffer, offset, piece = piece_of(spec, expert=False)
    flip(buffer, offset)
    return piece


def damage_expert(spec: Spec) -> str:
    """A byte of an expert in one node's memory."""
    buffer, offset, piece = piece_of(spec, expert=True)
    flip(buffer, offset)
    return piece


def nothing(_spec: Spec) -> None:
    """The killed rank's buffers outlive it."""


@dataclass
class Case:
    """One copy that was spoilt, and what its restore gave.

    Attributes:
        spec: of the copy.
        best: step that the oracle, which looks at names and not at bytes, expects.
        piece: what was damaged, if anything.
        outcomes: of all ranks.
    """

    spec: Spec
    best: int
    piece: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def report(self) -> moc.RestoreReport:
        report = self.outcomes[0].report
        assert report is not None
        return report

    @property
    def restored(self) -> dict[str, Tensor]:
        return merged(o.restored for o in self.outcomes)


@dataclass
class Cases:
    """All of them, by how they were spoilt, and the states of an undisturbed run by step."""

    states: dict[int, dict[str, Tensor]]
    made: dict[Callable[[Spec], str | None], Case] = field(default_factory=dict)

    def check(self, spoil: Callable[[Spec], str | None], step: int, reasons: Sequence[str]) -> Case:
        """Exactly this step came back, and training goes on as it would have."""
        case = self.made[spoil]
        assert case.report.step == step
        assert len(case.report.reasons) == len(reasons), case.report.reasons
        for line, words in zip(case.report.reasons, reasons, strict=True):
            assert words in line
            assert "\n" not in line
        assert_equal(case.restored, self.states[step])
        for later in range(step + 1, LAST + 1):
            assert_equal(merged(o.states[later] for o in case.outcomes), self.states[later])
        return case


def strike(rank: int, step: int) -> None:
    """SIGKILL to one rank, once step 7 is sealed by all and before anybody saves step 8."""
    if step == LAST + 1:
        dist.barrier()
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # which nobody passes


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Iterator[Cases]:
    home = tmp_path_factory.mktemp("nodes")
    memory = Path("/dev/shm") / f"moc-test-{os.getpid()}-nodes"
    spec = Spec(
        run_dir=home / "run",
        memory=(memory / "node0", memory / "node1"),
        text=text,
        policy=POLICY,
        steps=LAST + 1,
        each_step=strike,
        after_step=wait_at(1, 4),
    )
    free = spec.but(policy=None, each_step=None, after_step=None, record=tuple(range(1, LAST + 2)))
    try:
        undisturbed = run_ranks(run_job, 4, free)
        with (
            start_ranks(run_job, 4, spec, timeout_secs=60, allow_death=True) as ranks,
            pytest.raises(RankFailed, match="SIGKILL|without reaching"),
        ):
            ranks.wait_reached(VICTIM, "its end")
        wait_for_helpers(spec.memory)  # until then digests are noted
        cases = Cases({s: merged(o.states[s] for o in undisturbed) for s in range(1, LAST + 2)})
        spoils = (nothing, lose_node, lose_all, hold_back, damage_dense, damage_expert)
        for spoil in spoils:
            copy = _copy(spec, spoil.__name__)
            piece = spoil(copy)
            best = Files(copy.run_dir, copy.memory).best()
            cases.made[spoil] = Case(copy, best.version[0] if best else 0, piece or "")
        specs = [case.spec for case in cases.made.values()]
        told = run_ranks(lambda: [run_job(s) for s in specs], 4, timeout_secs=100)
        for case, outcomes in zip(cases.made.values(), zip(*told, strict=True), strict=True):
            case.outcomes = list(outcomes)
        yield cases
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def test_a40_one_rank_is_killed(cases: Cases) -> None:
    """Its buffers outlive it: no step is lost, and nothing is read from storage."""
    case = cases.check(nothing, LAST, [])
    assert case.best == LAST
    assert case.report.sources["memory"] > 0 == case.report.sources["storage"]


def test_a40_a_node_is_lost(cases: Cases) -> None:
    why = "it was never committed, and the snapshots of ranks [2, 3] are lost"
    case = cases.check(lose_node, 4, [why] * 3)
    assert case.best == 4
    assert case.report.sources["memory"] > 0 < case.report.sources["storage"]


def test_a40_all_nodes_are_lost(cases: Cases) -> None:
    case = cases.check(lose_all, 4, [])  # nobody is left who knows of later steps
    assert case.best == 4
    assert {name for name, nbytes in case.report.sources.items() if nbytes} == {"storage"}


def test_a40_one_rank_is_a_step_behind(cases: Cases) -> None:
    why = f"it was never committed, and the snapshots of ranks [{BEHIND}] are lost"
    assert cases.check(hold_back, LAST - 1, [why]).best == LAST - 1


def test_a40_a_byte_of_dense_state_is_wrong(cases: Cases) -> None:
    """The step is not whole any more; the one before is, in memory."""
    why = f"every source of {cases.made[damage_dense].piece} is lost or damaged"
    case = cases.check(damage_dense, LAST - 1, [why])
    assert case.best == LAST - 1
    assert "digest differs" in case.report.reasons[0]
    assert case.report.sources["storage"] == 0


def test_a40_a_byte_of_an_expert_is_wrong(cases: Cases) -> None:
    """That expert alone is a step older, which is told; all else is the newest step's."""
    case = cases.made[damage_expert]
    report = case.report
    assert (report.step, report.stale_experts, report.oldest_expert_age) == (LAST, 1, 1)
    told = [e.text for e in case.outcomes[0].events if "digest differs" in e.text]
    assert len(told) == 1
    assert "\n" not in told[0]
    restored, now, before = case.restored, cases.states[LAST], cases.states[LAST - 1]
    older = {name for name, value in restored.items() if not same_bytes(value, now[name])}
    assert older
    assert all(".experts." in name for name in older)
    assert len({(name.split(".")[1], name.split("|")[2].split(",")[0]) for name in older}) == 1
    weights = [name for name in older if name.split("|")[1] == "weight"]
    assert weights
    assert all(same_bytes(restored[name], before[name]) for name in weights)


def _copy(spec: Spec, name: str) -> Spec:
    """A run of its own to be spoilt."""
    home = spec.run_dir.parent / name
    copy = spec.but(
        run_dir=home / "run",
        memory=tuple(node.parent / name / node.name for node in spec.memory),
        each_step=None,
        after_step=None,
        steps=LAST,
        record=(5, 6, 7),
    )
    shutil.copytree(spec.run_dir, copy.run_dir)
    for source, node in zip(spec.memory, copy.memory, strict=True):
        shutil.copytree(source, node)
    return copy


def seal_of(spec: Spec, rank: int) -> tuple[Path, dict[str, Any]]:
    """A rank's seal of the newest step, and its contents."""
    for path in spec.memory[rank // 2].glob(f"moc-*/{rank:05d}-*.seal"):
        seal = json.loads(path.read_bytes())
        if seal["version"] == [LAST, 1]:
            return path, seal
    raise AssertionError(f"rank {rank} has not sealed step {LAST}")


def piece_of(spec: Spec, *, expert: bool) -> tuple[Path, int, str]:
    """A piece on the second node: its buffer, where it starts, and its name."""
    for rank in (2, 3):
        path, seal = seal_of(spec, rank)
        for piece, _, offset, *_ in seal["pieces"]:
            fqn, part, box, _, layer, *_ = piece
            if (layer >= 0) == expert and part == "weight":
                texts = [",".join(map(str, numbers)) for numbers in box]
                return path.with_suffix(".safetensors"), offset, f"{fqn}|{part}|{':'.join(texts)}"
    raise AssertionError("no such piece")


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
