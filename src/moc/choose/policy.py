"""What the user decides about saving."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from moc.errors import ConfigError

__all__ = ["Policy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When to save, how much, and what to keep.

    Attributes:
        snapshot_every: steps between snapshots to host memory, or a `datetime.timedelta`, counted
            from the last save.
        persist_every: steps between persists; a snapshot is persisted when it is the first at or
            after a multiple of this. Or a `datetime.timedelta`: the snapshot nearest to it is
            persisted. None: memory only.
        k_snapshot: experts per MoE layer in a snapshot; None for all. Clipped per layer.
        k_persist: experts per MoE layer that a persist writes; None for all.
        skip: ``strict`` spares an unselected expert everything (weights, masters, moments: the
            paper's formula 6); ``full`` spares nothing: every save holds every expert.
        total_steps: planned length of the run; the denominator of PLT needs it.
        keep_latest_k: committed steps to keep in storage, at least 1; None keeps all.
        keep_every: steps that are multiples of this are kept for ever; None for none.
        buffers: buffers in memory per rank; None chooses ceil(N / k_snapshot) + 3, or as many as
            ``memory_bytes`` allows. 3 is the paper's triple buffer.
        overlap: copy parameters and optimizer state while the next forward and backward run.
            False copies everything before ``manager.step`` returns.
        on_error: ``warn`` counts and reports a failed save at the next call; ``raise`` raises, on
            all ranks at once.
        timeout_secs: deadline of every wait for another rank or the helper process.
        grace_secs: how long a helper whose trainer died may work on before it gives up.
        preempt_grace_secs: with ``preempt_signals``: the process is gone so long after the signal,
            saved or not. A little less than the scheduler gives.
        preempt_exit_code: exit code that says "preempted, and saved". Not saved in time is 128 and
            the signal's number, as if nobody had heard it.

    Raises:
        ConfigError: a value makes no sense; the message names it and the remedy.
    """

    snapshot_every: int | timedelta = 10
    persist_every: int | timedelta | None = 50
    k_snapshot: int | None = None
    k_persist: int | None = None
    skip: Literal["strict", "full"] = "strict"
    total_steps: int | None = None
    keep_latest_k: int | None = 3
    keep_every: int | None = None
    buffers: int | None = None
    overlap: bool = True
    on_error: Literal["warn", "raise"] = "warn"
    timeout_secs: float = 120.0
    grace_secs: float = 30.0
    preempt_grace_secs: float = 25.0
    preempt_exit_code: int = 75

    def __post_init__(self) -> None:
        for name, none in _COUNTS.items():
            _check_count(name, getattr(self, name), none)
        for name in _SECS:
            _check_secs(name, getattr(self, name))
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"Policy(overlap={self.overlap!r}): give True or False")
        if self.skip not in ("strict", "full"):
            raise ConfigError(f"Policy(skip={self.skip!r}): give 'strict' or 'full'")
        if self.on_error not in ("warn", "raise"):
            raise ConfigError(f"Policy(on_error={self.on_error!r}): give 'warn' or 'raise'")
        code = self.preempt_exit_code
        if type(code) is not int or code not in range(256):
            raise ConfigError(f"Policy(preempt_exit_code={code!r}): give an integer from 0 to 255")
        if self.buffers is not None and self.buffers < 3:
            raise ConfigError(
                f"Policy(buffers={self.buffers}): give at least 3 (one is being written, one "
                "persisted, one kept for recovery), or None"
            )
        if self.k_snapshot is not None and self.k_persist is None:
            raise ConfigError(
                f"Policy(k_snapshot={self.k_snapshot}) without k_persist, which is all experts; a "
                f"persist writes what a snapshot holds; give k_persist, 1 to {self.k_snapshot}"
            )
        if self.k_snapshot and self.k_persist and self.k_persist > self.k_snapshot:
            raise ConfigError(
                f"Policy(k_snapshot={self.k_snapshot}, k_persist={self.k_persist}): a persist "
                f"writes what a snapshot holds; give k_persist, 1 to {self.k_snapshot}"
            )

    def experts_per_save(self, experts: int) -> tuple[int, int]:
        """K_snapshot and K_persist for a layer of so many experts."""
        if self.skip == "full":
            return experts, experts
        snapshot = min(self.k_snapshot or experts, experts)
        return snapshot, min(self.k_persist or experts, snapshot)


_COUNTS = {
    "snapshot_every": "",
    "persist_every": "None keeps checkpoints in memory only",
    "k_snapshot": "None takes all experts",
    "k_persist": "None takes all experts",
    "total_steps": "None where it is not known",
    "keep_latest_k": "None keeps all",
    "keep_every": "None keeps none for ever",
    "buffers": "None chooses",
}
"""Fields that are whole numbers, and what None means; empty where it means nothing."""

_TIMES = ("snapshot_every", "persist_every")
_SECS = ("timeout_secs", "grace_secs", "preempt_grace_secs")
_MOST_SECS = 1e8  # three years; clocks of gloo and Python take no more than they can count


def _check_count(name: str, value: object, none: str) -> None:
    if value is None and none:
        return
    if name in _TIMES and isinstance(value, timedelta) and value > timedelta():
        return
    if type(value) is not int or value <= 0:
        steps = "number of steps, or a time such as datetime.timedelta(minutes=10)"
        wanted = steps if name in _TIMES else "integer"
        hint = f"; {none}" if none else ""
        raise ConfigError(f"Policy({name}={value!r}): give a positive {wanted}{hint}")


def _check_secs(name: str, value: object) -> None:
    is_usable = isinstance(value, int | float) and 0 < value <= _MOST_SECS  # nan never compares
    if not is_usable or value is True:
        raise ConfigError(
            f"Policy({name}={value!r}): give a positive number of seconds, at most {_MOST_SECS:g}"
        )
