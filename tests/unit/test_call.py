"""Ranks that do not do the same are told by value, whatever each of them posted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.choose.call import WORDS, Call, Kind, open_call, pack_call
from moc.choose.look import LookWords
from moc.choose.ticket import HELD, Words
from moc.errors import ConfigError

TICKET = Words(step=3, attempt=1, plan=1 << 61, unchanged=1, held=(1,) * HELD, failed=-1)
doing = st.tuples(st.sampled_from(Kind), st.integers(0, (1 << 40) - 1))


def met(done: list[tuple[Kind, int]]) -> tuple[tuple[Call, ...], list[int]]:
    """What ranks that do this read, as `Group.post_min` joins it."""
    said = [
        pack_call(Call(kind=kind, step=step, rank=rank), [rank])
        for rank, (kind, step) in enumerate(done)
    ]
    return open_call([min(column) for column in zip(*said, strict=True)])


@given(st.lists(doing, min_size=1, max_size=5))
def test_two_ranks_that_do_other_things_are_named_iff_there_are_such(
    done: list[tuple[Kind, int]],
) -> None:
    differ, _ = met(done)
    assert (len(differ) == 2) == (len(set(done)) > 1)
    assert [done[call.rank] for call in differ] == [(call.kind, call.step) for call in differ]
    assert len({(call.kind, call.step) for call in differ}) == len(differ)


@given(doing, st.integers(1, 1 << 20))
def test_ranks_that_do_the_same_read_the_least_of_their_words(
    one: tuple[Kind, int], rank: int
) -> None:
    assert met([one] * 3) == ((), [0] * (WORDS - 2))
    last = pack_call(Call(kind=one[0], step=one[1], rank=rank - 1), [7])
    assert open_call(last) == ((), [7, *[0] * (WORDS - 3)])


def test_all_that_is_posted_has_one_size() -> None:
    words = [TICKET.pack(), LookWords(step=3, step_usecs=1).pack(), []]
    sizes = {
        len(pack_call(Call(kind=k, step=3, rank=0), w)) for k, w in zip(Kind, words, strict=True)
    }
    assert sizes == {WORDS}
    everything = Call(kind=Kind.WAIT, step=(1 << 40) - 1, rank=(1 << 20) - 1)
    assert all(-(1 << 63) <= word < 1 << 63 for word in pack_call(everything, TICKET.pack()))


@pytest.mark.parametrize("step", [-1, 1 << 40])
def test_what_is_no_step_is_refused(step: int) -> None:
    with pytest.raises(ConfigError, match=f"step {step}"):
        pack_call(Call(kind=Kind.SAVE, step=step, rank=0), [])
