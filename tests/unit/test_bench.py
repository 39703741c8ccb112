"""`moc bench` runs, says what it measured, and leaves nothing. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moc.bench.state import Shape
from moc.cli.main import main
from moc.errors import ConfigError

LIMITS = {"memcpy", "write", "write_streamed"}
OURS = {"snapshot", "stall", "persist"}
PEERS = {"torch_save", "dcp_save", "dcp_async", "dcp_async_blocked"}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], LIMITS | OURS | PEERS),
        (
            ["--no-peers", "--experts", "4", "--k-snapshot", "2", "--k-persist", "1"],
            LIMITS | OURS,
        ),
    ],
)
def test_results(
    tmp_path: Path,
    memory_dir: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    names: set[str],
) -> None:
    places = ["--directory", str(tmp_path), "--memory-dir", str(memory_dir)]
    size = ["--mb", "0.3", "--tensors", "9", "--rounds", "2"]
    assert main(["bench", "--json", *places, *size, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"ratios", "measures", "rounds", "state", "machine", "notes"}
    ratios = {"snapshot_to_memcpy", "persist_to_write", "persist_to_write_streamed"}
    assert set(told["ratios"]) == ratios
    assert set(told["measures"]) == names
    for found in (*told["ratios"].values(), told["machine"]["load"]):
        assert set(found) == {"median", "min", "max"}
    for found in told["measures"].values():
        assert set(found) == {"bytes", "secs", "memcpys", "writes"}
    assert told["rounds"] == 2
    assert told["state"]["tensors"] == 9
    snapshot, persist = (told["measures"][name]["bytes"] for name in ("snapshot", "persist"))
    if words:  # fewer experts are copied, and fewer still are written
        assert persist < snapshot < told["state"]["bytes"]
    else:
        assert min(snapshot, persist) >= told["state"]["bytes"]
    assert list(tmp_path.iterdir()) == []
    assert list(memory_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mb", "1e9"], "use a smaller --mb"),
        (["--mb", "0.0001"], "use fewer tensors"),
        (["--rounds", "0"], "--rounds 0"),
        (["--k-snapshot", "1"], "give --experts"),
        (["--mb", "1", "--directory", "nowhere"], "nowhere is no directory"),
    ],
)
def test_bad_input(
    memory_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["bench", "--memory-dir", str(memory_dir), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(memory_dir.iterdir()) == []


def test_shape_has_the_size_and_number_that_were_asked_for() -> None:
    shape = Shape(nbytes=512_000_000, tensors=234)
    numbers = [rows for rows in shape.parameters().values()]
    assert len(numbers) * 3 == 234
    nbytes = 12 * sum(sizes[0] * (sizes[1] if len(sizes) > 1 else 1) for sizes in numbers)
    assert 0.99 * 512_000_000 < nbytes <= 512_000_000
    with pytest.raises(ConfigError, match="at least 3"):
        Shape(nbytes=1000, tensors=2)
