"""What a restore did, and what it cost."""

from __future__ import annotations

import msgspec

__all__ = ["SOURCES", "RestoreReport"]

SOURCES = ("memory", "memory_older", "peer", "peer_older", "storage", "storage_older")
"""Where restored bytes can come from; ``_older``: an expert's version older than the step."""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `CheckpointManager.restore`, equal on all ranks.

    Attributes:
        step: training goes on after this step; a logger that has later ones rewinds to it.
        attempt: number of the attempt that starts now; 0 where none does (``weights_only``).
        restored_attempt: attempt that had made the step.
        sources: restored bytes by source, summed over ranks; see `SOURCES`.
        by_class: the same for ``dense`` and ``experts`` apart.
        oldest_expert_age: steps between the step and the oldest expert version restored.
        stale_experts: number of (layer, expert) pairs restored from an older version.
        lost_tokens: routed tokens that this fault cost, over all layers and experts.
        plt: Proportion of Lost Tokens so far, paper eq. (7), a share (0.0375 is 3.75 %).
        plt_unique: the share of tokens that the restored state lacks, each counted once.
        plt_is_estimate: the planned token count was extrapolated, not given.
        uncounted: MoE layers whose router was not found, so that no tokens were counted there.
        secs: seconds per phase: ``inventory``, ``load``, ``total``.
        slowest_rank: the rank whose load took longest, the lowest of equals.
        slowest_secs: what it took.
        optimizer_entries: optimizer states restored, summed over ranks.
        missing: names the model wants and the checkpoint lacks (``strict=False`` only).
        unexpected: names the checkpoint has and the model lacks (``strict=False`` only).
        reasons: one line for every step passed over, and why.
        weights_only: only parameters and buffers were restored.
    """

    step: int
    attempt: int
    restored_attempt: int
    sources: dict[str, int]
    by_class: dict[str, dict[str, int]]
    oldest_expert_age: int
    stale_experts: int
    lost_tokens: int
    plt: float
    plt_unique: float
    plt_is_estimate: bool
    secs: dict[str, float]
    slowest_rank: int = -1
    slowest_secs: float = 0.0
    uncounted: list[str] = []
    optimizer_entries: int = 0
    missing: list[str] = []
    unexpected: list[str] = []
    reasons: list[str] = []
    weights_only: bool = False

    def __str__(self) -> str:
        total = sum(self.sources.values())
        parts = ", ".join(
            f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in self.sources.items() if nbytes
        )
        what = "the weights of step" if self.weights_only else "step"
        lines = [
            f"restored {what} {self.step} ({total / 1e6:.1f} MB: {parts}) "
            f"in {self.secs.get('total', 0.0):.2f} s; "
            + (f"{self.optimizer_entries} optimizer entries; " * (not self.weights_only))
            + f"{self.stale_experts} experts older, the oldest by {self.oldest_expert_age} steps; "
            + (
                f"{self.lost_tokens} tokens lost, PLT {100 * self.plt:.3f} %"
                if not self.uncounted
                else f"lost tokens are not known: no router was found in {self.uncounted[0]}"
            )
        ]
        if not self.weights_only:
            lines.append(f"steps after {self.step} are made again: rewind loggers to it")
        return "\n".join([*lines, *self.reasons])
