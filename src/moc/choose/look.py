"""The look: what all ranks must agree on while no save is known to be due.

By time, or by a signal that reached one rank only, a save can become due at a step that nobody
knew in advance. So the ranks post a few words, read them some steps later, and decide by the
minimum over all ranks whether to save next, whether to stop now, and when to look again. How far
ahead that is follows from the agreed time of a step: a look costs as much as a short step may.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moc.choose.cadence import NEVER

__all__ = ["Look", "LookWords", "Verdict", "judge", "look_after"]

_MOST_STEPS = 16  # between looks: steps may suddenly take much longer than those measured


class LookWords(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say.

    Attributes:
        step: the step after which this is posted.
        step_usecs: how long a step took since the last look, in microseconds.
        left_usecs: until a snapshot is due by time; rank 0's clock counts, others pass None.
        grace_usecs: until a rank that got a signal ends itself; None without one.
        signum: that signal, else 0.
    """

    step: int
    step_usecs: int
    left_usecs: int | None = None
    grace_usecs: int | None = None
    signum: int = 0

    def pack(self) -> list[int]:
        """Words for an all-reduce with MIN."""
        return [
            self.step,
            -self.step_usecs,
            NEVER if self.left_usecs is None else self.left_usecs,
            NEVER if self.grace_usecs is None else self.grace_usecs,
            -self.signum,
        ]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks have said, equal on all of them.

    Attributes:
        step: the step after which it was posted.
        step_usecs: time of a step, of the slowest rank.
        left_usecs: until a snapshot is due, when this was posted; None if none is due by time.
        grace_usecs: until the first rank ends itself, when this was posted; None for no signal.
        signum: the signal that some rank got, 0 for none.
    """

    step: int
    step_usecs: int
    left_usecs: int | None
    grace_usecs: int | None
    signum: int

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Look:
        """Read the minimum over all ranks of `LookWords.pack`."""
        return cls(
            step=words[0],
            step_usecs=-words[1],
            left_usecs=None if words[2] == NEVER else words[2],
            grace_usecs=None if words[3] == NEVER else words[3],
            signum=-words[4],
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do.

    Attributes:
        stop: save everything now, and end.
        due: step after which a snapshot is due by time, -1 for none.
        next: step after which the look that is posted now is read.
    """

    stop: bool
    due: int
    next: int


def look_after(step: int, step_usecs: int, horizon_usecs: int) -> int:
    """The step for the next look: as far ahead as the horizon, at least 1 step, at most 16."""
    return step + max(1, min(horizon_usecs // max(step_usecs, 1), _MOST_STEPS))


def judge(step: int, look: Look, *, patience_usecs: int | None, last_save: int) -> Verdict:
    """Decide by a look.

    A snapshot is due after the next step if that step ends nearer to the time than the one after
    it. Else the next look comes before half of what is left is over, so that an interval costs
    few looks, and steps that become twice as long still make none late.

    Args:
        step: the step after which the look is read.
        look: what all ranks said.
        patience_usecs: the most that may lie between two looks; None where only time counts.
        last_save: newest step that is saved, or is due by now; what was posted until then says
            nothing of the snapshot to come.
    """
    if look.signum:
        return Verdict(stop=True, due=-1, next=NEVER)
    due, horizon = -1, patience_usecs
    if look.left_usecs is not None:
        left = 0
        if look.step > last_save:
            left = look.left_usecs - (step - look.step) * look.step_usecs
            if left <= look.step_usecs * 3 // 2:
                due = step + 1
        horizon = left // 2 if horizon is None else min(horizon, left // 2)
    return Verdict(stop=False, due=due, next=look_after(step, look.step_usecs, horizon or 0))
