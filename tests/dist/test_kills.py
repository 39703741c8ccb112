"""SIGKILL to a random rank or helper at a random event, again and again, in one run.

Victim, kind of event and n are random, and printed; see `tests.support.chain`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.support.chain import EVERYTHING, PARTIAL, Blow, Chain, blows
from tests.support.job import Spec, assert_equal, merged, run_job

from moc.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_ten_kills_with_all_experts_fresh(spec: Callable[..., Spec]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    chain = Chain(spec(policy=EVERYTHING, nodes=dice.choice([1, 2])))
    targets = ["training"] * 4 + ["again"] * 2 + ["restoring"] + ["helper"] * 3
    for blow in blows(dice, targets, nodes_lost=2):
        chain.kill(blow)
    assert chain.struck_before_a_commit  # a second fault before the next commit
    last = chain.finish()
    states = [path.stem.split("-")[:2] for path in chain.home.glob("states/*-0.pt")]
    end = max(last[0].losses)
    longest = max(end, *(int(step) for step, _ in states))  # an attempt that was cut off went on
    reference = run_ranks(
        run_job, 4, chain.spec.but(policy=None, steps=longest, record=tuple(range(1, longest + 1)))
    )
    assert_equal(merged(o.states[end] for o in last), merged(o.states[end] for o in reference))
    assert last[0].losses == {s: reference[0].losses[s] for s in last[0].losses}
    for step, attempt in states:
        paths = [chain.home / "states" / f"{step}-{attempt}-{r}.pt" for r in range(4)]
        if all(path.exists() for path in paths):
            undisturbed = merged(o.states[int(step)] for o in reference)
            assert_equal(chain.state(int(step), int(attempt)), undisturbed)


@pytest.mark.slow
def test_kills_with_some_experts_older(spec: Callable[..., Spec]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    chain = Chain(spec(policy=PARTIAL, stacked=False))
    targets = ["training"] * 3 + ["again"] + ["helper"]
    for blow in blows(dice, targets, nodes_lost=2):
        chain.kill(Blow(**{**blow.__dict__, "settle": True}))
    chain.finish()
