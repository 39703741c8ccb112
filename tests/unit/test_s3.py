"""What S3 alone promises, against a server: conditional puts, parts, lost answers, forks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from itertools import chain

import pytest
from tests.support.s3 import Server

import moc.store.s3
from moc.cli import doctor
from moc.errors import KeyExists, KeyMissing, StoreError, StoreRefused
from moc.store import open_store
from moc.store.s3 import S3Store
from moc.store.wrap import RetryingStore
from moc.testing.ranks import run_ranks

DATA = bytes(range(256)) * 40
PARTS = 3_000  # DATA takes four


@pytest.fixture(params=["whole", "parts"])
def store(bucket: str, request: pytest.FixtureRequest) -> S3Store:
    made = open_store(f"{bucket}/run")
    assert isinstance(made, S3Store)
    if request.param == "parts":
        made.part_bytes = PARTS
    return made


def patient(store: S3Store) -> RetryingStore:
    store._retries._backoff_secs = 0.001
    return RetryingStore(store, backoff_secs=0.001)


def kinds(requests: list[str]) -> list[str]:
    """Requests by what they are for."""
    names = {"?uploads": "begin", "partNumber=": "part", "uploadId=": "end", "list-type": "list"}
    return [
        next((n for part, n in names.items() if part in r and r[0] == "P"), r.split()[0].lower())
        for r in requests
    ]


def test_what_is_asked_for_is_what_the_page_says(store, s3_server):
    """docs/storage.md gives these numbers."""
    s3_server.script()
    store.put_new("key", [DATA])
    parts = store.part_bytes == PARTS
    assert kinds(s3_server.requests()) == [
        "head",
        *(["begin", "part", "part", "part", "part", "end"] if parts else ["put"]),
    ]
    for operation, wanted in [
        (lambda: store.get("key"), ["get"]),
        (lambda: store.get("key", 5, 10), ["get"]),
        (lambda: store.exists("key"), ["head"]),
        (lambda: store.exists("nothing"), ["head"]),
        (lambda: store.size("key"), ["head"]),
        (lambda: store.list(), ["get"]),
        (lambda: store.children(), ["get"]),
        (lambda: store.put("latest", b"1"), ["put"]),
        (lambda: store.delete("key"), ["delete"]),
    ]:
        s3_server.script()
        operation()
        assert kinds(s3_server.requests()) == wanted


def test_of_several_processes_one_wins_and_its_bytes_stay(store):
    def write(rank: int) -> list[int]:
        won = []
        for number in range(8):
            try:
                store.put_new(f"step-{number}/key", [b"%d" % rank * 1000] * 7)
                won.append(number)
            except KeyExists:
                pass
        return won

    won = run_ranks(write, 3, init=False)  # of a store opened here: no thread runs yet
    assert sorted(chain(*won)) == list(range(8))
    for rank, numbers in enumerate(won):
        assert all(store.get(f"step-{n}/key") == b"%d" % rank * 7000 for n in numbers)


def test_a_late_writer_is_refused_by_a_service_that_says_it_tersely(store, s3_server):
    def late() -> Iterator[bytes]:
        yield DATA
        S3Store(store.url).put_new("key", [b"first"])

    s3_server.script(terse=True)
    with pytest.raises(KeyExists):
        store.put_new("key", late())
    assert store.get("key") == b"first"


@pytest.mark.parametrize("when", ["before", "after"])
def test_each_request_of_a_put_fails_once(store, s3_server, bucket, when):
    """Tried again, the key is ours, whatever took place; and the client does not do it unseen."""
    for nth in range(1, 20):
        s3_server.script(nth=nth, status=(500, 503)[nth % 2], when=when)
        assert patient(store).put_new(f"key-{nth}", [DATA[:50], b"", DATA[50:]]) == len(DATA)
        asked = kinds(s3_server.requests())
        s3_server.script()
        assert store.get(f"key-{nth}") == DATA
        if len(asked) < nth:
            break
    assert nth == (8 if store.part_bytes == PARTS else 3)
    # An upload of which one never learned the name can only be ended by a rule of the bucket.
    lost = when == "after" and store.part_bytes == PARTS
    assert s3_server.uploads(bucket.removeprefix("s3://")) == int(lost)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_fails_for_good_leaves_all_or_nothing(store, s3_server, bucket, when):
    store._retries = moc.store.s3.Retries(tries=1)
    for nth in range(2, 20):
        s3_server.script(nth=nth, status=503, when=when)
        key = f"key-{nth}"
        failed = None
        try:
            store.put_new(key, [DATA])
        except StoreError as error:
            failed = error
        asked = kinds(s3_server.requests())
        s3_server.script()
        if failed is None:
            break
        assert type(failed) is StoreError
        assert key in str(failed)
        if when == "after" and asked[nth - 1] in ("put", "end"):
            assert store.get(key) == DATA
        else:
            assert not store.exists(key)
            assert key not in store.list()
    assert nth == (8 if store.part_bytes == PARTS else 3)
    # Only of a begin whose answer was lost is there nothing to abort by.
    lost = when == "after" and store.part_bytes == PARTS
    assert s3_server.uploads(bucket.removeprefix("s3://")) == int(lost)


def test_one_failed_part_is_sent_again_alone(bucket, s3_server):
    store = S3Store(bucket)
    store.part_bytes = 1_000
    store._retries._backoff_secs = 0.001
    s3_server.script(nth=10, status=503, part="partNumber=")
    store.put_new("key", [DATA])  # eleven parts, four at a time
    assert store.get("key") == DATA
    assert kinds(s3_server.requests()).count("part") in (14, 15)


def test_chunks_that_fail_abort_the_upload(bucket, s3_server):
    store = S3Store(bucket)
    store.part_bytes = 1_000

    def chunks() -> Iterator[bytes]:
        yield DATA
        assert s3_server.uploads(bucket.removeprefix("s3://")) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_new("key", chunks())
    assert s3_server.uploads(bucket.removeprefix("s3://")) == 0
    assert store.list() == []


def test_another_writers_key_is_not_ours_after_a_lost_answer(store, s3_server):
    last = 7 if store.part_bytes == PARTS else 2
    s3_server.script(nth=last, status=500)

    class Rude(S3Store):
        def put_new(self, key, chunks):
            try:
                return super().put_new(key, chunks)
            except KeyExists:
                raise
            except StoreError:
                S3Store(self.url).put_new(key, [b"theirs"])
                raise

    rude = Rude(store.url)
    rude.part_bytes = store.part_bytes
    with pytest.raises(KeyExists):
        patient(rude).put_new("key", [DATA])
    assert store.get("key") == b"theirs"


def test_what_is_not_permitted_fails_at_once_and_says_so(store, s3_server):
    store.put_new("key", [b"x"])
    for operation in (
        lambda s: s.put_new("other", [DATA]),
        lambda s: s.get("key"),
        lambda s: s.list(),
        lambda s: s.delete("key"),
        lambda s: s.exists("key"),
    ):
        s3_server.script(times=0, status=403)
        with pytest.raises(StoreRefused, match="not permitted to"):
            operation(RetryingStore(store, backoff_secs=1000))
        assert len(s3_server.requests()) == 1
    s3_server.script()
    with pytest.raises(StoreError, match="bucket"):
        RetryingStore(S3Store("s3://no-such-bucket/run"), tries=1).put_new("key", [b"x"])


def test_a_server_that_is_gone_is_an_error_within_the_deadline(bucket, monkeypatch):
    store = S3Store(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # where nobody listens
    with pytest.raises(StoreError, match="cannot read 'key'"):
        RetryingStore(store, tries=3, backoff_secs=0.001).get("key")


def test_listings_of_many_pages(bucket, monkeypatch):
    store = S3Store(f"{bucket}/run")
    real = S3Store._call

    def call(self, method, **arguments):
        if method == "list_objects_v2":
            arguments["MaxKeys"] = 2
        return real(self, method, **arguments)

    monkeypatch.setattr(S3Store, "_call", call)
    keys = [f"{folder}/{n}" for folder in "abc" for n in range(3)]
    for key in keys:
        store.put_new(key, [b"x"])
    S3Store(f"{bucket}/run-2").put_new("a/other", [b"x"])
    assert store.list() == keys
    assert store.list("b") == keys[3:6]
    assert store.children() == ["a", "b", "c"]
    assert store.children("b") == ["0", "1", "2"]


@pytest.mark.parametrize("ignored", [False, True])
def test_doctor_finds_a_service_that_ignores_conditions(bucket, s3_server: Server, ignored):
    """It looks before it writes, so a second put in a row shows nothing."""
    store = S3Store(f"{bucket}/run")
    store.part_bytes = PARTS
    s3_server.script(ignore_conditions=ignored)
    check = doctor._store(store)
    assert check.status == ("fail" if ignored else "ok"), check
    assert ("written twice" in check.found) == ignored
    assert store.list() == []


def test_doctor_finds_a_service_that_ignores_conditions_of_large_objects(bucket):
    store = S3Store(f"{bucket}/run")
    store.part_bytes = PARTS

    class Half(S3Store):
        def _call(self, method, **arguments):
            if method == "complete_multipart_upload":
                arguments.pop("IfNoneMatch")
            return super()._call(method, **arguments)

    half = Half(store.url)
    half.part_bytes = PARTS
    check = doctor._store(half)
    assert check.status == "fail"
    assert "a key of" in check.found


def test_memory_stays_bounded_while_a_large_object_goes_out(bucket):
    def upload(_rank: int) -> int:
        store = S3Store(bucket)
        store.part_bytes = 1 << 20
        block = bytes(1 << 20)
        store.put_new("warm-up", (block for _ in range(8)))
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store.put_new("large", (bytes(bytearray(block)) for _ in range(32)))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    [grown_kb] = run_ranks(upload, 1, init=False)
    assert grown_kb < 16 << 10  # four parts on their way, and what else there is
    assert S3Store(bucket).size("large") == 32 << 20


def test_a_forked_child_makes_connections_of_its_own(bucket):
    """Of a store in use: a data loader's worker, or a rank that a launcher forked."""
    store = S3Store(bucket)
    store.put_new("key", [b"bytes"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside a thread: that it is
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            good = store.get("key") == b"bytes"
            store.put_new("from-child", [b"x"])
            gc.collect()
            os._exit(0 if good else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.get("from-child") == b"x"  # the parent's connections are still its own
    with pytest.raises(KeyMissing):
        store.get("nothing")
