"""The one owner of threads in a trainer: one worker, one task at a time, failures kept.

Where signals are listened for there is a second one; it waits for the kernel and for the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from moc.errors import DeadlineError

__all__ = ["Worker", "start_listener"]


def start_listener(task: Callable[[], None]) -> threading.Thread:
    """A thread that Python does not wait for when it ends; the task keeps its own failures."""
    thread = threading.Thread(target=task, name="moc-preempt", daemon=True)
    thread.start()
    return thread


class Worker:
    """Runs tasks one after the other; `wait` raises what the task raised."""

    def __init__(self) -> None:
        """Start no thread before the first task."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moc-snapshot")
        self._task: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._task is not None and not self._task.done()

    def start(self, task: Callable[[], None]) -> None:
        """Run a task in the background. The one before must have been waited for."""
        assert self._task is None, "the result of the last task was never read"
        try:
            self._task = self._pool.submit(task)
        except RuntimeError:  # Python is ending and starts no thread any more
            self._task = Future()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - kept for `wait`, as a thread's would be
                self._task.set_exception(error)
            else:
                self._task.set_result(None)

    def wait(self, timeout_secs: float, what: str) -> None:
        """Wait for the running task, if any, and raise its error.

        Raises:
            DeadlineError: it takes longer than the timeout.
        """
        if self._task is None:
            return
        try:
            self._task.result(timeout_secs)
        except FutureTimeout as error:
            if not self._task.done():
                raise DeadlineError(f"{what} is not done after {timeout_secs:.0f} s") from error
            self._task = None
            raise
        except BaseException:
            self._task = None
            raise
        self._task = None

    def close(self) -> None:
        """Let the running task end; start no other."""
        self._pool.shutdown(wait=False, cancel_futures=True)
