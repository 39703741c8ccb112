"""Optimizer groups: hyper-parameters, matched by the names of the parameters they govern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moc.errors import MismatchError
from moc.state.live import LiveState

__all__ = ["capture_groups", "group_orders", "match_groups", "restore_groups"]

_SHOWN = 8


def capture_groups(live: LiveState) -> list[dict[str, Any]]:
    """Options of every group of every optimizer, with its parameters' local names."""
    captured = []
    for optimizer in live.optimizers:
        groups = []
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"params": live.names_of(group["params"]), "options": options})
        captured.append({"type": type(optimizer).__name__, "groups": groups})
    return captured


def match_groups(live: LiveState, captured: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Live groups, each with the options of the one that governed the same parameters.

    Raises:
        MismatchError: optimizers or groups differ from those that were saved.
    """
    if len(captured) != len(live.optimizers):
        raise MismatchError(
            f"the checkpoint has {len(captured)} optimizers, the manager {len(live.optimizers)}"
        )
    plan: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for saved, optimizer, inner in zip(captured, live.optimizers, live.inner, strict=True):
        if saved["type"] != type(optimizer).__name__:
            raise MismatchError(
                f"the checkpoint was made with {saved['type']}, not {type(optimizer).__name__}; "
                "give the same optimizers in the same order"
            )
        by_params: dict[frozenset[str], list[dict[str, Any]]] = {}
        for group in saved["groups"]:
            by_params.setdefault(frozenset(group["params"]), []).append(group["options"])
        for index, group in enumerate(optimizer.param_groups):
            names = live.names_of(group["params"])
            alike = by_params.get(frozenset(names))
            if not alike:
                others = [_shown(g["params"]) for g in saved["groups"]]
                raise MismatchError(
                    f"group {index} of {type(optimizer).__name__} ({_shown(names)}) has no "
                    f"counterpart among the groups of the checkpoint: {'; '.join(others)}"
                )
            options = alike.pop(0)  # groups without parameters are told apart by their order
            plan.append((group, options))
            if inner is not optimizer and index < len(inner.param_groups):
                plan.append((inner.param_groups[index], options))
    return plan


def group_orders(live: LiveState, captured: Any) -> dict[int, list[int]]:
    """For the id of each optimizer, the saved index of each of its groups.

    Schedulers keep lists in the order of the groups; see `moc.state.extras.Extras.restore`.
    """
    orders = {}
    for saved, optimizer in zip(captured, live.optimizers, strict=True):
        index: dict[frozenset[str], list[int]] = {}
        for number, group in enumerate(saved["groups"]):
            index.setdefault(frozenset(group["params"]), []).append(number)
        orders[id(optimizer)] = [
            index[frozenset(live.names_of(group["params"]))].pop(0)
            for group in optimizer.param_groups
        ]
    return orders


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} parameters: {', '.join(names[:_SHOWN])}{more}"


def restore_groups(live: LiveState, captured: Any) -> None:
    """Set the options of groups, whatever their order.

    Raises:
        MismatchError: see `match_groups`; nothing was changed.
    """
    filled: dict[int, Tensor] = {}
    for group, options in match_groups(live, captured):
        for key, value in options.items():
            now = group.get(key)
            if isinstance(now, Tensor) and _fits(now, value):
                other = filled.get(id(now))
                if other is not None and not torch.equal(other, torch.as_tensor(value)):
                    now = group[key] = now.clone()  # one tensor of several groups has parted
                filled[id(now)] = torch.as_tensor(value)
                with torch.no_grad():  # keep the object: compiled steps and schedulers hold it
                    now.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _fits(now: Tensor, value: object) -> bool:
    """Whether the value can be copied into the live tensor without loss."""
    if isinstance(value, Tensor):
        return value.shape == now.shape and value.dtype == now.dtype
    exact = isinstance(value, int) or (isinstance(value, float) and now.is_floating_point())
    return exact and now.dim() == 0
