"""Stores: the suite over each of them, and what only one of them promises."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

import moc.store.local
from moc.core.faults import FaultScript
from moc.errors import ConfigError, KeyExists, KeyMissing, StoreError
from moc.store import LocalStore, Store, local, open_store
from moc.store.memory import MemoryStore
from moc.store.remote import FsspecStore
from moc.store.s3 import S3Store
from moc.store.wrap import FaultyStore, RecordingStore, RetryingStore
from moc.testing.ranks import Died, run_ranks
from moc.testing.store_suite import StoreSuite


@pytest.fixture
def memory_url() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}/run"
    yield url
    with suppress(FileNotFoundError):
        FsspecStore(url)._fs.rm(url, recursive=True)


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "runs" / "mine")


class TestLocalStoreWithoutLinks(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def no_links(*_: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(moc.store.local.os, "link", no_links)
        return LocalStore(tmp_path)


class TestFsspecStore(StoreSuite):
    @pytest.fixture
    def store(self, memory_url: str) -> Store:
        return FsspecStore(memory_url)


class TestS3Store(StoreSuite):
    @pytest.fixture
    def store(self, bucket: str) -> Store:
        return S3Store(f"{bucket}/runs/mine")


class TestS3StoreInParts(StoreSuite):
    """The same with objects of a few bytes in several parts."""

    @pytest.fixture
    def store(self, bucket: str) -> Store:
        store = S3Store(bucket)
        store.part_bytes = 3
        return store


class TestWrappedStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return RetryingStore(RecordingStore(FaultyStore(MemoryStore())))


# ---------------------------------------------------------------------------------- local files


def _walk(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


def test_making_and_reading_a_store_makes_no_folder(tmp_path):
    store = LocalStore(tmp_path / "run")
    assert store.list() == store.children() == []
    with pytest.raises(StoreError):
        store.get("a")
    store.delete("a/b")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "run")
        store.put_new("step/file", [b"x"])
        store.put("latest", b"x")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").rglob("*")}
    modes["run"] = stat.S_IMODE((tmp_path / "run").stat().st_mode)
    assert modes["file"] == modes["latest"] == 0o666 & ~umask
    assert modes["step"] == modes["run"] == 0o777 & ~umask


def test_no_temporary_file_is_left_or_listed(tmp_path):
    store = LocalStore(tmp_path)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / ".123-abc.tmp").write_bytes(b"half")  # of a writer that was killed
    (tmp_path / ".9-9.tmp").write_bytes(b"half")

    def fails() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_new("step/key", fails())
    store.put_new("step/other", [b"x"])
    with pytest.raises(KeyExists):
        store.put_new("step/other", [b"y"])
    assert store.list() == ["step/other"]
    assert store.children("step") == ["other"]
    assert _walk(tmp_path) == [".9-9.tmp", "step", "step/.123-abc.tmp", "step/other"]


def test_a_key_is_durable_before_a_retry_is_told_that_it_exists(tmp_path, monkeypatch):
    """The first put fails after the name is there: without a sync, power could still take it."""
    store = LocalStore(tmp_path)
    store.put_new("step/zero", [b"x"])
    synced: list[str] = []
    failing = [True]
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir() and failing:
            failing.clear()
            raise OSError(errno.EIO, "no sync this time")
        synced.append(path.name)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="no sync this time"):
        store.put_new("step/one", [b"x"])
    assert store.exists("step/one")
    assert "step" not in synced
    with pytest.raises(KeyExists):
        store.put_new("step/one", [b"x"])
    assert "step" in synced


def test_the_bytes_are_synced_before_the_name_and_every_folder_after_it(tmp_path, monkeypatch):
    events: list[str] = []
    real_fsync, real_link, real_replace = os.fsync, os.link, os.replace

    def name_of(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "temporary" if path.suffix == ".tmp" else str(path.relative_to(tmp_path.parent))

    def fsync(descriptor: int) -> None:
        events.append(f"sync {name_of(descriptor)}".replace(tmp_path.name, "T"))
        real_fsync(descriptor)

    def link(old: Path, new: Path) -> None:
        events.append("name")
        real_link(old, new)

    def replace(old: Path, new: Path) -> None:
        events.append("name")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "replace", replace)
    store = LocalStore(tmp_path / "runs" / "mine")
    store.put_new("step/one", [b"x"])
    bytes_then_name = ["sync temporary", "name"]
    # making runs/ and mine/ is made durable at once, or by the walk up from the new file
    assert events[0] == "sync T"
    assert events[1:] == [
        *bytes_then_name,
        "sync T/runs/mine/step",
        "sync T/runs/mine",
        "sync T/runs",
    ]
    events.clear()
    store.put_new("step/two", [b"x"])
    assert events == [*bytes_then_name, "sync T/runs/mine/step"]
    events.clear()
    store.put("latest", b"x")
    assert events == [*bytes_then_name, "sync T/runs/mine"]
    events.clear()
    store.delete("step/one")
    store.delete("step/two")
    assert events == ["sync T/runs/mine/step", "sync T/runs/mine"]
    events.clear()
    store.put_new("step/one", [b"x"])  # a folder made again is a new name again
    assert events == [*bytes_then_name, "sync T/runs/mine/step", "sync T/runs/mine"]
    events.clear()
    LocalStore(store.root).put_new("step/two", [b"x"])  # whoever made the folder may not be done
    assert events[2:] == ["sync T/runs/mine/step", "sync T/runs/mine", "sync T/runs"]


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    store = LocalStore(tmp_path)
    assert store.put_new("key", [b"0123456789", memoryview(b"ab")]) == 12
    assert store.get("key") == b"0123456789ab"


@pytest.mark.parametrize("answer", [0, -1])
def test_the_disk_begins_before_the_last_byte_and_fsync_decides(tmp_path, monkeypatch, answer):
    block = local._WRITE_OUT_BYTES
    calls: list[tuple[int, int]] = []

    class Libc:
        @staticmethod
        def sync_file_range(_fd: int, start: object, nbytes: object, flags: int) -> int:
            assert flags == 2  # begin, and neither wait nor take errors that fsync reports
            calls.append((start.value, nbytes.value))  # type: ignore[attr-defined]
            return answer

    monkeypatch.setattr(local, "_libc", Libc)
    store = LocalStore(tmp_path)
    data = bytes(range(256)) * (2 * block // 256 + 1)
    assert store.put_new("key", [b"head", data, b"tail"]) == len(data) + 8
    assert store.get("key") == b"head" + data + b"tail"
    assert calls == [(0, block + 4), (block + 4, block)]
    monkeypatch.setattr(local, "_libc", object())  # a C library without the call
    store.put_new("other", [data])
    assert store.get("other") == data


def test_short_reads_are_completed(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put_new("key", [b"0123456789"])
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real_pread(fd, min(n, 3), offset))
    assert store.get("key") == b"0123456789"
    assert store.get("key", 1, 7) == b"1234567"


def test_a_full_disk_is_told_with_key_path_and_bytes(tmp_path, monkeypatch):
    real_write = os.write
    room = [10]

    def write(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real_write(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError) as caught:
        store.put_new("step/key", [b"12345678", b"12345678"])
    text = str(caught.value)
    for part in ("step/key", str(tmp_path), "No space left on device", "needs 16 bytes", "free"):
        assert part in text
    assert caught.value.key == "step/key"
    assert store.list() == []
    assert _walk(tmp_path) == ["step"]


@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_a_failing_call_is_a_store_error_and_leaves_no_temporary(tmp_path, monkeypatch, call):
    store = LocalStore(tmp_path)
    store.put_new("step/there", [b"x"])

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StoreError, match="Input/output error"):
            store.put_new("step/key", [b"x"])
    assert _walk(tmp_path) == ["step", "step/there"]


def test_folders_that_vanish_under_a_writer_are_made_again(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    real_open, vanished = os.open, []

    def open_(path: Path, flags: int, *mode: int, **more: int) -> int:
        if str(path).endswith(".tmp") and len(vanished) < 3:
            vanished.append(path)
            Path(path).parent.rmdir() if Path(path).parent.exists() else None
        return real_open(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", open_)
    store.put_new("deep/er/key", [b"x"])
    assert store.get("deep/er/key") == b"x"
    assert len(vanished) == 3


def test_a_file_in_place_of_a_folder_is_an_error_not_a_missing_key(tmp_path):
    store = LocalStore(tmp_path)
    store.put_new("file", [b"x"])
    with pytest.raises(StoreError, match="Not a directory") as caught:
        store.put_new("file/key", [b"x"])
    assert type(caught.value) is StoreError
    store.put_new("folder/key", [b"x"])
    with pytest.raises(KeyExists):
        store.put_new("folder", [b"x"])


def test_a_name_that_is_too_long_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="File name too long"):
        LocalStore(tmp_path).put_new("x" * 300, [b"x"])


def test_processes_that_race_for_keys_get_each_once(tmp_path):
    store = LocalStore(tmp_path)

    def write(rank: int) -> list[int]:
        won = []
        for number in range(30):
            try:
                store.put_new(f"step-{number}/key", [b"%d" % rank])
                won.append(number)
            except KeyExists:
                pass
            store.put_new(f"own/{rank}/{number}", [b"x"])
            store.delete(f"own/{rank}/{number}")  # its folder comes and goes under the others
        return won

    won = run_ranks(write, 3, init=False)
    assert sorted(chain(*won)) == list(range(30))
    for rank, numbers in enumerate(won):
        assert all(store.get(f"step-{n}/key") == b"%d" % rank for n in numbers)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_tree_without_write_access_can_be_read(tmp_path):
    # rank as nobody: root, as which tests often run, may write anywhere
    folder = tmp_path / "run"
    LocalStore(folder).put_new("step/key", [b"bytes"])
    for path in (folder / "step", folder):
        path.chmod(0o555)
    for path in tmp_path.parents:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)

    def read(_rank: int) -> object:
        if os.getuid() == 0:
            os.setuid(65534)
        store = RetryingStore(LocalStore(folder), backoff_secs=1000)  # tried once
        errors = []
        for write in (
            lambda: store.put_new("step/other", [b"x"]),
            lambda: store.put("latest", b"x"),
            lambda: store.delete("step/key"),
        ):
            try:
                write()
            except StoreError as error:
                errors.append(str(error))
        return store.get("step/key"), store.list(), store.children(), store.size("step/key"), errors

    [(data, keys, children, size, errors)] = run_ranks(read, 1, init=False)
    assert (data, keys, children, size) == (b"bytes", ["step/key"], ["step"], 5)
    assert len(errors) == 3
    assert all("Permission denied" in text for text in errors)


def test_what_may_not_be_looked_at_is_an_error_and_not_missing(tmp_path):
    folder = tmp_path / "run"
    LocalStore(folder).put_new("secret/key", [b"bytes"])
    (folder / "secret").chmod(0)
    tmp_path.chmod(0o755)
    for path in tmp_path.parents:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)

    def look(_rank: int) -> list[str]:
        if os.getuid() == 0:
            os.setuid(65534)
        store = LocalStore(folder)
        kinds = []
        for read in (
            lambda: store.exists("secret/key"),
            lambda: store.get("secret/key"),
            lambda: store.list(),
            lambda: store.children("secret"),
        ):
            try:
                read()
            except StoreError as error:
                kinds.append(type(error).__name__)
        return kinds

    assert run_ranks(look, 1, init=False) == [["StoreRefused"] * 4]
    (folder / "secret").chmod(0o700)


def test_links_to_folders_are_followed(tmp_path):
    LocalStore(tmp_path / "other").put_new("step/key", [b"x"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "moved").symlink_to(tmp_path / "other" / "step")
    store = LocalStore(tmp_path / "run")
    assert store.list() == ["moved/key"]
    assert store.get("moved/key") == b"x"


# -------------------------------------------------------------- file systems that answer oddly


@pytest.mark.parametrize("code", ["EEXIST", "ENOTEMPTY", "ESTALE"])
@pytest.mark.parametrize(
    "call", ["mkdir", "link", "replace", "scandir", "rmdir", "unlink", "open", "fsync", "stat"]
)
@pytest.mark.parametrize("took_place", [False, True])
def test_a34_a_call_that_fails_once_costs_nothing(tmp_path, monkeypatch, call, code, took_place):
    """As on NFS: of names that are not there, of folders that are, of answers that were lost."""
    number = getattr(errno, code)
    calls = 0
    real = getattr(os, call)

    def work(folder: str, failing: int) -> None:
        """A life of a few keys; the call of this number fails, or has its answer lost."""
        nonlocal calls
        calls = 0

        def once(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls != failing:
                return real(*args, **more)
            if took_place:
                answer = real(*args, **more)
                if call == "open":
                    os.close(answer)
                elif call == "scandir":
                    answer.close()
            raise OSError(number, os.strerror(number), str(args[0]))

        store = RetryingStore(LocalStore(tmp_path / folder / "run"), backoff_secs=0.0001)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, once)
            for key in ("step-1/a", "step-1/b", "step-2/deep/c"):
                assert store.put_new(key, [key.encode()]) == len(key)
            store.put("latest", b"1")
            store.put("latest", b"2")
            assert store.children() == ["latest", "step-1", "step-2"]
            assert store.list() == ["latest", "step-1/a", "step-1/b", "step-2/deep/c"]
            for key in ("step-1/a", "step-1/b"):
                store.delete(key)
        assert store.get("step-2/deep/c") == b"step-2/deep/c"
        assert store.get("latest") == b"2"
        assert store.list() == ["latest", "step-2/deep/c"]
        assert not store.exists("step-1/a")
        with pytest.raises(KeyExists):
            store.put_new("step-2/deep/c", [b"another"])

    work("whole", 0)
    assert calls
    for failing in range(1, calls + 1):
        work(f"case-{failing}", failing)


def test_a34_a_name_that_is_taken_by_our_own_lost_answer_is_ours(tmp_path, monkeypatch):
    """NFS sends a link again and hears that the name exists; without a retry around it."""
    store = LocalStore(tmp_path)
    real_link = os.link

    def link(old: Path, new: Path) -> None:
        real_link(old, new)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert store.put_new("key", [b"x"]) == 1
    with pytest.raises(KeyExists):
        store.put_new("key", [b"x"])


# --------------------------------------------------------------------------------- what opens what


def test_paths_and_urls_open_their_store(tmp_path, monkeypatch, memory_url):
    monkeypatch.chdir(tmp_path)
    for url in ("run", Path("run"), str(tmp_path / "run"), f"file://{tmp_path}/run"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "run"
        assert open_store(store.url).url == store.url
    remote = open_store(memory_url)
    assert isinstance(remote, FsspecStore)
    remote.put_new("key", [b"x"])
    assert open_store(remote.url).get("key") == b"x"


@pytest.mark.parametrize(
    "url", ["nosuch://bucket/run", "file://relative/run", "", "s3:///run", "s3://"]
)
def test_what_no_store_knows_is_refused_with_a_remedy(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert url.split("://")[0] in str(caught.value)
    assert "folder" in str(caught.value) or "directory" in str(caught.value)


def test_local_stores_import_neither_torch_nor_fsspec():
    code = (
        "import sys, moc.store; moc.store.open_store('x').list();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'fsspec', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_large_objects_reach_fsspec_through_a_file(memory_url, monkeypatch):
    monkeypatch.setattr("moc.store.remote._SPOOL_BYTES", 10)
    store = FsspecStore(memory_url)
    assert store.put_new("big", [b"0123456789", b"abc"]) == 13
    assert store.get("big") == b"0123456789abc"
    with pytest.raises(KeyExists):
        store.put_new("big", [b"0123456789", b"abc"])


def test_errors_of_a_service_are_store_errors(memory_url, monkeypatch):
    store = FsspecStore(memory_url)

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("some client's own")

    monkeypatch.setattr(store._fs, "info", fails)
    with pytest.raises(StoreError, match="some client's own"):
        store.exists("key")


# ---------------------------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("error", ["store", "os"])
def test_a_scripted_fault_before_has_no_effect_and_after_has(error):
    kind = StoreError if error == "store" else OSError
    inner = MemoryStore()
    for when in ("before", "after"):
        store = FaultyStore(inner, FaultScript(nth=2, verb="put_new", when=when, error=error))
        store.put_new(f"{when}-1", [b"x"])
        store.list()
        with pytest.raises(kind, match="scripted fault"):
            store.put_new(f"{when}-2", [b"x"])
        store.put_new(f"{when}-3", [b"x"])
        assert store.count == 3
    assert inner.list() == ["after-1", "after-2", "after-3", "before-1", "before-3"]


def test_faults_count_every_verb_and_may_last():
    store = FaultyStore(MemoryStore(), FaultScript(nth=3, times=0))
    store.put_new("key", [b"x"])
    store.get("key")
    for operation in (store.list, store.children, lambda: store.delete("key")):
        with pytest.raises(StoreError):
            operation()
    assert store.inner.exists("key")
    with pytest.raises(ValueError, match="counts from 1"):
        FaultScript(nth=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scripted_kill_ends_the_process(tmp_path, when):
    def work(_rank: int) -> None:
        store = FaultyStore(LocalStore(tmp_path), FaultScript(nth=2, error="kill", when=when))
        for key in ("1", "2", "3"):
            store.put_new(key, [b"x"])

    died = run_ranks(work, 1, init=False, allow_death=True)
    assert died == [Died(rank=0, signal=signal.SIGKILL)]
    assert LocalStore(tmp_path).list() == (["1"] if when == "before" else ["1", "2"])


def test_a_record_has_verb_key_and_bytes():
    store = RecordingStore(MemoryStore())
    store.put_new("key", [b"abc", b"d"])
    store.put("latest", b"12")
    store.get("key", 1, 2)
    store.exists("key")
    with pytest.raises(KeyMissing):
        store.get("nothing")
    assert store.calls == [
        ("put_new", "key", 4),
        ("put", "latest", 2),
        ("get", "key", 2),
        ("exists", "key", 0),
    ]


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    naps: list[float] = []
    monkeypatch.setattr("moc.knobs.sleep", naps.append)
    return naps


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", ["store", "os"])
def test_what_fails_is_tried_again(naps, when, error):
    script = FaultScript(nth=1, times=2, when=when, error=error)
    store = RetryingStore(FaultyStore(MemoryStore(), script), tries=3, backoff_secs=1)
    assert store.put_new("key", [b"abc", b"", b"de"]) == 5
    assert store.get("key") == b"abcde"
    assert naps
    for longest, nap in zip([1, 2], naps, strict=False):
        assert longest / 2 <= nap <= longest


def test_the_last_failure_is_raised(naps):
    script = FaultScript(nth=1, times=3)
    told: list[str] = []
    store = RetryingStore(
        FaultyStore(MemoryStore(), script),
        tries=3,
        backoff_secs=0.5,
        on_retry=lambda e: told.append(str(e)),
    )
    with pytest.raises(StoreError, match="operation 3"):
        store.list()
    assert len(naps) == 2
    assert ["operation 1" in told[0], "operation 2" in told[1]] == [True, True]
    assert store.list() == []


def test_ranks_that_fail_together_do_not_try_again_together(naps):
    for _ in range(20):
        faulty = FaultyStore(MemoryStore(), FaultScript(nth=1))
        RetryingStore(faulty, tries=2, backoff_secs=1).list()
    assert len({round(nap, 6) for nap in naps}) > 15
    assert all(0.5 <= nap <= 1 for nap in naps)


def test_no_try_begins_after_the_deadline(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("moc.knobs.monotonic", lambda: clock[0])
    monkeypatch.setattr("moc.knobs.sleep", lambda secs: clock.__setitem__(0, clock[0] + secs))
    faulty = FaultyStore(MemoryStore(), FaultScript(nth=1, times=0))
    store = RetryingStore(faulty, tries=1000, backoff_secs=1, deadline_secs=20)
    with pytest.raises(StoreError, match="scripted"):
        store.get("key")
    assert 3 <= faulty.count <= 6  # pauses of 1, 2, 4, 8, ... s at most, half of it at least
    assert clock[0] <= 120


def test_answers_are_not_tried_again(naps):
    store = RetryingStore(MemoryStore())
    store.put_new("key", [b"x"])
    with pytest.raises(KeyExists):
        store.put_new("key", [b"x"])  # the same bytes, but not from a try of ours
    with pytest.raises(KeyMissing):
        store.get("nothing")
    assert not naps


@pytest.mark.usefixtures("naps")
@pytest.mark.parametrize("theirs", [b"theirs", b"ours", b"ours, and more", b"ou", b""])
def test_a_key_that_is_there_at_the_next_try_is_ours_iff_it_has_our_bytes(theirs):
    class Rude(FaultyStore):
        """Another writer takes the key while the answer to the first try is lost."""

        def put_new(self, key, chunks):
            if not self.inner.exists(key):
                self.inner.put(key, theirs)
                raise StoreError("no answer", key=key)
            return self.inner.put_new(key, chunks)

    store = RetryingStore(Rude(MemoryStore()))
    if theirs == b"ours":
        assert store.put_new("key", [b"ou", b"rs"]) == 4
    else:
        with pytest.raises(KeyExists):
            store.put_new("key", [b"ou", b"rs"])
    assert store.get("key") == theirs


def test_chunks_that_can_be_read_once_are_tried_once(naps):
    store = RetryingStore(FaultyStore(MemoryStore(), FaultScript(nth=1)))
    with pytest.raises(StoreError):
        store.put_new("key", (c for c in [b"a", b"b"]))
    assert not naps
    assert not store.inner.exists("key")


def test_what_a_dead_writer_left_is_tidied_away_and_nothing_else(tmp_path):
    store = LocalStore(tmp_path / "run")
    store.put_new("step-1/data", [b"kept"])
    leftovers = [
        tmp_path / "run" / name for name in (".1-ab.tmp", "step-1/.2-cd.tmp", "gone/.3.tmp")
    ]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    others = [tmp_path / "run" / name for name in ("notes.tmp", ".hidden")]
    for path in others:
        path.write_bytes(b"mine")
    assert store.tidy() == len(leftovers)
    assert not any(path.exists() for path in leftovers)
    assert not (tmp_path / "run" / "gone").exists()
    assert all(path.exists() for path in others)
    assert store.get("step-1/data") == b"kept"
    assert store.tidy() == 0
