"""Buffers in memory: valid files at every moment, locked while used, found again after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from moc.core.manifest import CommitHead, DigestFile, Seal, digests_path, encode_json, seal_path
from moc.core.versions import AttemptRecord, Timeline, Version
from moc.errors import ConfigError, SaveError
from moc.snapshot.buffers import (
    Buffer,
    BufferPool,
    lock_holders,
    node_key,
    read_seals,
    remove_dead,
    remove_forgotten,
)
from moc.testing.ranks import run_ranks, start_ranks

HEAD = CommitHead(
    model="m", base=None, layers=[], saved=[], routed=[], lost=[], k_snapshot=0, k_persist=0
)


def seal(version: Version, file: str) -> Seal:
    return Seal(
        run_id="r",
        version=version,
        rank=0,
        world_size=1,
        plan=1,
        file=file,
        pieces=[],
        expert_pieces=[(0, 3, 2)],
        head=HEAD,
    )


@pytest.fixture
def buffer(memory_dir: Path) -> Buffer:
    return Buffer(memory_dir / "00000-0.safetensors")


def test_opening_writes_nothing(memory_dir: Path) -> None:
    pool = BufferPool(memory_dir / "moc-0", 0)
    pool.open(3)
    assert [b.name for b in pool.buffers] == [f"00000-{i}.safetensors" for i in range(3)]
    assert list((memory_dir / "moc-0").iterdir()) == []
    assert stat.S_IMODE((memory_dir / "moc-0").stat().st_mode) == 0o700


def test_a_seal_makes_it_valid_and_taking_it_makes_it_invalid(buffer: Buffer) -> None:
    view = buffer.acquire(8192)
    view[:4] = b"data"
    buffer.put_seal(seal(Version(7, 1), buffer.name))
    buffer.release()
    assert buffer.version == Version(7, 1)
    assert buffer.experts == {(0, 3)}
    Path(digests_path(str(buffer.path))).write_bytes(b"x")
    buffer.acquire(8192)
    assert buffer.version is None
    assert [p.name for p in buffer.path.parent.iterdir()] == [buffer.name]
    buffer.close()


def test_it_grows_and_keeps_its_size(buffer: Buffer) -> None:
    assert len(buffer.acquire(4096)) == 4096
    assert len(buffer.acquire(10_000)) == 10_000
    assert len(buffer.acquire(1)) == 10_000
    buffer.close()


def test_more_than_there_is_is_refused_before_a_byte_is_touched(buffer: Buffer) -> None:
    free = os.statvfs(buffer.path.parent)
    with pytest.raises(SaveError, match="no room for a buffer") as caught:
        buffer.acquire(free.f_bavail * free.f_frsize * 2)
    assert caught.value.path == str(buffer.path)
    buffer.close()


def test_a_wiped_directory_costs_what_was_in_it_and_no_more(buffer: Buffer) -> None:
    folder = buffer.path.parent / "moc-run"
    lost = Buffer(folder / "00000-0.safetensors")
    lost.acquire(4096)
    lost.put_seal(seal(Version(5, 1), lost.name))
    lost.release()
    shutil.rmtree(folder)
    view = lost.acquire(4096)
    view[:3] = b"new"
    lost.put_seal(seal(Version(6, 1), lost.name))
    lost.release()
    assert [s.version for s in read_seals(folder)] == [Version(6, 1)]
    assert lost.path.read_bytes()[:3] == b"new"
    lost.close()


def test_another_process_with_a_lock_keeps_it(buffer: Buffer) -> None:
    buffer.acquire(4096)
    buffer.release()

    def read(_rank: int) -> None:
        descriptor = os.open(buffer.path, os.O_RDONLY)
        fcntl.lockf(descriptor, fcntl.LOCK_SH)
        from moc.testing.ranks import reach

        reach("locked")
        while True:
            os.read(0, 1)

    with start_ranks(read, 1, init=False, allow_death=True) as ranks:
        ranks.wait_reached(0, "locked")
        with pytest.raises(BlockingIOError):
            buffer.acquire(4096)
        buffer.close()
        assert lock_holders(buffer.path.parent) == ranks.pids
        ranks.kill(0)
        ranks.join()
    assert lock_holders(buffer.path.parent) == []
    buffer.acquire(4096)
    buffer.close()


def test_seals_are_listed_with_the_digests_that_belong_to_them(buffer: Buffer) -> None:
    buffer.acquire(4096)
    buffer.put_seal(seal(Version(5, 1), buffer.name))
    stale = DigestFile(version=Version(4, 1), digests=["a", "b"])
    Path(digests_path(str(buffer.path))).write_bytes(encode_json(stale))
    assert [s.version for s in read_seals(buffer.path.parent)] == [Version(5, 1)]
    Path(seal_path(str(buffer.path))).write_bytes(b"half a se")
    assert read_seals(buffer.path.parent) == []
    buffer.close()


def test_dead_versions_are_unsealed_and_live_ones_stay(memory_dir: Path) -> None:
    for index, version in enumerate((Version(10, 1), Version(12, 1), Version(12, 2))):
        held = Buffer(memory_dir / f"00000-{index}.safetensors")
        held.acquire(4096)
        held.put_seal(seal(version, held.name))
        held.close()
    record = AttemptRecord(
        attempt=1, parent=0, resumed_step=0, world_size=1, k_snapshot=0, k_persist=0
    )
    second = msgspec.structs.replace(record, attempt=2, parent=1, resumed_step=10)
    assert remove_dead(memory_dir, Timeline.of([record, second])) == 1
    assert [s.version for s in read_seals(memory_dir)] == [Version(10, 1), Version(12, 2)]


def test_only_old_unlocked_folders_of_other_runs_are_removed(memory_dir: Path) -> None:
    names = ["moc-" + digit * 16 for digit in "0123"] + ["moc-notes", "other"]
    for name in names:
        (memory_dir / name).mkdir()
        (memory_dir / name / "00000-0.safetensors").write_bytes(b"x")
    young = "moc-" + "1" * 16
    old = (memory_dir / young).stat().st_mtime - 1000
    for name in names:
        if name != young:
            for path in (memory_dir / name / "00000-0.safetensors", memory_dir / name):
                os.utime(path, (old, old))
    removed = remove_forgotten(memory_dir, "0" * 16, old + 1)
    assert [p.name for p in removed] == ["moc-" + digit * 16 for digit in "23"]
    assert {p.name for p in memory_dir.iterdir()} == set(names) - {p.name for p in removed}


def test_a_node_is_where_the_same_directory_is_seen(memory_dir: Path) -> None:
    one, other = node_key(memory_dir / "a"), node_key(memory_dir / "b")
    assert one == node_key(memory_dir / "a")
    assert one != other


def test_a_directory_that_cannot_be_written_is_refused(memory_dir: Path) -> None:
    memory_dir.chmod(0o755)

    def as_nobody(_rank: int) -> str:
        os.setuid(65534)
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            node_key(memory_dir / "mine")
        return str(caught.value)

    (told,) = run_ranks(as_nobody, 1, init=False)
    assert "MOC_MEMORY_DIR" in told
