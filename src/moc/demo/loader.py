"""Batches out of the mapped text, at a position that can be saved and set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moc.demo.corpus import split_windows

__all__ = ["Loader"]


class Loader:
    """Draws byte windows; what it draws depends on nothing but the seed and its position.

    The position counts the samples of all ranks together, so the same batches follow after a
    resume, also on another number of ranks when the global batch stays the same.

    Attributes:
        samples: samples that all ranks together have drawn.
        tokens_per_batch: tokens of one batch of this rank.
    """

    def __init__(
        self,
        path: Path,
        *,
        batch: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        nbytes = path.stat().st_size
        window = seq_len + 1
        self._split = split_windows(nbytes, window)
        # A private mapping: the text is read from the page cache that all ranks share.
        text = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
        self._windows = text[: nbytes // window * window].view(-1, window)
        self._batch, self._seed, self._rank, self._world_size = batch, seed, rank, world_size
        self.samples = 0
        self.tokens_per_batch = batch * seq_len

    def next_batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's share of the next global batch."""
        first = self.samples + self._rank * self._batch
        picked = [
            self._split.train_window(sample, self._seed)
            for sample in range(first, first + self._batch)
        ]
        self.samples += self._batch * self._world_size
        return self._gather(picked, device)

    def validation_batch(self, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's share of one held-out batch; moves no position."""
        first = (number * self._world_size + self._rank) * self._batch
        picked = [
            self._split.validation_window(sample) for sample in range(first, first + self._batch)
        ]
        return self._gather(picked, device)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"samples": self.samples, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: it is the position of a run with another seed.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"position of seed {state['seed']}, but this run has {self._seed}")
        self.samples = int(state["samples"])

    def _gather(self, picked: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        windows = self._windows[picked].to(device, torch.long)
        return windows[:, :-1], windows[:, 1:]
