"""Tokens that experts must forget, and their share of the run: PLT, eq. (7) of the MoC paper.

Counts are cumulative routed tokens, [MoE layer][expert]; a token that is routed to k experts
counts k times. A restored expert of an older version has lost what was routed to it since then.
What it has lost stays attached to the state (``lost_after``), so that restoring the same version
twice does not count it twice; eq. (7) sums over faults instead (``lost_in_fault``, ``plt``) and
does. Both are reported.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "lost_after",
    "lost_in_fault",
    "planned_routed",
    "plt",
    "plt_closed_form",
    "plt_closed_form_two_level",
    "plt_unique",
]

Counts = Sequence[Sequence[int]]


def lost_in_fault(version_routed: Counts, routed_now: Counts) -> list[list[int]]:
    """L_ij of eq. (7) for one fault, by expert.

    Args:
        version_routed: routed tokens at the version of each expert that is restored.
        routed_now: routed tokens at the step that training resumes from.

    Returns:
        Tokens lost, [MoE layer][expert].

    Raises:
        ValueError: the shapes differ, or a version is newer than the resumed step.
    """
    lost = [
        [now - then for then, now in zip(thens, nows, strict=True)]
        for thens, nows in zip(version_routed, routed_now, strict=True)
    ]
    if any(tokens < 0 for row in lost for tokens in row):
        raise ValueError("an expert's version has more routed tokens than the step resumed from")
    return lost


def lost_after(version_lost: Counts, version_routed: Counts, routed_now: Counts) -> list[list[int]]:
    """Tokens that the state has lost for good after a restore: lost(v) + routed(S) - routed(v).

    Args:
        version_lost: tokens that the version of each expert had lost already.
        version_routed: routed tokens at that version.
        routed_now: routed tokens at the step S that training resumes from.

    Returns:
        Tokens lost, [MoE layer][expert]; equal however often the same versions are restored.

    Raises:
        ValueError: the shapes differ, or a version is newer than the resumed step.
    """
    return [
        [before + more for before, more in zip(befores, mores, strict=True)]
        for befores, mores in zip(
            version_lost, lost_in_fault(version_routed, routed_now), strict=True
        )
    ]


def plt(lost_by_fault: Sequence[Counts], planned: Sequence[float]) -> float:
    """Proportion of lost tokens, eq. (7): 1/N_moe * sum_i [sum_j L_ij] / (T_i * TopK_i).

    Args:
        lost_by_fault: L_ij by fault j, each [MoE layer i][expert].
        planned: T_i * TopK_i, the routed tokens of the *whole* run, by MoE layer.

    Returns:
        A fraction, 0 to about 1; 0 for a model without MoE layers.

    Raises:
        ValueError: a fault has another number of layers, or a layer lost tokens of none planned.
    """
    totals = [0] * len(planned)
    for fault in lost_by_fault:
        if len(fault) != len(planned):
            raise ValueError(f"a fault of {len(fault)} MoE layers, planned are {len(planned)}")
        for layer, row in enumerate(fault):
            totals[layer] += sum(row)
    if any(lost and planned[layer] <= 0 for layer, lost in enumerate(totals)):
        raise ValueError(f"tokens {totals} were lost of planned {list(planned)}")
    shares = [lost / of if lost else 0.0 for lost, of in zip(totals, planned, strict=True)]
    return sum(shares) / len(shares) if shares else 0.0


def plt_unique(lost_state: Counts, planned: Sequence[float]) -> float:
    """Proportion of tokens that the state has lost, each counted once.

    Args:
        lost_state: result of `lost_after`, [MoE layer][expert].
        planned: routed tokens of the whole run, by MoE layer.
    """
    return plt([lost_state], planned)


def planned_routed(
    routed: Counts,
    step: int,
    total_steps: int | None,
    total_tokens: int | None = None,
    tokens_so_far: int | None = None,
) -> list[float]:
    """Estimate T_i * TopK_i: routed tokens so far, scaled up to the whole run.

    Scaled by tokens where both token counts are known, else by steps, else not at all. A run that
    is longer than planned is never scaled down.

    Args:
        routed: cumulative routed tokens, [MoE layer][expert].
        step: steps so far.
        total_steps: planned steps.
        total_tokens: planned training tokens.
        tokens_so_far: training tokens up to ``step``.

    Returns:
        Planned routed tokens of each MoE layer; 0 where nothing was routed yet.
    """
    scale = 1.0
    if total_tokens is not None and tokens_so_far:
        scale = max(1.0, total_tokens / tokens_so_far)
    elif total_steps is not None and step > 0:
        scale = max(1.0, total_steps / step)
    return [sum(row) * scale for row in routed]


def plt_closed_form(n: int, k: int, interval: float, faults: float, total_steps: float) -> float:
    """PLT of a rotation under even routing: faults * interval * (N/K - 1) / (2 * total).

    The experts' ages at a checkpoint are 0, I, 2I, ..., (N/K - 1)I: I(N/K - 1)/2 in the mean.

    Args:
        n: experts per MoE layer.
        k: experts per checkpoint.
        interval: steps between checkpoints, I_ckpt.
        faults: number of faults.
        total_steps: steps of the run.
    """
    return plt_closed_form_two_level(n, k, k, interval, faults, total_steps, 1.0)


def plt_closed_form_two_level(
    n: int,
    k_snapshot: int,
    k_persist: int,
    interval: float,
    faults: float,
    total_steps: float,
    lost_fraction: float,
) -> float:
    """PLT of two-level recovery: ranks that keep their memory restore from the last snapshots.

    `plt_closed_form` with N/K - 1 replaced by f(N/K_persist - 1) + (1 - f)(N/K_snapshot - 1). It
    takes as many snapshots in memory as hold every expert, N / K_snapshot, all of them persisted.

    Args:
        n: experts per MoE layer.
        k_snapshot: experts per snapshot.
        k_persist: experts per persist.
        interval: steps between checkpoints.
        faults: number of faults.
        total_steps: steps of the run.
        lost_fraction: fraction f of ranks whose memory a fault takes.
    """
    windows = lost_fraction * (n / k_persist - 1) + (1 - lost_fraction) * (n / k_snapshot - 1)
    return faults * interval * windows / (2 * total_steps)
