"""The coordinator's keys over TCP, for nodes that do not share a file system.

One connection per request: a token of 32 bytes, then one framed msgpack message each way. The
server knows whoever has the token, and keys of runs, attempts, receipts and manifests; nothing
else of the disk can be reached through it. Every wait has a deadline.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

import moc.errors
from moc import knobs
from moc.core.manifest import is_control_key
from moc.errors import StoreError, StoreRefused
from moc.store.base import Chunk, Names, Store, check_key, check_prefix

__all__ = ["Address", "ControlClient", "Endpoint", "listen", "own_addresses"]

_TOKEN_BYTES = 32
_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 31  # of one message: a manifest of millions of pieces is far smaller
_READ_BYTES = 1 << 20
_CONNECT_SECS = 3.0
_REQUEST_SECS = 20.0
_TOKEN_SECS = 5.0
_WAITING_CONNECTIONS = 512

T = TypeVar("T")


class Address(msgspec.Struct, frozen=True):
    """Where an endpoint is, and what opens it.

    Attributes:
        place: host name and directory of the coordinator, for people.
        hosts: names and addresses of its machine; the first that answers is used.
        port: chosen by the kernel.
        token: known to the job's ranks alone.
    """

    place: str
    hosts: list[str]
    port: int
    token: bytes


class _Ask(msgspec.Struct, array_like=True):
    verb: str
    key: str
    offset: int = 0
    nbytes: int | None = None
    data: bytes = b""
    rank: int = -1


class _Answer(msgspec.Struct, array_like=True):
    """One of the three, or the type and text of an error."""

    data: bytes = b""
    number: int = 0
    names: list[str] = []
    error: str = ""
    text: str = ""


def listen(place: str, hosts: Sequence[str]) -> tuple[socket.socket, Address]:
    """A listening socket on all interfaces of this machine, and a new token for it."""
    options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    sock = socket.create_server(
        ("", 0),
        backlog=_WAITING_CONNECTIONS,
        **(options if socket.has_dualstack_ipv6() else {}),  # type: ignore[arg-type]
    )
    port = sock.getsockname()[1]
    return sock, Address(place, [*hosts], port, secrets.token_bytes(_TOKEN_BYTES))


class Endpoint:
    """Serves a store's control keys from threads of its own, until `close`."""

    def __init__(self, sock: socket.socket, token: bytes, store: Store) -> None:
        """Start to serve; ``sock`` listens already."""
        self._server = _Server(sock, token, store)
        self._thread = threading.Thread(  # noqa: TID251 - the helper has no torch and no worker
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def was_told(self, key: str, ranks: Iterable[int]) -> bool:
        """Whether the helpers of these ranks have read a key."""
        return set(ranks) <= self._server.told.get(key, set())

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_SECS)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, token: bytes, store: Store) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.token, self.store = token, store
        self.told: dict[str, set[int]] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke: the client knows, and asks again."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        sock = self.request
        token = _receive(sock, _TOKEN_BYTES, knobs.monotonic() + _TOKEN_SECS)
        end = knobs.monotonic() + _REQUEST_SECS
        if not secrets.compare_digest(token, self.server.token):
            refused = _Answer(error="StoreRefused", text="the token is not that of this job")
            _send_frame(sock, refused, end)
            sock.shutdown(socket.SHUT_WR)
            # A socket closed with bytes unread resets, and takes the answer from the other side.
            with suppress(OSError):
                _receive(sock, _READ_BYTES, knobs.monotonic() + _TOKEN_SECS)
            return
        ask = _receive_frame(sock, _Ask, end)
        _send_frame(sock, self._answer(ask), end)

    def _answer(self, ask: _Ask) -> _Answer:
        try:
            answer = _VERBS[ask.verb](self.server.store, ask)
        except KeyError:
            return _Answer(error="StoreRefused", text=f"no such verb: {ask.verb!r}")
        except (StoreError, OSError) as error:
            kind = type(error).__name__ if isinstance(error, StoreError) else "StoreError"
            return _Answer(error=kind, text=str(error))
        if ask.verb == "get":
            self.server.told.setdefault(ask.key, set()).add(ask.rank)
        return answer


def _get(store: Store, ask: _Ask) -> _Answer:
    return _Answer(data=store.get(_served(ask.key), ask.offset, ask.nbytes))


def _put_new(store: Store, ask: _Ask) -> _Answer:
    return _Answer(number=store.put_new(_served(ask.key), [ask.data]))


def _put(store: Store, ask: _Ask) -> _Answer:
    store.put(_served(ask.key), ask.data)
    return _Answer()


def _exists(store: Store, ask: _Ask) -> _Answer:
    return _Answer(number=int(store.exists(_served(ask.key))))


def _size(store: Store, ask: _Ask) -> _Answer:
    return _Answer(number=store.size(_served(ask.key)))


def _delete(store: Store, ask: _Ask) -> _Answer:
    store.delete(_served(ask.key))
    return _Answer()


def _list(store: Store, ask: _Ask) -> _Answer:
    return _Answer(names=[*filter(is_control_key, store.list(ask.key))])


_VERBS = {
    "get": _get,
    "put_new": _put_new,
    "put": _put,
    "exists": _exists,
    "size": _size,
    "delete": _delete,
    "list": _list,
}


def _served(key: str) -> str:
    if not is_control_key(key):
        raise StoreRefused(f"{key!r} is not served to other nodes", key=key)
    return key


class ControlClient:
    """A store of control keys behind an `Endpoint`; every operation is one connection.

    Args:
        address: of the endpoint.
        rank: of the asker.
        timeout_secs: for one operation, the connection included.
    """

    def __init__(self, address: Address, rank: int, timeout_secs: float = _REQUEST_SECS) -> None:
        self._address = address
        self._rank = rank
        self._timeout_secs = timeout_secs
        self._hosts = list(address.hosts)

    @property
    def url(self) -> str:
        """The coordinator's host and directory; nothing that `open_store` takes."""
        return self._address.place

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        return self._ask(_Ask("get", check_key(key), offset, nbytes)).data

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`."""
        return self._ask(_Ask("put_new", check_key(key), data=b"".join(chunks))).number

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        self._ask(_Ask("put", check_key(key), data=bytes(data)))

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        return self._ask(_Ask("list", check_prefix(prefix))).names

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`."""
        folder = check_prefix(prefix)
        start = len(folder) + 1 if folder else 0
        return sorted({key[start:].partition("/")[0] for key in self.list(folder)})

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return bool(self._ask(_Ask("exists", check_key(key))).number)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self._ask(_Ask("size", check_key(key))).number

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._ask(_Ask("delete", check_key(key)))

    def tidy(self) -> int:
        """See `Store.tidy`: the coordinator's business."""
        return 0

    def _ask(self, ask: _Ask) -> _Answer:
        ask.rank = self._rank
        end = knobs.monotonic() + self._timeout_secs
        try:
            with self._connect(end) as sock:
                _send_frame(sock, ask, end, self._address.token)
                answer = _receive_frame(sock, _Answer, end)
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(
                f"rank 0's helper at {self._address.place} ({', '.join(self._address.hosts)}, port "
                f"{self._address.port}) did not answer {ask.verb} {ask.key!r}: {error}",
                key=ask.key,
            ) from error
        if answer.error:
            kind = getattr(moc.errors, answer.error, StoreError)
            known = isinstance(kind, type) and issubclass(kind, StoreError)
            raise (kind if known else StoreError)(answer.text, key=ask.key)
        return answer

    def _connect(self, end: float) -> socket.socket:
        problem: OSError = TimeoutError("no address")
        for host in [*self._hosts]:
            left = min(_CONNECT_SECS, end - knobs.monotonic())
            if left <= 0:
                break
            try:
                sock = socket.create_connection((host, self._address.port), timeout=left)
            except OSError as error:
                problem = error
                continue
            # Next time first, where it is another network's that did not answer.
            self._hosts.remove(host)
            self._hosts.insert(0, host)
            return sock
        raise problem


def _send_frame(sock: socket.socket, message: object, end: float, first: bytes = b"") -> None:
    body = msgspec.msgpack.encode(message)
    sock.settimeout(max(end - knobs.monotonic(), 0.001))
    sock.sendall(first + len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def _receive_frame(sock: socket.socket, kind: type[T], end: float) -> T:
    nbytes = int.from_bytes(_receive(sock, _LENGTH_BYTES, end), "little")
    if nbytes > _MOST_BYTES:
        raise OSError(f"a message of {nbytes} bytes is none of ours")
    return msgspec.msgpack.decode(_receive(sock, nbytes, end), type=kind)


def _receive(sock: socket.socket, nbytes: int, end: float) -> bytes:
    """Exactly so many bytes.

    Raises:
        OSError: the other side is gone, or the time is up.
    """
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(max(end - knobs.monotonic(), 0.001))
        part = sock.recv(min(nbytes - len(data), _READ_BYTES))
        if not part:
            raise ConnectionResetError("the connection ended early")
        data += part
    return bytes(data)


def own_addresses(host: str) -> list[str]:
    """What other machines may reach this one by: launcher's name, own name, own address."""
    found = [knobs.master_addr() or "", host]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface would
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(filter(None, found))]
