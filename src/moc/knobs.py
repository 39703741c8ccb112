"""The edge to environment and wall clock: nothing else reads ``os.environ`` or sleeps.

Every getter reads the variable when it is called and gives a typed value. An argument that the
user passed always beats a knob; who calls a getter sees to that. Nothing is cached, so a test
sets a variable and is done.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from pathlib import Path

from moc.errors import ConfigError

__all__ = [
    "as_utc",
    "child_environment",
    "has_agent_store",
    "local_rank",
    "log_level",
    "master_addr",
    "master_port",
    "memory_dir",
    "monotonic",
    "now_secs",
    "now_utc",
    "rank",
    "restart_count",
    "sleep",
    "world_size",
]

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def rank() -> int:
    """Global rank of this process, from torchrun's ``RANK``; 0 without torchrun."""
    return _int("RANK", default=0, least=0)


def world_size() -> int:
    """Number of ranks in the job, from torchrun's ``WORLD_SIZE``; 1 without torchrun."""
    return _int("WORLD_SIZE", default=1, least=1)


def local_rank() -> int:
    """Rank within this node, from torchrun's ``LOCAL_RANK``; 0 without torchrun."""
    return _int("LOCAL_RANK", default=0, least=0)


def restart_count() -> int:
    """How often torchrun has restarted the ranks, from ``TORCHELASTIC_RESTART_COUNT``.

    It starts at 0 again with each torchrun, so it tells apart the starts of one torchrun only:
    good for a rendezvous prefix, useless as an attempt number.
    """
    return _int("TORCHELASTIC_RESTART_COUNT", default=0, least=0)


def master_addr() -> str | None:
    """Host of the job's rendezvous store, from ``MASTER_ADDR``; None without torchrun."""
    return os.environ.get("MASTER_ADDR") or None


def master_port() -> int | None:
    """Port of the job's rendezvous store, from ``MASTER_PORT``; None without torchrun."""
    return _int("MASTER_PORT", default=0, least=1) or None


def has_agent_store() -> bool:
    """Whether torchrun itself hosts the store, from ``TORCHELASTIC_USE_AGENT_STORE``."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def memory_dir() -> Path | None:
    """Directory of the memory tier, from ``MOC_MEMORY_DIR``; None leaves the default."""
    value = os.environ.get("MOC_MEMORY_DIR")
    return Path(value) if value else None


def log_level() -> str:
    """Level of the ``moc`` logger, from ``MOC_LOG_LEVEL`` in any case; ``INFO`` by default."""
    value = os.environ.get("MOC_LOG_LEVEL") or "INFO"
    if value.upper() not in _LOG_LEVELS:
        raise ConfigError(f"MOC_LOG_LEVEL={value!r}: give one of {', '.join(_LOG_LEVELS)}")
    return value.upper()


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of this process's environment for a child, with ``extra`` on top."""
    return {**os.environ, **extra}


def sleep(secs: float) -> None:
    """Block this thread. For polling what cannot be waited on; the caller keeps a deadline."""
    time.sleep(secs)


def monotonic() -> float:
    """Seconds on a clock that never goes back, for deadlines within this process."""
    return time.monotonic()


def now_secs() -> float:
    """Wall-clock seconds since 1970, for comparing with file times."""
    return time.time()


def now_utc() -> str:
    """The time as ISO 8601 in UTC, to the second: ``2026-01-31T12:00:00+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def as_utc(secs: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(secs, timezone.utc).isoformat(timespec="seconds")


def _int(name: str, *, default: int, least: int) -> int:
    value = os.environ.get(name)
    if not value:
        return default
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(
            f"{name}={value!r}: an integer of at least {least}; set it so, or unset it"
        )
    return number
