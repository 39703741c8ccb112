from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from moc import knobs
from moc.errors import ConfigError

VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MOC_MEMORY_DIR",
    "MOC_LOG_LEVEL",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_process_is_a_job_of_one() -> None:
    assert (knobs.rank(), knobs.world_size(), knobs.local_rank()) == (0, 1, 0)
    assert knobs.restart_count() == 0
    assert knobs.master_addr() is None
    assert knobs.master_port() is None
    assert knobs.memory_dir() is None
    assert knobs.log_level() == "INFO"


def test_reads_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["3", "8", "1", "2", "node0", "29500", "/dev/shm/x", "debug"]
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    assert (knobs.rank(), knobs.world_size(), knobs.local_rank()) == (3, 8, 1)
    assert knobs.restart_count() == 2
    assert (knobs.master_addr(), knobs.master_port()) == ("node0", 29500)
    assert knobs.memory_dir() == Path("/dev/shm/x")
    assert knobs.log_level() == "DEBUG"


@pytest.mark.parametrize("value", ["x", "-1", "1.0"])
def test_nonsense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(ConfigError, match=f"RANK='{value}'"):
        knobs.rank()


def test_an_unknown_log_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOC_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="MOC_LOG_LEVEL='loud'"):
        knobs.log_level()


def test_a_child_gets_this_environment_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    child = knobs.child_environment(RANK="4", EXTRA="x")
    assert (child["RANK"], child["EXTRA"], knobs.rank()) == ("4", "x", 3)


def test_time_is_utc() -> None:
    assert datetime.fromisoformat(knobs.now_utc()).utcoffset() == timedelta(0)
    assert abs(datetime.fromisoformat(knobs.now_utc()).timestamp() - knobs.now_secs()) < 5
