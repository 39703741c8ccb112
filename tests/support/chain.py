"""Starts of one run, each struck by a fault, and what must hold from one to the next.

The job is that of `tests.support.job` on four forked ranks. Each start is struck at its n-th event;
before the next one an oracle that knows nothing but the files says which step is the newest whole
one. The start must restore exactly that step, and bytes that some start really had.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moc
from moc.core.faults import FaultScript
from moc.demo.trainer import make_groups
from moc.testing.ranks import RankFailed, reach, run_ranks, start_ranks
from tests.support.job import Job, Outcome, Spec, make_manager, merged, same_bytes
from tests.support.oracle import Expected, Files
from tests.support.orphans import lose_helpers, wait_for_helpers

LIFE = 8  # steps that a start makes at most before it is killed in any case
EVERYTHING = moc.Policy(
    snapshot_every=2, persist_every=4, keep_latest_k=2, timeout_secs=20, grace_secs=2
)
PARTIAL = moc.Policy(
    snapshot_every=2, persist_every=2, k_snapshot=4, k_persist=2, timeout_secs=20, grace_secs=2
)


class Lost(AssertionError):
    """A start restored less than was left to it."""


class Wrong(AssertionError):
    """A start restored bytes that no start ever had, or of another version than it said."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One fault.

    Attributes:
        victim: the rank that it strikes.
        target: ``restoring`` or ``training``: the rank itself, while it does that; ``helper``;
            ``full``: its helper can write no file beyond a few bytes, for some steps; ``slow``:
            its helper stands still for some steps.
        nth: the event at which it strikes: for a rank a file it opens, renames, links, removes
            or locks, a process it starts, a step, a ticket, or what the manager says; for a
            helper an operation of its store.
        after: whether a helper's operation takes place before it dies.
        node_lost: whether the victim's node goes with it: ranks, helpers and memory.
        settle: whether the next start waits until orphaned helpers have left by themselves.
        signal: what ends a rank.
        flip: after the start, a bit of what it left is flipped, at a place drawn from this seed.
    """

    victim: int
    target: str
    nth: int
    after: bool = False
    node_lost: bool = False
    settle: bool = True
    signal: int = signal.SIGKILL
    flip: int | None = None

    @property
    def script(self) -> FaultScript | None:
        """What the victim's helper does."""
        if self.target != "helper":
            return None
        return FaultScript(nth=self.nth, error="kill", when="after" if self.after else "before")


class Fate:
    """Counts the events of this rank, and ends it at the one that its blow names."""

    def __init__(self, blow: Blow | None, rank: int, folder: Path, watched: list[Path]) -> None:
        mine = blow is not None and blow.victim == rank and blow.target in ("restoring", "training")
        self._blow = blow if mine else None
        self._mark = folder / "killed"
        self._watched = tuple(str(path) for path in watched)
        self._stage = "restoring"
        self._count = 0
        if self._blow:
            sys.addaudithook(self._audit)

    def restored(self) -> None:
        """From here on it is training."""
        self._stage, self._count = "training", 0

    def event(self, what: str) -> None:
        """One more."""
        blow = self._blow
        if blow is None or blow.target != self._stage:
            return
        self._count += 1
        if self._count == blow.nth:
            self.end(what)

    def end(self, what: str) -> None:
        """SIGKILL to itself, if it is the victim."""
        if self._blow:
            deadly, self._blow = self._blow.signal, None  # writing the mark is no event
            self._mark.write_text(f"event {self._count}: {what}")
            os.kill(os.getpid(), deadly)

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        """File operations, as Python itself reports them; `os.replace` is a rename."""
        if name in ("fcntl.lockf", "subprocess.Popen"):
            self.event(name)
        elif name in ("open", "os.rename", "os.link", "os.remove", "os.mkdir"):
            reads = name == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if str(args[0]).startswith(self._watched) and not (reads and self._stage == "training"):
                self.event(f"{name} {args[0]}")


class _Watched(list[moc.Event]):
    """What the manager tells is an event, too."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    def append(self, event: moc.Event) -> None:
        super().append(event)
        self._fate.event(event.kind)


def live(spec: Spec, blow: Blow | None, folder: Path) -> Outcome:
    """One start of the job on this rank; every second step's state goes to files."""
    ranks = make_groups(spec.ep, torch.device("cpu"))
    rank = dist.get_rank()
    fate = Fate(blow, rank, folder, [spec.run_dir, *spec.memory])
    job, outcome = Job(spec, ranks), Outcome(events=_Watched(fate))
    script = blow.script if blow else None
    with make_manager(
        spec.but(faults=script, faulty_rank=blow.victim if blow else 0), job, outcome
    ) as manager:
        report = outcome.report = manager.restore()
        attempt = len(list(spec.run_dir.glob("attempts/*.json")))
        first = report.step + 1 if report else 1
        if report:
            outcome.restored = job.snapshot()
            _keep(spec, attempt, report.step, outcome.restored, rank)
        _write((report, outcome.restored), folder / f"restored-{rank}.pt")
        fate.restored()
        for step in range(first, first + (LIFE if blow else 4)):
            if blow and blow.victim == rank:
                _hinder(manager, blow, step - first)
            outcome.losses[step] = job.step()
            fate.event("optimizer step")
            if step % 2 == 0:
                _keep(spec, attempt, step, job.snapshot(), rank)
            manager.step(step)
            fate.event("manager.step")
            outcome.states = {step: {}}
        if blow:
            fate.end("nothing else has ended it")
            reach("end")
            signal.pause()
    outcome.states = {max(outcome.losses): job.snapshot()}
    return outcome


def _hinder(manager: moc.CheckpointManager, blow: Blow, step: int) -> None:
    """Make the disk full or slow for the helper, from step 1 of a start to step 5."""
    helper = manager._saver._handover._helper
    if helper is None or step not in (1, 5):
        return
    if blow.target == "full":
        _, most = resource.prlimit(helper.pid, resource.RLIMIT_FSIZE)
        least = 100 * blow.nth if step == 1 else most
        resource.prlimit(helper.pid, resource.RLIMIT_FSIZE, (least, most))
    elif blow.target == "slow":
        os.kill(helper.pid, signal.SIGSTOP if step == 1 else signal.SIGCONT)


def _keep(spec: Spec, attempt: int, step: int, state: dict[str, torch.Tensor], rank: int) -> None:
    _write(state, spec.run_dir.parent / "states" / f"{step}-{attempt}-{rank}.pt")


def _write(value: object, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    temporary.rename(path)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


class Chain:
    """Starts of one run, each killed, with what must hold from one to the next."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.home = spec.run_dir.parent
        (self.home / "states").mkdir(parents=True)
        self.starts = 0
        self.expected: Expected | None = None
        self.exact = True
        self.struck_before_a_commit = 0
        self._states: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def kill(self, blow: Blow) -> None:
        """Start, strike, check what was restored, and say what the next start must restore."""
        folder = self._folder()
        with start_ranks(
            live, 4, self.spec, blow, folder, timeout_secs=100, allow_death=True
        ) as ranks:
            if blow.target not in ("restoring", "training"):
                for rank in range(4):
                    ranks.wait_reached(rank, "end")
            else:
                with pytest.raises(RankFailed, match="ended without reaching"):
                    ranks.wait_reached(blow.victim, "the end of its life")
                if not (folder / "killed").exists():
                    ranks.join()
        mark = folder / "killed"
        print(f"start {self.starts}: {blow} {mark.read_text() if mark.exists() else ''}")
        self.check(folder)
        nodes = self.spec.memory
        if blow.node_lost:
            node = nodes[blow.victim * len(nodes) // 4]
            lose_helpers(node)
            shutil.rmtree(node, ignore_errors=True)
        if blow.settle:
            wait_for_helpers(nodes)
        if blow.flip is not None:
            print(f"  flipped: {self.flip(random.Random(blow.flip))}")
        files = Files(self.spec.run_dir, nodes)
        self.expected, self.exact = files.best(), blow.settle
        attempt = len(files.attempts)
        if not any(made == attempt for _, made in files.manifests):
            self.struck_before_a_commit += 1
        print(f"  left: {self.expected and self.expected.version}, attempts {attempt}")

    def flip(self, dice: random.Random) -> str:
        """Flip one bit of a file of the store or, where digests were made, of a buffer.

        Not where nothing would be left then, nor in what says which run this is.
        """
        found = [*self.spec.run_dir.glob("step-*/*")]
        found += [
            path.with_suffix(".safetensors")
            for node in self.spec.memory
            for path in node.glob("moc-*/*.digests")
        ]
        if not found:
            return "there is nothing"
        path = dice.choice(sorted(found))
        data = path.read_bytes()
        at = dice.randrange(len(data))
        _flip(path, at, 1 << dice.randrange(8))
        if Files(self.spec.run_dir, self.spec.memory).best() is None:
            path.write_bytes(data)
            return "nothing would be left"
        return f"{path.parent.name}/{path.name} at {at}"

    def check(self, folder: Path) -> moc.RestoreReport | None:
        """Compare what a start restored with what was left to it."""
        paths = [folder / f"restored-{rank}.pt" for rank in range(4)]
        if not all(path.exists() for path in paths):
            return None  # killed before it had restored
        told = [_load(path) for path in paths]
        report, expected = told[0][0], self.expected
        if report is None:
            if expected is not None:
                raise Lost(f"nothing was restored, {expected.version} was there")
            return None
        version = (report.step, report.restored_attempt)
        if expected is None and self.exact:
            raise Wrong(f"{version} was restored, and nothing was there")
        if expected is not None and version < expected.version:
            raise Lost(f"{version} was restored, {expected.version} was there: {report}")
        if expected is not None and version != expected.version and self.exact:
            raise Wrong(f"{version} was restored, {expected.version} was there: {report}")
        self.compare(merged(state for _, state in told), version)
        return report

    def compare(self, restored: dict[str, torch.Tensor], version: tuple[int, int]) -> None:
        """Every dense byte is the step's, and every expert's its version's."""
        now = self.state(*version)
        if restored.keys() != now.keys():
            raise Wrong(f"{version}: other names, {sorted(restored.keys() ^ now.keys())[:5]}")
        experts = self.expected.experts if self.expected and self.exact else {}
        for name, value in restored.items():
            made = experts.get(_expert_of(name), version)
            if not same_bytes(value, self.state(*made)[name]):
                raise Wrong(f"{name} is not what it was at {made}, restored at {version}")

    def state(self, step: int, attempt: int) -> dict[str, torch.Tensor]:
        """What all ranks of an attempt together had after a step."""
        if (step, attempt) not in self._states:
            self._states[step, attempt] = self._read(step, attempt)
        return self._states[step, attempt]

    def _read(self, step: int, attempt: int) -> dict[str, torch.Tensor]:
        paths = [self.home / "states" / f"{step}-{attempt}-{rank}.pt" for rank in range(4)]
        return merged(map(_load, paths))

    def finish(self) -> list[Outcome]:
        """A last start that is left in peace."""
        folder = self._folder()
        outcomes = run_ranks(live, 4, self.spec, None, folder, timeout_secs=100)
        self.check(folder)
        return outcomes

    def _folder(self) -> Path:
        self.starts += 1
        folder = self.home / f"start-{self.starts}"
        folder.mkdir()
        return folder


def _flip(path: Path, at: int, bit: int) -> None:
    """In place: a buffer may be mapped."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def _expert_of(name: str) -> tuple[int, int]:
    """MoE layer and expert of a row of a tensor or of a module of its own; (-1, -1) for none."""
    fqn, _, box = (*name.split("|"), "", "")[:3]
    if ".experts." not in fqn:
        return -1, -1
    index, row = fqn.split(".experts.")[1].split(".")[0], box.split(":")[0].split(",")[0]
    if not index.isdigit() and not row:
        return -1, -1  # the step that all experts of a tensor share is dense
    return int(fqn.split(".")[1]) // 2, int(index if index.isdigit() else row)


def blows(dice: random.Random, targets: list[str], nodes_lost: int) -> list[Blow]:
    """Faults in random order, on random victims, at random events."""
    reach_of = {"restoring": 60, "training": 75, "again": 4, "helper": 12}
    dice.shuffle(targets)
    lost = set(dice.sample(range(len(targets)), nodes_lost))
    return [
        Blow(
            victim=dice.randrange(4),
            target="training" if target == "again" else target,
            nth=dice.randint(1, reach_of[target]),
            after=dice.random() < 0.5,
            node_lost=i in lost,
            settle=dice.random() < 0.5,
        )
        for i, target in enumerate(targets)
    ]
