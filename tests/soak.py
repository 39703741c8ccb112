"""Hundreds of random faults: ``python -m tests.soak --faults 200 --seed 1 [--json]``.

A small MoE is trained on four forked ranks and struck again and again: ranks and helpers killed at
any event, nodes lost with their memory, disks full and slow, bits flipped in files and buffers,
SIGTERM. After every fault the restored state is compared, byte for byte, with what the files that
were left make possible (`tests.support.oracle`) and with what the ranks had at that step. The seed
is printed; the same seed draws the same faults, though not the same interleavings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.chain import EVERYTHING, PARTIAL, Blow, Chain, Lost
from tests.support.job import Spec
from tests.support.orphans import helpers_of, lose_helpers, wait_for_helpers

__all__ = ["Outcome", "main", "soak"]

CAMPAIGN = 20
"""Faults in one run; then another one begins, with another policy and layout."""

KINDS = {
    "training": 5,
    "again": 2,
    "restoring": 2,
    "helper": 4,
    "full": 2,
    "slow": 2,
    "terminated": 2,
    "node": 2,
    "flip": 4,
}
"""Kinds of faults and how often each is drawn."""

_REACH = {"restoring": 30, "training": 75, "again": 4, "helper": 12, "full": 200, "slow": 1}
_EXPECTED = re.compile(r"\d{5}-\d+\.(safetensors|seal|digests)|helper-\d{5}\.log")


@dataclasses.dataclass
class Outcome:
    """What came of it.

    Attributes:
        faults: how many were dealt.
        by_kind: the same by kind.
        losses: starts that restored less than was left.
        wrong_restores: starts that restored anything else, or failed.
        leaked_files: temporary files, foreign files in memory and processes left at the end.
        seconds: wall time.
    """

    faults: int = 0
    by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    losses: int = 0
    wrong_restores: int = 0
    leaked_files: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Nothing was lost, wrong or left."""
        return not (self.losses or self.wrong_restores or self.leaked_files)


def soak(faults: int, seed: int) -> Outcome:
    """Deal so many faults; prints each, and what went wrong."""
    dice, outcome, dealt = random.Random(seed), Outcome(), Counter[str]()
    began = time.monotonic()
    torch.set_num_threads(1)  # ranks are forked from this process
    while sum(dealt.values()) < faults:
        count = min(CAMPAIGN, faults - sum(dealt.values()))
        kinds = dice.choices(list(KINDS), weights=list(KINDS.values()), k=count)
        dealt += Counter(kinds)
        _campaign(kinds, dice, outcome)
        print(f"-- {sum(dealt.values())} faults, {time.monotonic() - began:.0f} s", flush=True)
    outcome.faults, outcome.by_kind = sum(dealt.values()), dict(sorted(dealt.items()))
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _campaign(kinds: Sequence[str], dice: random.Random, outcome: Outcome) -> None:
    home = Path(tempfile.mkdtemp(prefix="moc-soak-"))
    tier = Path(tempfile.mkdtemp(prefix="moc-soak-", dir="/dev/shm"))
    text = home / "text.bin"
    text.write_bytes(bytes((i * i + i // 7) % 251 for i in range(40_000)))
    nodes = dice.choice([1, 2, 2])
    partial = dice.random() < 0.6
    spec = Spec(
        run_dir=home / "run",
        memory=tuple(tier / f"node{i}" for i in range(nodes)),
        text=text,
        policy=PARTIAL if partial else EVERYTHING,
        stacked=not partial and dice.random() < 0.5,
    )
    print(f"-- {nodes} nodes, {spec.policy}, {'stacked' if spec.stacked else 'modules'}")
    chain = Chain(spec)
    try:
        for kind in kinds:
            chain.kill(_blow(kind, dice, partial=partial))
        chain.finish()
        wait_for_helpers(spec.memory)
        outcome.leaked_files += _leaks(spec)
    except Exception as error:  # noqa: BLE001 - a campaign ends at the first thing that is wrong
        traceback.print_exc(file=sys.stdout)
        if isinstance(error, Lost):
            outcome.losses += 1
        else:
            outcome.wrong_restores += 1
    finally:
        for node in spec.memory:
            lose_helpers(node)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(tier, ignore_errors=True)


def _blow(kind: str, dice: random.Random, *, partial: bool) -> Blow:
    target = kind
    if kind in ("terminated", "node"):
        target = dice.choice(["training", "again", "restoring"])
    elif kind == "flip":
        target = dice.choice(["training", "helper"])
    return Blow(
        victim=dice.randrange(4),
        target="training" if target == "again" else target,
        nth=dice.randint(1, _REACH[target]),
        after=dice.random() < 0.5,
        node_lost=kind == "node",
        # Experts of several ages can be foretold only once nobody writes any more.
        settle=partial or kind == "flip" or dice.random() < 0.5,
        signal=signal.SIGTERM if kind == "terminated" else signal.SIGKILL,
        flip=dice.randrange(1 << 32) if kind == "flip" else None,
    )


def _leaks(spec: Spec) -> int:
    """What a run that has ended well should not leave, and leaves."""
    found = [path for path in spec.run_dir.rglob("*") if path.name.endswith(".tmp")]
    for node in spec.memory:
        found += [p for p in node.glob("*/*") if not _EXPECTED.fullmatch(p.name)]
        found += [Path(f"/proc/{pid}") for pid in helpers_of(node)]
    for path in found:
        print(f"leaked: {path}")
    return len(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 unless something was lost, wrong or left."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON line")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    outcome = soak(options.faults, seed)
    facts = dataclasses.asdict(outcome)
    print(json.dumps(facts) if options.json else facts)
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
