"""The coordinator's endpoint: who gets in, what is served, and what happens when nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moc.errors import KeyExists, KeyMissing, StoreError, StoreRefused
from moc.persist.endpoint import Address, ControlClient, Endpoint, listen
from moc.store.local import LocalStore
from moc.store.memory import MemoryStore
from moc.store.node_local import NodeLocalStore
from moc.testing.store_suite import StoreSuite

MANIFEST = "step-00000002-a0001/manifest.json"
RECEIPT = "step-00000002-a0001/rank-00003.receipt"
DATA = "step-00000002-a0001/dense-00003.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def address(store: LocalStore) -> Iterator[Address]:
    listener, address = listen("here", ["localhost"])
    endpoint = Endpoint(listener, address.token, store)
    yield address
    endpoint.close()


def test_control_keys_pass_with_their_errors(address: Address, store: LocalStore) -> None:
    client = ControlClient(address, rank=3)
    assert client.put_new(RECEIPT, [b"ab", memoryview(b"cd")]) == 4
    assert store.get(RECEIPT) == client.get(RECEIPT) == b"abcd"
    assert client.get(RECEIPT, 1, 2) == b"bc"
    assert client.size(RECEIPT) == 4
    assert client.exists(RECEIPT)
    assert not client.exists(MANIFEST)
    with pytest.raises(KeyExists):
        client.put_new(RECEIPT, [b"other"])
    with pytest.raises(KeyMissing):
        client.get(MANIFEST)
    client.delete(RECEIPT)
    assert not store.exists(RECEIPT)


def test_nothing_else_of_the_disk_is_served(address: Address, store: LocalStore) -> None:
    store.put_new(DATA, [b"weights"])
    store.put_new(RECEIPT, [b"receipt"])
    client = ControlClient(address, rank=3)
    for key in (DATA, "secrets.txt", "attempts/0001.json.bak"):
        for ask in (client.get, client.size, client.exists, client.delete):
            with pytest.raises(StoreRefused):
                ask(key)
        with pytest.raises(StoreRefused):
            client.put_new(key, [b"x"])
    with pytest.raises(StoreError):
        client.get("../run.json")
    assert store.get(DATA) == b"weights"
    assert client.list() == [RECEIPT]
    assert client.children("step-00000002-a0001") == ["rank-00003.receipt"]


def test_a_wrong_token_is_refused(address: Address, store: LocalStore) -> None:
    store.put_new("run.json", [b"{}"])
    wrong = msgspec.structs.replace(address, token=bytes(32))
    with pytest.raises(StoreRefused, match="token"):
        ControlClient(wrong, rank=3).put_new(MANIFEST, [b"forged"])
    assert not store.exists(MANIFEST)
    assert ControlClient(address, rank=3).get("run.json") == b"{}"


def test_strangers_who_talk_or_stay_silent_hold_nobody_up(address: Address) -> None:
    with (
        socket.create_connection(("localhost", address.port)) as loud,
        socket.create_connection(("localhost", address.port)),
    ):
        loud.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64))
        assert not ControlClient(address, rank=3).exists(MANIFEST)
    with socket.create_connection(("localhost", address.port)) as huge:
        huge.sendall(address.token + (1 << 62).to_bytes(8, "little"))
        assert huge.recv(1) == b""


def test_who_does_not_answer_is_named_after_the_deadline() -> None:
    listener, address = listen("host-7:/local/run", ["localhost"])
    with listener, pytest.raises(StoreError, match=r"host-7:/local/run .*did not answer size"):
        ControlClient(address, rank=3, timeout_secs=0.2).size(MANIFEST)
    with pytest.raises(StoreError, match="port"):
        ControlClient(address, rank=3, timeout_secs=0.2).size(MANIFEST)


class TestNodeLocalStore(StoreSuite):
    @pytest.fixture
    def store(self) -> NodeLocalStore:
        return NodeLocalStore(MemoryStore(), MemoryStore())


def test_keys_go_where_they_belong() -> None:
    local, control = MemoryStore(), MemoryStore()
    both = NodeLocalStore(local, control)
    both.put_new(DATA, [b"weights"])
    both.put_new(RECEIPT, [b"receipt"])
    local.put_new(MANIFEST, [b"a copy of something retired"])
    control.put_new("step-00000002-a0001/dense-00000.safetensors", [b"another node's"])
    assert local.list() == [DATA, MANIFEST]
    assert both.list() == [DATA, RECEIPT]
    assert both.children() == ["step-00000002-a0001"]
    assert not both.exists(MANIFEST)
