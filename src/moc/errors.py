"""Every error that MoC raises on purpose, in one tree.

MocError
├── ConfigError            a bad argument; nothing was touched (also a ValueError)
│   ├── ExpertRuleError    the expert rule matches nothing, or what is no routed expert
│   └── LayoutError        ranks, groups or replicas that do not fit together
├── StateError             live state that cannot be captured or filled
│   ├── UnsupportedValue   an extra of a type that has no exact form on disk
│   └── MismatchError      names, shapes or dtypes of checkpoint and model differ
├── SaveError              a save that failed; the step does not exist
│   └── RanksDisagree      ranks asked for different things in the same save
├── RestoreError           a restore that cannot be done
│   ├── NothingValid       something is there, but nothing whole
│   └── StepNotFound       the step that was asked for does not exist
├── DamagedError           bytes that are not what was written
│   └── NewerFormat        a newer version of MoC wrote them
├── StoreError             the store refused or failed an operation
│   ├── StoreRefused       no permission; trying again does not help
│   ├── KeyMissing         no such key
│   └── KeyExists          a write-once key is taken
├── RunBusy                another job, or another model, owns the run directory
├── HelperError            the helper process died or did not answer
└── DeadlineError          a wait ran out; says whom it waited for

Preempted stands outside: it is no error but the way out, a SystemExit with an exit code.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DamagedError",
    "DeadlineError",
    "ExpertRuleError",
    "HelperError",
    "KeyExists",
    "KeyMissing",
    "LayoutError",
    "MismatchError",
    "MocError",
    "NewerFormat",
    "NothingValid",
    "Preempted",
    "RanksDisagree",
    "RestoreError",
    "RunBusy",
    "SaveError",
    "StateError",
    "StepNotFound",
    "StoreError",
    "StoreRefused",
    "UnsupportedValue",
]


class MocError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MocError, ValueError):
    """A bad argument. Nothing was touched."""


class ExpertRuleError(ConfigError):
    """The expert rule matches nothing, or matches what is no routed expert."""


class LayoutError(ConfigError):
    """Ranks, groups or replicas do not fit together."""


class StateError(MocError):
    """Live state cannot be captured or filled."""


class UnsupportedValue(StateError, TypeError):
    """An extra holds a value that has no exact form on disk."""


class MismatchError(StateError):
    """Names, shapes or dtypes of the checkpoint and the model differ.

    Attributes:
        missing: names the model wants and the checkpoint lacks.
        unexpected: names the checkpoint has and the model lacks.
        differing: one line for every shape or dtype that differs.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        differing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.differing = differing


class SaveError(MocError):
    """A save failed. Its step does not exist; older steps are untouched.

    Attributes:
        step: the step that was being saved.
        rank: the rank on which it failed, -1 where several did.
        path: the file or key, empty where none is to blame.
    """

    def __init__(self, message: str, *, step: int = -1, rank: int = -1, path: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.path = path


class RanksDisagree(SaveError):
    """Ranks asked for different things in the same save."""


class RestoreError(MocError):
    """A restore cannot be done."""


class NothingValid(RestoreError):
    """The run has checkpoints or buffers, but none of them is whole."""


class StepNotFound(RestoreError):
    """The step that was asked for does not exist, or is not whole."""


class DamagedError(MocError):
    """Bytes differ from what was written; names the file and the piece."""


class NewerFormat(DamagedError):
    """A newer version of MoC wrote this; to this one it is unreadable, and it is left alone."""


class StoreError(MocError):
    """A store refused or failed an operation.

    Attributes:
        key: the key that was operated on.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class StoreRefused(StoreError):
    """The store does not permit the operation: it fails at once, and is not tried again."""


class KeyMissing(StoreError):
    """No such key in the store."""


class KeyExists(StoreError):
    """A write-once key is taken already."""


class RunBusy(MocError):
    """Another job, or another model, owns the run directory."""


class HelperError(MocError):
    """The helper process died or did not answer."""


class DeadlineError(MocError, TimeoutError):
    """A wait ran out. The message says what was awaited, and from whom."""


class Preempted(SystemExit):
    """The job was told to stop: the end of the process, on every rank after the same step.

    ``except Exception`` does not catch it. Left alone, it ends Python with ``code``.

    Attributes:
        code: the exit code.
        step: the step after which all ranks stopped.
        saved: whether that step is kept, as far as the policy keeps anything.
        signum: the signal.
    """

    def __init__(self, code: int, *, step: int = -1, saved: bool = False, signum: int = 0) -> None:
        super().__init__(code)
        self.step = step
        self.saved = saved
        self.signum = signum
