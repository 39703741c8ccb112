"""What a save costs without MoC: every rank waits for ``torch.save`` and ``fsync``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["blocking_save"]


def blocking_save(optimizers: Sequence[torch.optim.Optimizer], path: Path) -> tuple[float, int]:
    """Save this rank's share of the training state, wait for all ranks, remove the file.

    The share is what this rank's optimizers own: each parameter of the model with its moments, on
    exactly one rank.

    Returns:
        Seconds that training stood still, and bytes of this rank.
    """
    tensors = [
        {"weight": parameter.detach(), **values}
        for optimizer in optimizers
        for parameter, values in getattr(optimizer, "optim", optimizer).state.items()
    ]
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    if dist.is_initialized():
        dist.barrier()
    secs = time.perf_counter() - start
    nbytes = path.stat().st_size
    path.unlink()
    return secs, nbytes
