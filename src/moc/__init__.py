"""Fault tolerance for large-model training in PyTorch, at a cost that training does not notice.

The names below are all there is to know. Each is looked up on first use, so that ``import moc``
is instant and does not import torch: the command line and the helper process depend on it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moc.choose.policy import Policy
    from moc.comm.layout import Layout
    from moc.comm.torch_group import init_process_group
    from moc.core.events import Event
    from moc.engine.report import RestoreReport
    from moc.errors import MocError, Preempted
    from moc.manager import CheckpointManager
    from moc.state.experts import ExpertRule

__all__ = [
    "CheckpointManager",
    "Event",
    "ExpertRule",
    "Layout",
    "MocError",
    "Policy",
    "Preempted",
    "RestoreReport",
    "__version__",
    "init_process_group",
]

__version__ = "0.1.0"

_HOME = {
    "CheckpointManager": "moc.manager",
    "Event": "moc.core.events",
    "ExpertRule": "moc.state.experts",
    "Layout": "moc.comm.layout",
    "MocError": "moc.errors",
    "Policy": "moc.choose.policy",
    "Preempted": "moc.errors",
    "RestoreReport": "moc.engine.report",
    "init_process_group": "moc.comm.torch_group",
}

if not TYPE_CHECKING:  # a type checker that saw this would take any misspelt name

    def __getattr__(name: str) -> object:
        """Import the module of a public name, once (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module 'moc' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
