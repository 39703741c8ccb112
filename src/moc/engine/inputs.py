"""What users give, looked at before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from moc.choose.policy import Policy
from moc.comm.group import gather_values
from moc.comm.layout import Layout
from moc.engine.session import Session
from moc.errors import ConfigError
from moc.store import LocalStore, RetryingStore, Store, open_store

__all__ = [
    "check_kinds",
    "check_model",
    "check_room",
    "check_step",
    "check_writable",
    "optimizers_of",
    "store_of",
]

_MIN_BUFFERS = 3
_LARGEST_STEP = 99_999_999  # its folder has eight digits


def check_kinds(
    *,
    policy: object,
    layout: object,
    memory_bytes: object,
    on_event: object,
    flags: dict[str, object],
) -> None:
    """Arguments that need no look at the model.

    Raises:
        ConfigError: one is of another kind than it must be.
    """
    if not isinstance(policy, Policy | None):
        raise ConfigError(f"policy={policy!r}: give a moc.Policy(...), or None for the default")
    if not isinstance(layout, Layout | None):
        raise ConfigError(
            f"layout={layout!r}: give moc.Layout.from_groups(...), or None where all ranks are "
            "data-parallel replicas"
        )
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes <= 0):
        raise ConfigError(
            f"memory_bytes={memory_bytes!r}: give a positive integer, or None for a share of what "
            "is free"
        )
    if on_event is not None and not callable(on_event):
        raise ConfigError(f"on_event={on_event!r}: give a function of one moc.Event, or None")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: give True or False")


def store_of(directory: object) -> Store:
    """The store of a run directory, which may be one already.

    Raises:
        ConfigError: it is no path, URL or store, or a place where no run can be.
    """
    if isinstance(directory, str | os.PathLike):
        # A read that fails once must not cost a step; the helper has tries of its own.
        store: Store = RetryingStore(open_store(directory))
    elif all(hasattr(directory, name) for name in ("url", "get", "put_new", "children")):
        store = cast(Store, directory)
    else:
        raise ConfigError(
            f"directory={directory!r}: give a path, a URL such as s3://bucket/run, or a store"
        )
    _check_folder(store, write=False)
    return store


def optimizers_of(optimizer: object) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list.

    Raises:
        ConfigError: something among them is no optimizer of torch.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    several = []
    for one in optimizer if isinstance(optimizer, Iterable) else [optimizer]:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={_short(one)} is no torch.optim.Optimizer; give one, or a list of "
                "them, and leave it out where there is none"
            )
        several.append(one)
    return several


def check_model(model: object) -> None:
    """Raise a ConfigError unless it is a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model={_short(model)} is no torch.nn.Module; of several, give a torch.nn.ModuleDict"
        )


def check_step(verb: str, step: object, *, reached: int = 0, since: str = "") -> None:
    """A step that a user names.

    Args:
        verb: who asks, for the message.
        step: what was given.
        reached: what it may not be below.
        since: how that was reached.

    Raises:
        ConfigError: it is no step, or a step back.
    """
    if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
        raise ConfigError(
            f"{verb}({step!r}): a step is an integer from 0 to {_LARGEST_STEP}, the number of "
            "optimizer steps made; use int(step) where it comes from a tensor or an array"
        )
    if step < reached:
        raise ConfigError(
            f"{verb}({step}) after {since} {reached}: steps only grow; to go back, make a new "
            "manager and restore(step)"
        )


def check_writable(store: Store) -> None:
    """Raise a ConfigError where this user may not write the run directory."""
    _check_folder(store, write=True)


def check_room(session: Session, memory_bytes: int | None) -> None:
    """Whether ``memory_bytes`` can hold three buffers of the parameters alone. Collective.

    Optimizer state comes with the first step only, so the first save may still find too little.
    What is certain now is said now, rather than after the first interval.

    Raises:
        ConfigError: it cannot, on every rank.
    """
    # Who writes how much is planned later; what is too little for all is too little for one.
    mine = (memory_bytes, _share_bytes(session))
    told = gather_values(session.group, mine, tuple[int | None, int])
    given = [nbytes for nbytes, _ in told if nbytes is not None]
    needed = _MIN_BUFFERS * sum(share for _, share in told)
    if len(given) == len(told) and sum(given) < needed:
        raise ConfigError(
            f"memory_bytes: {sum(given)} bytes on all ranks together, in {session.memory_dir}, "
            f"cannot hold {_MIN_BUFFERS} buffers of the parameters alone, {needed} bytes; raise "
            "memory_bytes=, or lower k_snapshot"
        )


def _share_bytes(session: Session) -> int:
    """This rank's even share of the parameters that a snapshot holds."""
    topology, live, share = session.topology, session.live, 0.0
    frozen = set(live.frozen)
    for name, param in live.params.items():
        entry = live.experts.entries.get(name)
        if live.experts.global_fqn(name) in frozen:
            continue
        nbytes = param.numel() * param.element_size()
        if entry is None:
            share += nbytes / len(topology.dp)
        else:
            experts = live.experts.experts[entry.layer]
            chosen = session.policy.experts_per_save(experts)[0]
            share += nbytes / len(topology.edp) * chosen / experts
    return int(share)


def _check_folder(store: Store, *, write: bool) -> None:
    while isinstance(store, RetryingStore):
        store = store.inner
    if isinstance(store, LocalStore):
        store.check(write=write)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"<{type(value).__name__}>"
