"""A bucket of a real server on this machine, and what it was asked."""

from __future__ import annotations

import functools
import http.client
import json
import os
import select
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.asyn
import fsspec.config
from aiobotocore.session import AioSession
from s3fs import S3FileSystem

_START_SECS = 60.0


class Server:
    """The server process of `tests.support.s3_server`. Ended by `close`."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.s3_server"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=root,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
                "S3_UPLOAD_PART_MIN_SIZE": "0",  # so that a test needs no objects of many MB
            },
        )
        assert self._process.stdout is not None
        there, _, _ = select.select([self._process.stdout], [], [], _START_SECS)
        line = self._process.stdout.readline() if there else b""
        if not line.strip().isdigit():
            self.close()
            raise RuntimeError(f"the S3 server did not start within {_START_SECS:.0f} s: {line!r}")
        self.port = int(line)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def make_bucket(self) -> str:
        """A new, empty bucket."""
        name = f"moc-{uuid.uuid4().hex}"
        self._ask("PUT", f"/{name}", b"")
        return name

    def script(self, **script: Any) -> None:
        """Behave as `tests.support.s3_server.App` says, and forget the requests so far."""
        self._ask("POST", "/_test", json.dumps(script).encode())

    def uploads(self, bucket: str) -> int:
        """Uploads in parts that are neither complete nor aborted."""
        return self._ask("GET", f"/{bucket}?uploads", b"").count(b"<UploadId>")

    def counted(self) -> int:
        """Requests since the last call of `script` that it concerns."""
        return json.loads(self._ask("GET", "/_test", b""))["counted"]

    def requests(self) -> list[str]:
        """Method and URL of every request since the last call of `script`."""
        return json.loads(self._ask("GET", "/_test", b""))["requests"]

    def close(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, (answer.status, data)
            return data
        finally:
            connection.close()


@functools.cache
def _session() -> AioSession:
    return AioSession()


@contextmanager
def environment(server: Server) -> Iterator[None]:
    """Variables by which boto, in this process and in those that it starts, finds the server."""
    wanted = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    # boto reads its description of S3 (0.2 s) once for all stores of this process.
    fsspec.config.conf["s3"] = {"session": _session()}
    try:
        yield
    finally:
        del fsspec.config.conf["s3"]
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def end_loop() -> None:
    """End the thread on which s3fs runs: no later test may fork beside it."""
    loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
    if loop is None or thread is None:
        return
    # Whoever still holds a store (pytest does, for a while) holds open connections.
    for finalizer in list(weakref.finalize._registry):
        found = finalizer.peek()
        if found is not None and isinstance(found[0], S3FileSystem):
            finalizer()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert not thread.is_alive()
    loop.close()
    fsspec.asyn.reset_after_fork()
