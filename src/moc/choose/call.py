"""What a posted exchange is for, told by value.

Gloo joins the reductions of the ranks by their order alone, and ends the process where two that
meet have different sizes. So all that may be posted at one place have the same size and begin
with what they are: ranks that do not do the same then all read so, and which two differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from moc.errors import ConfigError

__all__ = ["WORDS", "Call", "Kind", "open_call", "pack_call"]

WORDS = 24
"""How many there are, whatever they are for: the longest is a ticket."""

_RANK_BITS = 20  # of a word; 2 for the kind, and the rest for the step
_MOST_STEPS = 1 << 40


class Kind(IntEnum):
    """What ranks do together."""

    SAVE = 0
    LOOK = 1
    WAIT = 2


_DOING = {Kind.SAVE: "step {}", Kind.LOOK: "look after step {}", Kind.WAIT: "wait for step {}"}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does: a save of a step, a look after it, or a wait for its commit."""

    kind: Kind
    step: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {_DOING[self.kind].format(self.step)}"


def pack_call(call: Call, words: Sequence[int]) -> list[int]:
    """Words for an all-reduce with MIN: what they are for, the words, and zeros to `WORDS`.

    Raises:
        ConfigError: the step is no number of an optimizer step.
    """
    if not 0 <= call.step < _MOST_STEPS:
        raise ConfigError(f"step {call.step}: the number of an optimizer step, below 2**40")
    head = ((call.step << 2 | call.kind) << _RANK_BITS) | call.rank
    return [head, -head, *words, *(0,) * (WORDS - 2 - len(words))]


def open_call(words: Sequence[int]) -> tuple[tuple[Call, ...], list[int]]:
    """Read the minimum over all ranks of `pack_call`.

    Returns:
        The two ranks that are farthest apart in what they do, lower number first, and nothing
        where all do the same; and the words, which mean something in that case only.
    """
    ends = [_decode(words[0]), _decode(-words[1])]
    if (ends[0].kind, ends[0].step) == (ends[1].kind, ends[1].step):
        return (), list(words[2:])
    return tuple(sorted(ends, key=lambda call: call.rank)), list(words[2:])


def _decode(head: int) -> Call:
    code, rank = head >> _RANK_BITS, head & ((1 << _RANK_BITS) - 1)
    return Call(kind=Kind(code & 3), step=code >> 2, rank=rank)
