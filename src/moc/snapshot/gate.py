"""The fence: `optimizer.step()` waits while a snapshot still reads what it would change.

One process-wide hook, since users own their optimizers and wrappers own theirs
(ZeroRedundancyOptimizer calls an inner one). It also counts steps, so that `manager.step` can
tell a finished optimizer step from a micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["Gate"]


class Gate:
    """Calls ``wait`` before any of the optimizers steps, and counts the steps they made."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], wait: Callable[[], None]
    ) -> None:
        """Register the hooks."""
        self._ids = {id(o) for o in optimizers}
        self._wait = wait
        self.steps = 0
        before = register_optimizer_step_pre_hook(self._before)
        # Ahead of hooks that were there first: they may write what is being copied.
        hooks = cast("OrderedDict[int, object]", _global_optimizer_pre_hooks)
        hooks.move_to_end(before.id, last=False)
        self._handles = [before, register_optimizer_step_post_hook(self._after)]

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._ids:
            self._wait()

    def _after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._ids:
            self.steps += 1

    def close(self) -> None:
        """Remove the hooks; safe to repeat."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
