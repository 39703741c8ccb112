"""An S3-compatible server of its own process: moto, with faults and a record of requests.

It prints its port when it listens. Requests are handled one at a time, because moto looks for a
key and stores it in two steps where S3 has one. ``POST /_test`` sets what fails; ``GET /_test``
tells what was asked for.
"""

from __future__ import annotations

import ctypes
import json
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

_CODES = {
    403: "AccessDenied",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>scripted</Message></Error>"


class Handler(MotoRequestHandler):
    """Without a log."""

    def log_request(self, *_: object) -> None:
        pass


class App:
    """moto behind a script of faults.

    The script, as JSON: ``nth`` (counted from 1 from when it is set) and ``times``, or ``every``;
    ``status``; ``when`` (before: no effect; after: the answer is lost); ``method`` and ``part`` (of
    the URL), which restrict what counts. ``ignore_conditions`` makes it a service that has no
    conditional puts, and ``terse`` one that does not say which condition did not hold.
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._script: dict[str, Any] = {}
        self._counted = 0
        self._requests: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        path = environ["RAW_URI"]
        if path == "/_test":
            return self._control(environ, start, length)
        with self._lock:
            self._requests.append(f"{environ['REQUEST_METHOD']} {path}")
            fault = self._strikes(environ)
            if fault and fault.get("when", "before") == "before":
                environ["wsgi.input"].read(length)
                return self._fail(environ, start, fault["status"])
            if fault:
                b"".join(self._moto(environ, lambda *_: None))
                return self._fail(environ, start, fault["status"])
            if self._script.get("ignore_conditions"):
                environ.pop("HTTP_IF_NONE_MATCH", None)
            told: list[Any] = []
            body = b"".join(self._moto(environ, lambda *status: told.append(status)))
            if told[0][0].startswith("412") and self._script.get("terse"):
                return self._fail(environ, start, 412)
            start(*told[0])
            return [body]

    def _strikes(self, environ: dict[str, Any]) -> dict[str, Any] | None:
        script = self._script
        counts = (
            "status" in script
            and script.get("method", environ["REQUEST_METHOD"]) == environ["REQUEST_METHOD"]
            and script.get("part", "") in environ["RAW_URI"]
        )
        if not counts:
            return None
        self._counted += 1
        number, nth, times = self._counted, script.get("nth", 1), script.get("times", 1)
        if "every" in script:
            return None if number % script["every"] else script
        return script if nth <= number and (not times or number < nth + times) else None

    def _fail(self, environ: Any, start: Callable[..., Any], status: int) -> Iterable[bytes]:
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        body = b"" if is_head else _ERROR.format(_CODES[status]).encode()
        start(f"{status} scripted", [("Content-Type", "application/xml")])
        return [body]

    def _control(self, environ: Any, start: Callable[..., Any], length: int) -> Iterable[bytes]:
        with self._lock:
            if environ["REQUEST_METHOD"] == "POST":
                self._script = json.loads(environ["wsgi.input"].read(length))
                self._counted, self._requests = 0, []
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"counted": self._counted, "requests": self._requests}).encode()]


def main() -> None:
    """Serve until the process that started this one is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    server = make_server("127.0.0.1", 0, App(), threaded=True, request_handler=Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
