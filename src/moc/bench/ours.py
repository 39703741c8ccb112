"""One save of the state by this library, from the call to the commit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from moc import knobs
from moc.bench.state import State
from moc.choose.policy import Policy
from moc.core.events import Event, EventKind
from moc.errors import ConfigError, DeadlineError, MocError
from moc.manager import CheckpointManager
from moc.persist.commit import load_timeline, plan_sweep, prune
from moc.persist.survey import read_run
from moc.snapshot.buffers import read_seals, remove_folder, run_memory
from moc.store import open_store

__all__ = ["Ours", "Save"]

_NEVER = 1 << 40  # steps between persists that nobody asks for
_POLL_SECS = 0.005
_DEADLINE_SECS = 120.0
_MATRIX = 512


class Save(NamedTuple):
    """One save while the trainer is idle."""

    snapshot_bytes: int
    snapshot_secs: float
    persist_bytes: int
    persist_secs: float


class Ours:
    """A manager that saves the state whenever it is told to."""

    def __init__(
        self,
        state: State,
        folder: Path,
        memory_dir: Path,
        *,
        k_snapshot: int | None,
        k_persist: int | None,
    ) -> None:
        """Nothing is written before `warm_up`."""
        self._state = state
        self._run = folder / "run"
        self._memory_dir = memory_dir
        self._events: list[Event] = []
        self._manager = CheckpointManager(
            self._run,
            model=state.model,
            optimizer=state.optimizer,
            policy=Policy(
                snapshot_every=1,
                persist_every=_NEVER,
                k_snapshot=k_snapshot,
                k_persist=k_persist,
                keep_latest_k=None,  # the helper's sweep would run into what is measured next
                buffers=3,
                on_error="raise",
            ),
            memory_dir=memory_dir,
            on_event=self._events.append,
        )
        self._step = 0

    def warm_up(self) -> None:
        """What only first saves cost: memory, digests, the proof that nobody else writes."""
        self._state.optimizer_step()
        for _ in range(2):
            self.save()

    def save(self) -> Save:
        """Save and persist while the trainer does nothing else."""
        self._state.change()
        self._step += 1
        start = knobs.now_secs()
        self._manager.save(self._step)
        self._manager.gate()
        self._manager.wait()
        done, committed = self._event("snapshot_done"), self._event("committed")
        store = open_store(self._run)
        prune(store, plan_sweep(store, load_timeline(store), 1, None))
        return Save(done.nbytes, done.time - start, committed.nbytes, committed.time - done.time)

    def stall(self, compute_secs: float) -> float:
        """What training waits for a snapshot that overlaps with so long a forward and backward."""
        self._state.change()
        self._state.optimizer_step()
        self._step += 1
        self._manager.step(self._step)
        left = torch.randn(_MATRIX, _MATRIX)
        end = perf_counter() + compute_secs
        while perf_counter() < end:
            left @ left
        self._state.optimizer_step()
        self._let_digest()
        return float(self._manager.stats()["stall_secs"][self._step])

    def close(self) -> None:
        """End, and leave nothing in memory; the folder on storage is the caller's."""
        try:
            self._manager.close()
        finally:
            with contextlib.suppress(ConfigError):  # it had not begun
                remove_folder(self._memory())

    def _event(self, kind: EventKind) -> Event:
        found = [e for e in self._events if e.kind == kind and e.step == self._step]
        if not found:
            raise MocError(f"the save of step {self._step} ended without `{kind}`")
        return found[-1]

    def _let_digest(self) -> None:
        """The helper digests what is not persisted; not while the next thing is measured."""
        deadline = knobs.monotonic() + _DEADLINE_SECS
        while not any(
            seal.version.step == self._step and seal.pieces[0].digest
            for seal in read_seals(self._memory())
        ):
            if knobs.monotonic() > deadline:
                raise DeadlineError(f"no digests of step {self._step} in {_DEADLINE_SECS:.0f} s")
            knobs.sleep(_POLL_SECS)

    def _memory(self) -> Path:
        """The run's folder in the memory tier."""
        return run_memory(self._memory_dir, read_run(open_store(self._run)).run_id)
