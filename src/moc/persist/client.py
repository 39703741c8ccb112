"""The trainer's end of the helper: starts it, talks to it, notices its death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moc import knobs
from moc.errors import DeadlineError, HelperError
from moc.persist.messages import Channel, Close, FromHelper, Hello, Warned
from moc.persist.residents import residents

__all__ = ["Helper", "orphans", "stop"]

_POLL_SECS = 0.01
_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])


class Helper:
    """A running helper process."""

    def __init__(
        self, hello: Hello, memory_dir: str, listener: socket.socket | None = None
    ) -> None:
        """Start the process. It inherits no standard streams, so nobody waits for it to end.

        Args:
            hello: what it works for.
            memory_dir: the run's folder in the memory tier.
            listener: the socket that it is to serve other nodes from; it stays the caller's, so
                that the next helper serves the same address.
        """
        ours, theirs = socket.socketpair()
        Path(memory_dir).mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may wipe it
        self.memory_dir = memory_dir
        command = [sys.executable, "-m", "moc.persist.agent", "--fd", str(theirs.fileno())]
        command += ["--memory", memory_dir, "--rank", str(hello.rank)]
        command += ["--run", hello.url, "--trainer", str(os.getpid())]
        inherited = [theirs.fileno()]
        if listener is not None:
            inherited.append(listener.fileno())
            command += ["--listen", str(listener.fileno())]
        with theirs, open(_log_path(memory_dir, hello.rank), "ab") as log:
            # The helper must find what this process can import, wherever it was started.
            self._process = subprocess.Popen(
                command,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=knobs.child_environment(
                    PYTHONPATH=os.pathsep.join([_SOURCE_ROOT, *filter(None, sys.path)])
                ),
                cwd="/",
            )
        self._channel = Channel(ours, FromHelper)
        self._rank = hello.rank
        self.send(hello)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            HelperError: the helper is gone.
        """
        try:
            self._channel.send(message)
        except OSError as error:
            raise HelperError(self._obituary()) from error

    def receive(self, timeout_secs: float = 0.0) -> list[object]:
        """Messages that are there or arrive in time.

        Raises:
            HelperError: the helper is gone and had nothing more to say.
        """
        messages = self._channel.receive(timeout_secs)
        if not messages and self._channel.closed:
            raise HelperError(self._obituary())
        return messages

    def close(self, deadline_secs: float) -> list[object]:
        """Let the helper finish, and wait for it.

        Returns:
            What it still had to say.

        Raises:
            DeadlineError: it did not end in time and was killed.
        """
        messages: list[object] = []
        end = knobs.monotonic() + deadline_secs
        try:
            self.send(Close(deadline_secs))
            while (left := end - knobs.monotonic()) > 0:
                messages += self.receive(left)
        except HelperError:
            pass  # its end of the socket is closed: it has exited, as asked
        try:
            self._process.wait(max(0.1, end - knobs.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise DeadlineError(
                f"the helper of rank {self._rank} (pid {self.pid}) did not finish within "
                f"{deadline_secs:.0f} s and was killed"
            ) from None
        self._channel.sock.close()
        if self._process.returncode > 0:  # it has done what it was asked for, and then failed
            messages.append(Warned(self._obituary()))
        return messages

    def detach(self) -> None:
        """Let the helper finish on its own; nobody waits for it."""
        self._channel.sock.close()

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()
        self._channel.sock.close()

    def _obituary(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = f"killed by signal {-code}" if code and code < 0 else f"exit status {code}"
        log = _log_path(self.memory_dir, self._rank)
        try:
            words = Path(log).read_text(errors="replace").strip().splitlines()[-1:]
        except OSError:
            words = []
        said = f": {words[0]}" if words else ""
        return f"the helper process of rank {self._rank} (pid {self.pid}) is gone, {how}{said}"


def orphans(folder: str) -> list[int]:
    """Helpers of this run on this node, by their command line; to be called before any starts.

    Args:
        folder: the run's folder in the memory tier.
    """
    return [r.pid for r in residents() if r.folder == folder]


def stop(pids: Sequence[int], deadline_secs: float) -> None:
    """SIGKILL helpers and wait until they are gone.

    Raises:
        DeadlineError: one of them does not die.
    """
    end = knobs.monotonic() + deadline_secs
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        while _is_running(pid):
            if knobs.monotonic() > end:
                raise DeadlineError(f"helper {pid} of an earlier attempt does not die")
            knobs.sleep(_POLL_SECS)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def _log_path(memory_dir: str, rank: int) -> str:
    return str(Path(memory_dir) / f"helper-{rank:05d}.log")
