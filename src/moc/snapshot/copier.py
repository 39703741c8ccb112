"""Copies from live tensors into a buffer, and the check that none of them was torn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["CopyJob", "run_copies"]

K = TypeVar("K", bound=Hashable)


class CopyJob(Generic[K]):
    """Copies that run while the next forward and backward do."""

    def __init__(self, sources: Mapping[K, Tensor]) -> None:
        """Note the versions of live tensors, by key, and where the training stream stands."""
        self._sources = dict(sources)
        self._versions = {name: tensor._version for name, tensor in sources.items()}
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in sources.values()):
            self._event = torch.cuda.Event()
            self._event.record()

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> K | None:
        """Copy (destination, source) pairs; returns the key of a torn source, or None.

        An in-place change by anything but ``.data`` and a few native kernels bumps a tensor's
        version, so the check backs the capture classes up; it cannot replace them. What is
        written through ``.data`` is found by a comparison of bytes: see `Snapshots.prove`.
        """
        if self._event is None:
            run_copies(pairs)
        else:
            stream = torch.cuda.Stream()
            stream.wait_event(self._event)
            with torch.cuda.stream(stream):
                run_copies(pairs, non_blocking=True)
            stream.synchronize()
        for name, tensor in self._sources.items():
            if tensor._version != self._versions[name]:
                return name
        return None


def run_copies(pairs: Sequence[tuple[Tensor, Tensor]], *, non_blocking: bool = False) -> None:
    """Copy every source into its destination.

    One call of `_foreach_copy_` per pair of dtypes: 1.5 us a tensor instead of 3.7 us, and the
    interpreter lock is free meanwhile, which the training thread needs.
    """
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for destination, source in pairs:
        if source.numel():
            targets, sources = groups.setdefault((source.dtype, source.device), ([], []))
            targets.append(destination)
            sources.append(source)
    with torch.no_grad():
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
