"""What becomes of marked saves, folded into what is chosen next."""

from __future__ import annotations

from collections.abc import Mapping

from moc.choose.pick import Choice, ChooseState

__all__ = ["settle"]


def settle(
    state: ChooseState,
    pending: Mapping[int, Choice],
    *,
    committed: int,
    abandoned: int,
    failed: int,
    marked: int,
) -> tuple[ChooseState, dict[int, Choice]]:
    """Fold the fate of marked saves into the state of choosing.

    Only the newest commit counts, as later saves build on it. A failed save changes nothing, so its
    experts stay the ones that waited longest. The newest marked save stays pending even where some
    rank failed: its commit may still be heard of.

    Args:
        state: when each expert was last saved.
        pending: choices of marked saves whose fate was not known, by step.
        committed: newest committed step, -1 for none.
        abandoned: newest step that the coordinator gave up.
        failed: newest marked step whose persist failed on some rank.
        marked: newest marked step.

    Returns:
        The state after it, and the choices that are still pending; equal on all ranks that pass
        equal arguments.
    """
    left = {}
    for step, choice in sorted(pending.items()):
        if step == committed:
            state = state.committed(step, choice.persist)
        elif step > committed and (step > max(abandoned, failed) or step == marked):
            left[step] = choice
    return state, left
