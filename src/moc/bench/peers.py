"""What else a trainer could use: blocking `torch.save`, and torch's distributed checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

__all__ = ["DcpAsync", "dcp_save", "torch_save"]


def torch_save(state: Mapping[str, object], path: Path) -> None:
    """`torch.save` and fsync."""
    with open(path, "xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(state: Mapping[str, object], folder: Path) -> None:
    """`torch.distributed.checkpoint.save`, which syncs its files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process is known
        save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=True)


class DcpAsync:
    """`torch.distributed.checkpoint.async_save` in a thread, staged into memory that it keeps."""

    def __init__(self) -> None:
        """Nothing is staged yet.

        Raises:
            ImportError: this torch has no stager that keeps its memory.
        """
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, state: Mapping[str, object], folder: Path) -> tuple[float, float]:
        """Save; the seconds until it returns, and until the files are durable."""
        start = perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved: Any = async_save(
                dict(state),
                storage_writer=FileSystemWriter(folder),
                async_stager=self._stager,
                no_dist=True,
            )
            blocked = perf_counter() - start
            (saved if hasattr(saved, "result") else saved.upload_completion).result()
        return blocked, perf_counter() - start

    def close(self) -> None:
        """Give the memory back."""
        self._stager.close()
