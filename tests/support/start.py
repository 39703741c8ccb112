"""Starts of the job of `job` in one process, as one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moc
from moc.demo.trainer import Ranks
from moc.testing.ranks import run_ranks
from tests.support.job import Job, Spec


class Start:
    """One start. Leaving the ``with`` block by an exception ends it as a fault does.

    Attributes:
        job: model, optimizers, data.
        events: of the manager.
        manager: nothing is restored yet.
    """

    def __init__(self, spec: Spec, directory: Any = None, **options: Any) -> None:
        self.job = Job(spec, Ranks(device=torch.device("cpu")))
        self.events: list[moc.Event] = []
        self.manager = moc.CheckpointManager(
            directory or spec.run_dir,
            model=self.job.model,
            optimizer=self.job.optimizers,
            extras={"scheduler": self.job.schedulers, "loader": self.job.loader},
            policy=spec.policy,
            memory_dir=spec.memory[0],
            on_event=self.events.append,
            **options,
        )

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)

    def train(self, *steps: int) -> dict[str, Tensor]:
        """Make these steps, wait for each to be committed if it is due; the state at the end."""
        for step in steps:
            self.job.step()
            self.manager.step(step)
            self.manager.wait()
        return self.job.snapshot()


def alone(work: Callable[[Spec], None], spec: Spec) -> None:
    """Do something in a forked process of its own, which leaves no threads behind."""
    run_ranks(lambda _rank: work(spec), 1, init=False, timeout_secs=110)
