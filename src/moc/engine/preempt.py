"""Signals that announce the end: heard at once, wherever the main thread waits.

A handler of Python's runs on the main thread only, and not while that waits in C++ for another
rank; torchrun then waits 30 s before it kills. So the kernel's note goes through
`signal.set_wakeup_fd` to a thread, which remembers the request, keeps the time, and ends the
process when the grace is over or no rank can be asked any more. What is saved, and after which
step, is decided elsewhere, by all ranks together (`moc.choose.look`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import threading
import weakref
from collections.abc import Sequence
from types import FrameType

from moc import knobs
from moc.errors import ConfigError
from moc.snapshot.worker import start_listener

__all__ = ["Watch", "check_signals", "process_place"]

_CLOSE, _WAKE = b"\0", b"\xff"  # numbers that no signal has
_ECHO_SECS = 1.0  # slurmstepd and torchrun both pass SIGTERM on: within this it is the same one


def check_signals(signals: Sequence[int]) -> tuple[int, ...]:
    """The signals, as numbers.

    Raises:
        ConfigError: not signals, or such as no process can catch.
    """
    try:
        found = tuple(int(signal.Signals(s)) for s in signals)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"preempt_signals={signals!r}: signals, such as (signal.SIGTERM, signal.SIGUSR1)"
        ) from error
    if {signal.SIGKILL, signal.SIGSTOP} & set(found):
        raise ConfigError("preempt_signals: no process can catch SIGKILL or SIGSTOP; use SIGTERM")
    if found and threading.current_thread() is not threading.main_thread():
        raise ConfigError("with preempt_signals a manager is made on the main thread")
    return found


def process_place() -> str:
    """What two processes share iff they see one another's process ids."""
    return f"{os.uname().nodename} {os.stat('/proc/self/ns/pid').st_ino}"


class Watch:
    """Listens for signals of this rank, from now to `close`. Made on the main thread.

    Attributes:
        saved: whether the save of the end is made; set by the one who makes it.
    """

    def __init__(
        self, signals: Sequence[int], *, grace_secs: float, exit_code: int, mates: Sequence[int]
    ) -> None:
        """Take over the signals.

        Args:
            signals: what asks for the end.
            grace_secs: from a signal to the end of the process.
            exit_code: when the save is made by then.
            mates: process ids of the other ranks that can be seen from here.
        """
        self.saved = False
        self._grace_secs = grace_secs
        self._exit_code = exit_code
        self._heard: dict[int, float] = {}  # when each signal came first
        self._signum = 0
        self._deadline: float | None = None
        self._agreed = False
        self._mate_died = False
        self._mates = []
        for pid in mates:
            with contextlib.suppress(OSError):  # not there, or an old kernel: the grace is left
                self._mates.append(os.pidfd_open(pid))
        self._closed = False
        self._pid = os.getpid()
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        # The descriptor first: no signal of ours is without a listener.
        self._previous_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._previous = {n: signal.signal(n, self._on_signal) for n in signals}
        self._thread = start_listener(self._listen)
        _watches.add(self)

    @property
    def words(self) -> tuple[int | None, int]:
        """Microseconds until this rank ends itself, and the signal; (None, 0) without one."""
        if self._deadline is None:
            return None, 0
        return max(0, int((self._deadline - knobs.monotonic()) * 1e6)), self._signum

    @property
    def left_secs(self) -> float:
        """Seconds until this process ends itself, once a signal is agreed on."""
        assert self._deadline is not None
        return self._deadline - knobs.monotonic()

    def agree(self, signum: int, left_secs: float) -> None:
        """All ranks know of a signal and stop now; some rank ends itself so soon."""
        self._agreed = True
        deadline = knobs.monotonic() + left_secs
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
        self._signum = self._signum or signum
        self._theirs.send(_WAKE)

    def close(self) -> None:
        """Give back what was taken over, unless somebody has taken it since; safe to repeat."""
        if self._closed:
            return
        self._closed = True
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        self._give_back_descriptor()
        if os.getpid() == self._pid:
            self._theirs.send(_CLOSE)
            self._thread.join()
        self._ours.close()
        self._theirs.close()
        for descriptor in self._mates:
            os.close(descriptor)
        _watches.discard(self)

    def _give_back_descriptor(self) -> None:
        current = signal.set_wakeup_fd(-1)
        ours = current == self._theirs.fileno()
        back = self._previous_fd if ours else current
        if back != -1:
            with contextlib.suppress(ValueError, OSError):  # its owner has closed it
                signal.set_wakeup_fd(back)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """What Python calls on the main thread, when it gets there; the thread knew before."""
        previous = self._previous[signum]
        if callable(previous) and self._is_second(signum):
            previous(signum, frame)

    def _is_second(self, signum: int) -> bool:
        first = self._heard.get(signum)
        return first is not None and knobs.monotonic() - first > _ECHO_SECS

    # ------------------------------------------------------------------ on the thread

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ours, selectors.EVENT_READ)
            for descriptor in self._mates:
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                left = None
                if self._deadline is not None:
                    left = max(0.0, self._deadline - knobs.monotonic())
                for key, _ in selector.select(left):
                    if key.fileobj is not self._ours:  # a process that ended
                        self._mate_died = True
                        selector.unregister(key.fileobj)
                        continue
                    told = self._ours.recv(1 << 12)
                    if _CLOSE in told:
                        return
                    self._pass_on(told)
                    for signum in told:
                        self._hear(signum)
                self._look_at_the_clock()

    def _pass_on(self, told: bytes) -> None:
        """Whoever listened before us still does."""
        told = told.replace(_WAKE, b"")
        if told and self._previous_fd != -1:
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, told)

    def _hear(self, signum: int) -> None:
        if signum not in self._previous:
            return
        if signum not in self._heard:
            self._heard[signum] = now = knobs.monotonic()
            self._signum = self._signum or signum
            if self._deadline is None:
                self._deadline = now + self._grace_secs
                _say(
                    f"{signal.Signals(signum).name}: all ranks save and end; at the latest in "
                    f"{self._grace_secs:g} s"
                )
        elif self._is_second(signum) and not callable(self._previous[signum]):
            if self.saved:
                self._leave("came again, and the save is made")
            _say(f"{signal.Signals(signum).name} again: ended at once, what was not saved is lost")
            ctypes.CDLL(None).signal(signum, 0)  # SIG_DFL; Python's own works on its main thread
            os.kill(os.getpid(), signum)

    def _look_at_the_clock(self) -> None:
        if self._deadline is None:
            return
        if self._mate_died and not self._agreed:
            self._leave("another rank has died, so nothing can be saved together")
        if knobs.monotonic() >= self._deadline:
            self._leave("the save is made" if self.saved else "no save was made within the grace")

    def _leave(self, why: str) -> None:
        code = self._exit_code if self.saved else 128 + self._signum
        _say(f"{signal.Signals(self._signum).name}: {why}; exit code {code}")
        os._exit(code)

    # ------------------------------------------------------------------ in a forked child

    def _disown(self) -> None:
        """A child is no rank: a signal to it must not reach the parent's thread."""
        self._give_back_descriptor()
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _after_fork() -> None:
    for watch in list(_watches):
        watch._disown()


os.register_at_fork(after_in_child=_after_fork)


def _say(text: str) -> None:
    """One line to standard error, unless nobody reads it: the main thread may hold any lock."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"moc: process {os.getpid()}: {text}\n".encode())
