"""The short form of the soak program: twenty random faults, nothing lost, wrong or left."""

from __future__ import annotations

import random

import pytest
from tests.soak import soak

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_twenty_faults() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    outcome = soak(20, seed)
    assert outcome.is_good, outcome
    assert outcome.faults == 20
