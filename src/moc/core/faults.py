"""Faults as data: which operation fails, and how. Nothing here makes one."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["FaultScript"]


class FaultScript(msgspec.Struct, frozen=True, kw_only=True):
    """Lets the n-th operation fail, and as many after it as it says.

    Attributes:
        nth: counted from 1 among the operations of that verb.
        verb: ``get``, ``put_new``, ...; empty for any.
        when: ``before`` the operation has any effect, or ``after`` it took place in full, as
            when only the answer is lost.
        error: ``store`` for a `moc.errors.StoreError`, ``os`` for an OSError, ``kill`` for the end
            of the process by SIGKILL.
        times: how many operations in a row fail; 0 for all to come, as after a death.
    """

    nth: int
    verb: str = ""
    when: Literal["before", "after"] = "before"
    error: Literal["store", "os", "kill"] = "store"
    times: int = 1

    def __post_init__(self) -> None:
        if self.nth < 1 or self.times < 0:
            raise ValueError(f"nth counts from 1 and times from 0: {self.nth}, {self.times}")

    def concerns(self, verb: str) -> bool:
        """Whether operations of this verb count."""
        return self.verb in ("", verb)

    def strikes(self, number: int) -> bool:
        """Whether the operation of this number, among those that count, fails."""
        return self.nth <= number and (not self.times or number < self.nth + self.times)
