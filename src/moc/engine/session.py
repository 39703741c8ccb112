"""What saving and restoring share: the objects of one rank, and what the ranks agreed on."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moc import knobs
from moc.choose.policy import Policy
from moc.comm.group import Group
from moc.core.events import Event, EventKind
from moc.core.topology import Topology
from moc.core.versions import Timeline, Version
from moc.metrics import LoggingSink, fan_out
from moc.persist.endpoint import Address
from moc.state.extras import Extras
from moc.state.live import LiveState
from moc.state.routers import TokenCounter
from moc.store.base import Store

__all__ = ["Session", "Totals", "host_name"]

Totals = list[list[int]]
"""Tokens by [MoE layer][expert]."""


@dataclass(kw_only=True)
class Session:
    """One rank of one attempt.

    Attributes:
        group: the ranks.
        topology: who shares what.
        store: where steps are committed.
        memory_dir: directory of the memory tier.
        policy: the user's.
        live: the model and its optimizers.
        extras: the user's other objects.
        tokens: counts routed tokens.
        model_id: fingerprint of this model.
        nodes: node number of every rank; ranks of one number share a memory tier.
        on_event: the user's callback.
        run_id: of the run, empty before `restore`.
        run_model: fingerprint of the model that the run belongs to, as in ``run.json``.
        timeline: attempts, this one included after `restore`.
        attempt: number of this attempt, 0 before `restore`.
        resumed_step: step that this attempt resumed from.
        base: newest committed version on the timeline, None where there is none.
        base_versions: its experts' versions, [layer][expert]; empty without a base.
        base_parts: see `parts_of_all`; of what is inherited from. None before there is any.
        lost: tokens that the live state has lost, [layer][expert].
        restored: version that was restored, None for a fresh start.
        unsound: keys of data files in which the restore found bad bytes.
        routed: its token counts.
        weights_only: weights were asked for and nothing else: the run is only read.
        take_over: go on though another job is training in this run.
        node_local: every node has a disk of its own for data files.
        places: where they are, ``host:/directory`` of each rank; empty unless ``node_local``.
        holders: by data file, the nodes that have it; filled by a restore with ``node_local``.
        listener: rank 0's socket for its helper's endpoint, None where none is needed.
        endpoint: where that is.
    """

    group: Group
    topology: Topology
    store: Store
    memory_dir: Path
    policy: Policy
    live: LiveState
    extras: Extras
    tokens: TokenCounter
    model_id: str
    nodes: list[int]
    on_event: Callable[[Event], None] | None = None
    run_id: str = ""
    run_model: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    attempt: int = 0
    resumed_step: int = 0
    base: Version | None = None
    base_versions: list[list[Version]] = field(default_factory=list)
    base_parts: frozenset[tuple[str, str]] | None = None
    lost: Totals = field(default_factory=list)
    restored: Version | None = None
    unsound: list[str] = field(default_factory=list)
    routed: Totals = field(default_factory=list)
    weights_only: bool = False
    take_over: bool = False
    node_local: bool = False
    places: list[str] = field(default_factory=list)
    holders: dict[str, list[int]] = field(default_factory=dict)
    listener: socket.socket | None = None
    endpoint: Address | None = None
    _events: deque[Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """What is told goes to the log first."""
        own = LoggingSink()
        self._deliver = fan_out(own, self.on_event) if self.on_event else fan_out(own)

    @property
    def is_foreign(self) -> bool:
        """Whether the run belongs to another model: then it is read and never written."""
        return self.run_model not in ("", self.model_id)

    @property
    def is_read_only(self) -> bool:
        """Whether the run is somebody else's, who may be training: nothing of it is touched."""
        return self.weights_only or self.is_foreign

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.group.rank

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.nodes[self.rank]

    @property
    def is_lister(self) -> bool:
        """Whether this rank looks at its node's memory tier for all ranks of the node."""
        return self.nodes.index(self.node) == self.rank

    @property
    def other_listers(self) -> list[int]:
        """Listers of the nodes other than the coordinator's."""
        return sorted({self.nodes.index(node) for node in self.nodes} - {0})

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Global number of experts of each MoE layer."""
        return self.live.experts.experts

    def most_experts(self, level: int) -> int:
        """Experts per MoE layer in a snapshot (level 0) or a persist (1), of the largest layer."""
        policy = self.policy
        return max((policy.experts_per_save(n)[level] for n in self.experts_per_layer), default=0)

    def note(self, kind: EventKind, step: int, *, time: float = 0.0, **facts: Any) -> None:
        """Queue an event, from any thread; `flush` hands it to the callback.

        Args:
            kind: what happened.
            step: to which step.
            time: when, seconds since 1970; now by default.
            facts: other fields of `Event`.
        """
        self._events.append(
            Event(
                kind=kind,
                step=step,
                attempt=self.attempt,
                rank=self.rank,
                time=time or knobs.now_secs(),
                **facts,
            )
        )

    def flush(self) -> None:
        """Deliver queued events on the caller's thread, in order.

        A callback that raises costs neither training nor the error that is on its way.
        """
        while self._events:
            self._deliver(self._events.popleft())


def host_name() -> str:
    """Name of this machine."""
    return os.uname().nodename
