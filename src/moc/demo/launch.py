"""Starts the ranks under torchrun, watches them, and loses half of them on demand. Linux only."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moc import knobs
from moc.demo.journal import Tail
from moc.demo.runlog import RunLog

__all__ = ["Launch", "LaunchError", "NodeLoss"]

_MARK = "MOC_DEMO_LAUNCH"
_POLL_SECS = 0.05
_SILENCE_SECS = 240.0
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception): .*)$", re.MULTILINE
)
_SIGNAL_LINE = re.compile(r"Signal \d+ \(SIG(?!TERM)\w+\) received by PID \d+")


class LaunchError(Exception):
    """The ranks failed; one line that says how and where to read more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """What was destroyed.

    Attributes:
        step: the last step that was made before.
        processes: how many were killed.
        nbytes: bytes of memory that were wiped.
        at: when, by the monotonic clock.
    """

    step: int
    processes: int
    nbytes: int
    at: float


class Launch:
    """One run: torchrun, its ranks and their helpers; a context manager that leaves none alive."""

    def __init__(
        self,
        run_dir: Path,
        *,
        ranks: int,
        restarts: int,
        memory_dir: Path,
        options: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self.log = RunLog(world_size=ranks)
        self._run_dir, self._memory_dir = run_dir, memory_dir
        self._tails = [(rank, Tail(run_dir / f"metrics-rank{rank}.jsonl")) for rank in range(ranks)]
        self._tell = tell
        self._heard = time.monotonic()
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        run_dir.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command += ["--log-dir", str(run_dir / "logs"), "--redirects", "3"]
        command += ["-m", "moc.demo.trainer", "--run-dir", str(run_dir)]
        command += ["--memory-dir", str(memory_dir), *options]
        # A session of its own: Ctrl-C reaches this process alone, which then ends all others.
        with (run_dir / "torchrun.log").open("wb") as output:
            self._torchrun = subprocess.Popen(
                command,
                env=knobs.child_environment(**{"OMP_NUM_THREADS": "1", _MARK: self._mark}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, each_poll: Callable[[], None]) -> None:
        """Follow the run to its end; ``each_poll`` is called some twenty times a second.

        Raises:
            LaunchError: the ranks failed, or said nothing for four minutes.
        """
        running = True
        while running:
            running = not self._ended()
            self._listen()
            if running and time.monotonic() - self._heard > _SILENCE_SECS:
                raise LaunchError(f"no sign of life for {_SILENCE_SECS:.0f} s; {self._where()}")
            each_poll()
        if self._torchrun.returncode or self.log.final is None:
            raise LaunchError(
                f"training ended with exit code {self._torchrun.returncode}; {self._where()}"
            )

    def lose_node(self, ranks: Sequence[int], *, node: int) -> NodeLoss:
        """Stop a node's processes, wipe its memory, then kill them: nothing of them survives.

        Stopped first, so that no helper saves or writes anything while its memory vanishes.
        """
        victims: set[int] = set()
        roots = {self.log.pids[rank] for rank in ranks}
        while found := (_descendants(roots) & self._own_processes()) - victims:
            for pid in found:  # looked for again: one may have been born meanwhile
                _send(pid, signal.SIGSTOP)
            victims |= found
        memory_dir = self._memory_dir / f"node{node}"
        nbytes = sum(file.stat().st_size for file in memory_dir.rglob("*") if file.is_file())
        shutil.rmtree(memory_dir, ignore_errors=True)
        for pid in victims:
            _send(pid, signal.SIGKILL)
        at = time.monotonic()
        self._listen()  # the others cannot make a step without them: what is told by now is all
        return NodeLoss(step=self.log.step, processes=len(victims), nbytes=nbytes, at=at)

    def close(self) -> None:
        """Kill whatever is left of the run, wait for it, and free its memory directory."""
        own = self._own_processes()
        while own:
            for pid in own:
                _send(pid, signal.SIGKILL)
            self._torchrun.wait()
            own = self._own_processes()
        self._torchrun.wait()
        shutil.rmtree(self._memory_dir, ignore_errors=True)

    def __enter__(self) -> Launch:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _listen(self) -> None:
        news = [(rank, record) for rank, tail in self._tails for record in tail.read()]
        for rank, record in sorted(news, key=lambda item: (item[1]["at"], item[0])):
            self._heard = time.monotonic()
            for line in self.log.feed(rank, record):
                self._tell(line)

    def _ended(self) -> bool:
        try:
            self._torchrun.wait(_POLL_SECS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _own_processes(self) -> set[int]:
        """All that inherited this launch's mark, whatever their parent and session."""
        mark = f"{_MARK}={self._mark}".encode()
        found = set()
        for pid in _all_pids():
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.add(pid)
        return found

    def _where(self) -> str:
        return first_error(self._run_dir) or f"see {self._run_dir / 'torchrun.log'}"


def first_error(run_dir: Path) -> str:
    """What the newest attempt's ranks died of, and the file that says more; "" if unknown.

    A rank that lost its peer tells of a connection; one that tells of anything else is to blame,
    and one that was killed tells nothing: of that, torchrun does.
    """
    by_attempt: dict[Path, list[tuple[bool, str]]] = {}
    for path in sorted(run_dir.glob("logs/*/attempt_*/*/stderr.log")):
        found = _ERROR_LINE.findall(path.read_text(errors="replace"))
        if found:
            error = found[-1]
            consequence = "onnection" in error or "SignalException" in error
            by_attempt.setdefault(path.parent.parent, []).append(
                (consequence, f"{error[:300]} (see {path})")
            )
    consequence, text = min(by_attempt[max(by_attempt)]) if by_attempt else (True, "")
    report = run_dir / "torchrun.log"
    if consequence and report.exists():
        signals = _SIGNAL_LINE.findall(report.read_text(errors="replace"))
        return f"{signals[-1]} (see {report})" if signals else text
    return text


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _descendants(roots: set[int]) -> set[int]:
    """These processes and all below them."""
    parents: dict[int, int] = {}
    for pid in _all_pids():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
    family = set(roots)
    while born := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= born
    return family


def _send(pid: int, sig: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sig)
