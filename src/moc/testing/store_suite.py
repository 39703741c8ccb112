"""What every store must do. Inherit `StoreSuite` and give it a fixture called ``store``."""

# ruff: noqa: D102 - a test's name says what it shows

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - writers that race, in a test

import pytest

from moc.errors import KeyExists, KeyMissing, StoreError
from moc.store.base import Chunk, Store

__all__ = ["StoreSuite"]

WEIRD_KEYS = (
    "with space/and more.bin",
    "pattern*/[a-z]?.json",
    "percent%20/hash#tag",
    "gr\u00fc\u00dfe/\u6f22\u5b57",
    ".hidden/.file",
    "colon:here/semi;colon",
    "x" * 200,
)
BAD_KEYS = ("", "/absolute", "a//b", "a/", "../out", "a/../b", "./a", "line\nbreak", "a/.1.tmp")


class StoreSuite:
    """Conformance tests; the fixture ``store`` gives an empty store."""

    def test_what_is_put_comes_back(self, store: Store) -> None:
        chunks: list[Chunk] = [b"abc", bytearray(b"de"), memoryview(b"fgh")[1:], b""]
        assert store.put_new("folder/key.bin", chunks) == 7
        assert store.get("folder/key.bin") == b"abcdegh"
        assert store.size("folder/key.bin") == 7
        assert store.exists("folder/key.bin")

    def test_tidying_takes_nothing_that_was_put(self, store: Store) -> None:
        store.put_new("folder/key.bin", [b"kept"])
        assert store.tidy() == 0
        assert store.get("folder/key.bin") == b"kept"

    def test_nothing_is_a_value_too(self, store: Store) -> None:
        assert store.put_new("empty", []) == 0
        assert store.get("empty") == b""
        assert store.exists("empty")
        assert store.size("empty") == 0

    def test_views_of_other_types_are_bytes(self, store: Store) -> None:
        words = memoryview(bytes(range(16))).cast("I")
        assert store.put_new("words", [words]) == 16
        assert store.get("words") == bytes(range(16))

    def test_the_store_keeps_no_view_of_what_it_was_given(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put_new("new", [buffer])
        store.put("old", buffer)
        buffer[:] = b"after!"
        buffer.clear()  # fails while anybody holds a view of it
        assert store.get("new") == store.get("old") == b"before"

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, None),
            (3, None),
            (0, 4),
            (2, 3),
            (9, 1),
            (10, 1),
            (10, None),
            (4, 99),
            (50, 2),
            (5, 0),
        ],
    )
    def test_ranges_are_slices(self, store: Store, offset: int, nbytes: int | None) -> None:
        data = b"0123456789"
        store.put_new("key", [data])
        end = None if nbytes is None else offset + nbytes
        assert store.get("key", offset, nbytes) == data[offset:end]

    def test_a_key_is_written_once(self, store: Store) -> None:
        store.put_new("a/key", [b"first"])
        made: list[int] = []

        def chunks() -> Iterator[bytes]:
            made.append(1)
            yield b"second"

        with pytest.raises(KeyExists) as caught:
            store.put_new("a/key", chunks())
        assert caught.value.key == "a/key"
        assert not made
        assert store.get("a/key") == b"first"
        assert store.list() == ["a/key"]

    def test_a_key_that_is_taken_meanwhile_stays_as_it_is(self, store: Store) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"late"
            store.put_new("key", [b"first"])
            yield b"comer"

        with pytest.raises(KeyExists):
            store.put_new("key", chunks())
        assert store.get("key") == b"first"
        assert store.list() == ["key"]

    def test_of_many_writers_one_wins(self, store: Store) -> None:
        start = threading.Barrier(4)

        def write(number: int) -> int | None:
            start.wait(10)
            try:
                store.put_new("new/folder/key", [b"%d" % number] * 100)
            except KeyExists:
                return None
            return number

        with ThreadPoolExecutor(4) as pool:
            winners = [number for number in pool.map(write, range(4)) if number is not None]
        assert len(winners) == 1
        assert store.get("new/folder/key") == b"%d" % winners[0] * 100
        assert store.list() == ["new/folder/key"]

    def test_chunks_that_fail_leave_nothing(self, store: Store) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"half"
            assert not store.exists("folder/key")
            assert store.list() == []
            raise OSError("the source is gone")

        with pytest.raises(OSError, match="the source is gone"):
            store.put_new("folder/key", chunks())
        assert not store.exists("folder/key")
        assert store.list() == []
        assert store.children("folder") == []
        store.put_new("folder/key", [b"whole"])
        assert store.get("folder/key") == b"whole"

    def test_put_replaces(self, store: Store) -> None:
        store.put("latest", b"one, and longer")
        store.put("latest", b"two")
        assert store.get("latest") == b"two"
        assert store.list() == ["latest"]

    def test_a_missing_key_is_said_to_be_missing(self, store: Store) -> None:
        store.put_new("folder/key", [b"1"])
        for key in ("nothing", "folder", "folder/nothing", "folder/key/below"):
            assert not store.exists(key)
            with pytest.raises(KeyMissing) as caught:
                store.get(key)
            assert caught.value.key == key
            with pytest.raises(KeyMissing):
                store.get(key, 0, 1)
            with pytest.raises(KeyMissing):
                store.size(key)

    def test_listings_are_sorted_and_by_folder(self, store: Store) -> None:
        keys = ["b", "a/2", "a/10", "a/1/deep", "a-b/x", "c/d/e/f"]
        for key in keys:
            store.put_new(key, [b"x"])
        assert store.list() == sorted(keys)
        assert store.list("a") == store.list("a/") == ["a/1/deep", "a/10", "a/2"]
        assert store.list("c/d") == ["c/d/e/f"]
        assert store.children() == ["a", "a-b", "b", "c"]
        assert store.children("a") == store.children("a/") == ["1", "10", "2"]
        assert store.children("c/d/e") == ["f"]
        for nothing in ("nothing", "b", "a/1/deep", "a/1/no"):
            assert store.list(nothing) == store.children(nothing) == []

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert store.list() == store.children() == store.list("a") == []

    def test_what_is_deleted_is_gone_and_may_be_deleted_again(self, store: Store) -> None:
        store.put_new("a/b/1", [b"1"])
        store.put_new("a/b/2", [b"2"])
        store.delete("a/b/1")
        assert store.list() == ["a/b/2"]
        store.delete("a/b/2")
        assert store.list() == store.children() == []
        for key in ("a/b/2", "a/b", "nothing/at/all"):
            store.delete(key)
        store.put_new("a/b/1", [b"again"])
        assert store.get("a/b/1") == b"again"

    def test_to_delete_a_folder_does_nothing(self, store: Store) -> None:
        store.put_new("folder/key", [b"1"])
        store.delete("folder")
        assert store.list() == ["folder/key"]

    def test_any_printable_name_is_a_key(self, store: Store) -> None:
        for key in WEIRD_KEYS:
            store.put_new(key, [key.encode()])
        assert store.list() == sorted(WEIRD_KEYS)
        for key in WEIRD_KEYS:
            assert store.get(key) == key.encode()
            assert store.list(key.split("/")[0]) == ([key] if "/" in key else [])
        for key in WEIRD_KEYS:
            store.delete(key)
        assert store.list() == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        with pytest.raises(StoreError, match="not a key"):
            store.put_new(key, [b"x"])
        with pytest.raises(StoreError, match="not a key"):
            store.put(key, b"x")
        with pytest.raises(StoreError, match="not a key"):
            store.get(key)
        with pytest.raises(StoreError, match="not a key"):
            store.delete(key)
        assert store.list() == []
