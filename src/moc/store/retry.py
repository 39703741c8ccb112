"""How often, how long and with which pauses a failed operation is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from moc import knobs
from moc.errors import KeyExists, KeyMissing, StoreError, StoreRefused

__all__ = ["Retries"]

T = TypeVar("T")

_ANSWERS = (KeyMissing, KeyExists, StoreRefused)


class Retries:
    """Tries with pauses that double, shortened at random: ranks that failed together come apart.

    Args:
        tries: how often to try in all.
        backoff_secs: longest pause before the second try.
        deadline_secs: after so long since the first try, a failure is final.
        on_retry: called with the error before each new try.
    """

    def __init__(
        self,
        tries: int = 5,
        backoff_secs: float = 0.1,
        deadline_secs: float = 60.0,
        on_retry: Callable[[Exception], None] | None = None,
    ) -> None:
        if tries < 1:
            raise ValueError(f"at least one try: {tries}")
        self._tries = tries
        self._backoff_secs = backoff_secs
        self._deadline_secs = deadline_secs
        self._on_retry = on_retry

    def run(self, operation: Callable[[], T]) -> T:
        """Do it until it succeeds, is answered, or tries or time are used up.

        Raises:
            KeyMissing: an answer, not a failure: at once.
            KeyExists: likewise.
            StoreRefused: likewise.
            StoreError: the last failure; other failures of the operation pass through as well.
        """
        end = knobs.monotonic() + self._deadline_secs
        for failed in range(self._tries - 1):
            try:
                return operation()
            except _ANSWERS:
                raise
            except (StoreError, OSError) as error:
                pause = self._backoff_secs * 2**failed * random.uniform(0.5, 1.0)
                if knobs.monotonic() + pause > end:
                    raise
                if self._on_retry is not None:
                    self._on_retry(error)
                knobs.sleep(pause)
        return operation()
