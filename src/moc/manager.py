"""`CheckpointManager`: the one object a user holds."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moc import knobs
from moc.choose.policy import Policy
from moc.comm.group import Group, SingleGroup, agree, gather_values
from moc.comm.layout import Layout
from moc.comm.torch_group import default_group
from moc.core.digest import digest_plan
from moc.core.events import Event
from moc.core.faults import FaultScript
from moc.engine.inputs import (
    check_kinds,
    check_model,
    check_room,
    check_step,
    check_writable,
    optimizers_of,
    store_of,
)
from moc.engine.load import Wanted
from moc.engine.nodes import check_setting, is_folder, place_of
from moc.engine.preempt import Watch, check_signals, process_place
from moc.engine.report import RestoreReport
from moc.engine.restore import restore, start_fresh
from moc.engine.save import Saver
from moc.engine.session import Session
from moc.errors import ConfigError, KeyMissing, LayoutError, MocError, Preempted, RestoreError
from moc.persist.commit import load_manifest, load_timeline, versions_in
from moc.snapshot.buffers import DEFAULT_MEMORY_DIR, node_key
from moc.state.describe import describe
from moc.state.experts import ExpertMap, ExpertRule, build_expert_map
from moc.state.extras import Extras
from moc.state.live import LiveState, unwrap
from moc.state.masters import Masters
from moc.state.modules import ModuleStates
from moc.state.routers import TokenCounter
from moc.store.base import Store

__all__ = ["CheckpointManager"]

_READ_ONLY = (
    "only weights were restored, so this manager writes nothing; save to another directory, with a "
    "manager of its own"
)


class CheckpointManager:
    """Saves and restores one training job.

    Every method is collective: all ranks call it, in the same order, on their main thread. The
    constructor looks and gathers; it writes nothing. As a context manager it drains on a clean
    exit only: on an exception nothing waits for other ranks, and the first error stays the one
    that is seen.

    Args:
        directory: run directory, ``file://`` or fsspec URL, or a `Store`.
        model: the module; DistributedDataParallel and torch.compile are seen through.
        optimizer: one optimizer or several, in an order that stays the same.
        extras: by name, anything with ``state_dict()`` and ``load_state_dict()``, or lists of
            such: scheduler, loader, scaler. RNG of torch, Python and NumPy comes by itself.
        layout: which ranks share what; by default all ranks are data-parallel replicas.
        policy: when to save, how much, what to keep.
        memory_dir: directory of the memory tier; ``MOC_MEMORY_DIR``, else ``/dev/shm``.
        memory_bytes: what this rank may use there; a half of what is free, shared by the ranks of
            a node, by default.
        experts: ``"auto"`` (known layouts), `ExpertRule` list, or None for a dense model.
        router: where routers are, for counting tokens; see `moc.state.routers`.
        masters: the master copies that a mixed-precision wrapper keeps and ``optimizer`` steps in
            the place of 16-bit parameters: ``{parameter or its name: tensor}``, or pairs. Each is
            saved beside its parameter, restored in place, and becomes the weight where only
            weights are restored. See ``docs/masters.md``.
        exclude_frozen: leave out parameters that do not require gradients when the manager is made
            (alike on all ranks). A restore then needs their values to be there already, and
            leaves them alone; a manager without it refuses such a checkpoint and names them.
        preempt_signals: such as ``(signal.SIGTERM, signal.SIGUSR1)``, alike on all ranks: when one
            comes to any rank, all save after the same step, within the policy's
            ``preempt_grace_secs``, and `step` raises `moc.Preempted`. Others who listen for these
            signals get them back at `close`. See ``docs/when.md``.
        fresh: start over at step 0; what the run already holds is off the history from then on,
            and retention removes it after the first commit, multiples of ``keep_every`` excepted.
        node_local: ``directory`` is on a disk of each node's own: data files stay on the node that
            wrote them, and come over the network where a rank has moved. Nodes without a shared
            file system need it; alike on all ranks. See ``docs/storage.md``.
        take_over: go on though another job is training in this run on one of these nodes, which
            is refused otherwise (`RunBusy`). Its helpers are ended, and its saves fail from the
            moment this manager starts an attempt.
        on_event: called with every `Event` of this rank, on the main thread; `moc.metrics` has
            ready ones. What it raises is logged once and costs nothing else.

    Raises:
        ConfigError: a bad argument, on every rank; nothing was touched.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Store,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        extras: Mapping[str, object] | None = None,
        layout: Layout | None = None,
        policy: Policy | None = None,
        memory_dir: str | os.PathLike[str] | None = None,
        memory_bytes: int | None = None,
        experts: str | Sequence[ExpertRule] | None = "auto",
        router: Mapping[str, str] | str | None = None,
        masters: Masters | None = None,
        exclude_frozen: bool = False,
        preempt_signals: Sequence[int] = (),
        fresh: bool = False,
        node_local: bool = False,
        take_over: bool = False,
        on_event: Callable[[Event], None] | None = None,
        faults: FaultScript | None = None,
    ) -> None:
        check_kinds(
            policy=policy,
            layout=layout,
            memory_bytes=memory_bytes,
            on_event=on_event,
            flags={
                "exclude_frozen": exclude_frozen,
                "fresh": fresh,
                "take_over": take_over,
                "node_local": node_local,
            },
        )
        self._policy = policy or Policy()
        self._memory_bytes = memory_bytes
        self._reached, self._since = 0, ""
        self._fresh = fresh
        self._started = False
        self._closed = False
        self._poisoned = ""
        self._read_only = False
        self._pid = os.getpid()
        self._preempted = False
        self._watch: Watch | None = None
        topology = (layout or Layout.of_job()).topology
        group: Group = (
            SingleGroup() if topology.world_size == 1 else default_group(self._policy.timeout_secs)
        )
        if group.world_size != topology.world_size:
            raise LayoutError(
                f"layout of {topology.world_size} ranks in a job of {group.world_size}; give "
                "layout=moc.Layout.from_groups(...)"
            )
        # The helper looks from another folder.
        memory = Path(memory_dir or knobs.memory_dir() or DEFAULT_MEMORY_DIR).absolute()

        def look() -> tuple[Store, LiveState, Extras, str, tuple[int, ...]]:
            store = store_of(directory)
            check_model(model)
            optimizers = optimizers_of(optimizer)
            plain = LiveState(model, optimizers, masters=masters)
            found = build_expert_map(plain.shapes, experts, topology.ep_rank, topology.ep_size)
            return (
                store,
                LiveState(
                    model,
                    optimizers,
                    found,
                    masters=plain.masters,
                    exclude_frozen=exclude_frozen,
                    rank=group.rank,
                ),
                Extras(_with_module_states({} if extras is None else extras, model)),
                node_key(memory),
                check_signals(preempt_signals),
            )

        store, live, captured, key, signals = agree(group, look)
        setting = (key, place_of(store), node_local)
        told = gather_values(
            group,
            (setting, dict(zip(live.experts.layers, live.experts.experts, strict=True))),
            tuple[tuple[str, str, bool], dict[str, int]],
        )
        settings = [theirs for theirs, _ in told]
        agree(group, lambda: check_setting(settings, folder=is_folder(store)))
        live.experts = live.experts.among(_merge([layers for _, layers in told]))
        self._check_k(live.experts)
        keys = [key for key, *_ in settings]
        prints = gather_values(group, live.fingerprint(), int)
        tokens = agree(
            group,
            lambda: TokenCounter(unwrap(model), live.experts.layers, live.experts.experts, router),
        )
        live.routers = tokens.routers
        self._session = Session(
            group=group,
            topology=topology,
            store=store,
            memory_dir=memory,
            policy=self._policy,
            live=live,
            extras=captured,
            tokens=tokens,
            model_id=f"{digest_plan(sorted(set(prints))):016x}",
            nodes=[keys.index(key) for key in keys],
            take_over=take_over,
            node_local=node_local,
            places=[place for _, place, _ in settings] if node_local else [],
            on_event=on_event,
        )
        self._watch = _watch_for(signals, group, self._policy)
        self._saver = Saver(self._session, memory_bytes, faults, self._watch)
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ verbs

    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
        cast: bool = False,
    ) -> RestoreReport | None:
        """Restore the newest whole step, or exactly ``step``. Call it before training, once.

        Args:
            step: a step to go back to; there is no falling back from it.
            strict: whether names must be the same in checkpoint and model. Without it, what is on
                one side only is left alone and reported; a run of another model is only read
                then, and saving into it is refused.
            weights_only: restore parameters and buffers, to fine-tune or evaluate; optimizer, RNG
                and extras are neither read nor touched. Only committed steps are looked at, and
                nothing of the run is written, so that a job may be training in it meanwhile. The
                manager is read-only from then on: call this again for a newer step, and save to
                another directory with a manager of its own.
            cast: convert values where checkpoint and model differ in dtype, with a warning that
                counts them; optimizer state of a parameter's old dtype goes with it. Shapes must
                agree, and complex never becomes real, nor float an int. The next save is full.

        Returns:
            What was restored and what it cost; None only where there is nothing yet.

        Raises:
            NothingValid: something is there, but nothing whole.
            StepNotFound: the step asked for does not exist, or is not whole.
            MismatchError: the checkpoint does not fit the model; nothing was changed.
            RunBusy: another job owns the directory, or another model does and nothing is there to
                restore.
            Preempted: one of ``preempt_signals`` came to some rank meanwhile.
        """
        self._check_restore(step, weights_only)
        if not weights_only:
            self._look_ahead()
        self._read_only = weights_only
        if self._fresh:
            start_fresh(self._session, force=True)
            report = None
        else:
            try:
                report = restore(
                    self._session,
                    step,
                    Wanted(strict=strict, weights_only=weights_only, cast=cast),
                )
            except RestoreError as error:
                if "undefined" in str(error):
                    self._poisoned = str(error)
                raise
        if weights_only:
            self._stop_watching()
            if report is not None:
                self._note_restored(report)
            self._session.flush()
            return report
        if self._session.is_foreign:
            self._poisoned = (
                f"{self._session.store.url} belongs to another model: it was read, and is not "
                "written; save to another directory, with a manager of its own"
            )
            self._stop_watching()
            self._session.flush()
            return report
        self._begin()
        if report is not None:
            self._reached, self._since = report.step, "the restore of step"
            self._note_restored(report)
            self._make_durable(report)
        self._session.flush()
        try:
            self._saver.stop_if_asked(report.step if report is not None else 0)
        except Preempted:
            self._preempted = True
            raise
        return report

    def register(
        self, name: str, tensor: torch.Tensor, *, stable: bool = False, scope: str = "replicated"
    ) -> None:
        """Save a tensor that lives outside the model too: an EMA copy, a counter.

        Call it before `restore` and the first save; not collective. The tensor must stay the same
        object, and is filled in place.

        Args:
            name: under which it is saved; no parameter or buffer has it.
            tensor: of any dtype and strides.
            stable: nothing writes it between `step` and the next optimizer step, so that its copy
                may overlap with training.
            scope: ``"replicated"`` (all ranks hold the same), ``"per_rank"`` (each its own; a rank
                beyond the old world takes an old one's), or ``"sum"`` (each holds a part of a
                total; the total comes back on rank 0, zeros elsewhere).

        Raises:
            ConfigError: too late, a name that is taken, or nothing that can be saved so.
        """
        self._check_open()
        if self._started or self._read_only:
            raise ConfigError(f"register({name!r}) comes before restore() and the first save")
        self._session.live.register(
            name, tensor, stable=stable, scope=scope, rank=self._session.rank
        )

    def describe(self) -> str:
        """What was recognised on this rank, as a table to print; not collective.

        Which parameters are routed experts of which layer, what of them is dense all the same, and
        what is left out. Optimizer state is judged once a step has made it.
        """
        return describe(self._session.live)

    def step(self, step: int) -> None:
        """Call last in every iteration, with the number of the optimizer step just made.

        Saves when the policy says so, and returns as soon as small state is copied; parameters
        and optimizer state are copied while the next forward and backward run. Does nothing
        where no optimizer has stepped since the last call (gradient accumulation).

        Raises:
            RanksDisagree: ranks call it with different steps.
            SaveError: an earlier save failed and the policy says ``on_error="raise"``; the same on
                all ranks, at the next save after some rank knows.
            RestoreError: only weights were restored, or the run has steps and none was.
            ConfigError: no step can have this number, or it lies before one that was told.
            Preempted: one of ``preempt_signals`` came to some rank; this step is saved, or its
                ``saved`` says that it could not be.
        """
        self._check_next("step", step)
        if not self._started:
            self._start()
        self._check_open()
        self._reached, self._since = step, "step"
        try:
            self._saver.step(step)
        except Preempted:
            self._preempted = True
            raise

    def save(self, step: int, *, full: bool = False) -> None:
        """Save now and persist, whatever the policy's intervals say.

        Args:
            step: number of the last optimizer step.
            full: hold every expert, and write everything anew, unchanged or not.
        """
        self._check_next("save", step)
        if not self._started:
            self._start()
        self._check_open()
        self._reached, self._since = step, "step"
        self._saver.save(step, full=full, forced=self._policy.persist_every is not None)

    def wait(self) -> None:
        """Return when the newest save that is to be persisted is committed.

        Raises:
            SaveError: it failed; names step, ranks and cause.
            DeadlineError: nobody said so within the policy's timeout.
        """
        self._check_open()
        self._saver.wait()

    def latest_step(self) -> int | None:
        """Newest committed step on the live history; not collective."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Committed steps on the live history, ascending; not collective."""
        store = self._session.store
        timeline = load_timeline(store)
        steps = []
        for version in versions_in(store, timeline):
            if timeline.is_live(version):
                try:
                    steps.append(load_manifest(store, version).version.step)
                except (KeyMissing, MocError):
                    continue
        return sorted(set(steps))

    def gate(self) -> None:
        """Wait until no copy reads live state: for optimizers that are no torch Optimizer."""
        self._saver.fence()

    def stats(self) -> dict[str, Any]:
        """Counters and times of this rank since it started; see ``docs``."""
        return self._saver.stats()

    def close(self) -> None:
        """Wait until what is in flight is committed, and end. Safe to repeat.

        Raises:
            SaveError: the last save failed.
        """
        self._close(drain=True)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(drain=error is None)

    # ------------------------------------------------------------------ inside

    def _start(self) -> None:
        """The first save without `restore`: only where there is nothing to lose."""
        self._check_open()
        if self._read_only:
            raise RestoreError(_READ_ONLY)
        self._look_ahead()
        start_fresh(self._session, force=self._fresh)
        self._begin()

    def _note_restored(self, report: RestoreReport) -> None:
        self._session.note(
            "restored",
            report.step,
            secs=report.secs["total"],
            nbytes=sum(report.sources.values()),
            slowest_rank=report.slowest_rank,
            slowest_secs=report.slowest_secs,
            oldest_expert_age=report.oldest_expert_age,
            sources=report.sources,
            text=str(report),
        )

    def _make_durable(self, report: RestoreReport) -> None:
        """What was restored from memory exists nowhere else yet: persist it first."""
        session = self._session
        if session.restored != session.base and self._policy.persist_every is not None:
            self._saver.save(report.step, forced=True)

    def _begin(self) -> None:
        self._saver.begin()
        self._started = True

    def _close(self, *, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._saver.close(drain=drain and self._started)
        finally:
            self._stop_watching()
            self._session.tokens.close()
            self._session.group.close()

    def _at_exit(self) -> None:
        """A script that ends without `close` still keeps its last save, or fails."""
        global _exit_code
        if os.getpid() != self._pid:
            return  # a forked child: the helper is its parent's
        died = getattr(sys, "last_value", None) is not None  # of an error nobody caught
        try:
            self._close(drain=not died and not self._preempted)
        except Exception:  # noqa: BLE001 - printed, and the exit code tells
            _exit_code = 1
            traceback.print_exc()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                f"this CheckpointManager of {self._session.store.url} is closed; call close(), or "
                "leave the with block, after the last step, or make a new one"
            )
        if self._poisoned:
            raise RestoreError(self._poisoned)

    def _check_next(self, verb: str, step: object) -> None:
        self._check_open()
        check_step(f"manager.{verb}", step, reached=self._reached, since=self._since)

    def _check_restore(self, step: int | None, weights_only: bool) -> None:
        self._check_open()
        if self._started:
            raise RestoreError(
                f"restore() of {self._session.store.url} comes before the first save, and once, "
                "and this manager is past that; make a new one to restore again"
            )
        if self._read_only and not weights_only:
            raise RestoreError(_READ_ONLY)
        if step is not None:
            check_step("manager.restore", step)
        if self._fresh and (weights_only or step is not None):
            asked = "weights_only=True" if weights_only else f"restore({step})"
            raise ConfigError(
                f"fresh=True starts over at step 0 and restores nothing, and {asked} wants what is "
                "there; leave out one"
            )

    def _look_ahead(self) -> None:
        """Find out now what would fail the first save. Collective."""
        session = self._session
        agree(session.group, lambda: check_writable(session.store))
        check_room(session, self._memory_bytes)

    def _check_k(self, experts: ExpertMap) -> None:
        most = max(experts.experts, default=0)
        for name in ("k_snapshot", "k_persist"):
            k = getattr(self._policy, name)
            if k is not None and experts.experts and k > most:
                raise ConfigError(
                    f"Policy({name}={k}) is more than the {most} experts of any MoE layer; use at "
                    f"most {most}, or None for all"
                )


_exit_code = 0


@atexit.register
def _leave() -> None:
    """Registered first, so it runs after nearly all others: Python itself would say success."""
    if _exit_code:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_exit_code)


def _watch_for(signals: Sequence[int], group: Group, policy: Policy) -> Watch | None:
    """Listen for signals, if there are any. Collective."""
    mine = (list(signals), process_place(), os.getpid())
    told = gather_values(group, mine, tuple[list[int], str, int])
    for rank, (others, _, _) in enumerate(told):
        if others != mine[0]:
            raise ConfigError(
                f"preempt_signals={mine[0]} on rank {group.rank}, {others} on rank {rank}; "
                "give the same on every rank"
            )
    if not signals:
        return None
    return Watch(
        signals,
        grace_secs=policy.preempt_grace_secs,
        exit_code=policy.preempt_exit_code,
        mates=[pid for _, place, pid in told if place == mine[1] and pid != mine[2]],
    )


def _merge(told: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The MoE layers of all ranks (pipeline stages have different ones), with their experts.

    Raises:
        LayoutError: two ranks have a layer with different numbers; alike on all ranks.
    """
    merged: dict[str, int] = {}
    first: dict[str, int] = {}
    for rank, layers in enumerate(told):
        for name, count in layers.items():
            other = first.setdefault(name, rank)
            if merged.setdefault(name, count) != count:
                raise LayoutError(
                    f"MoE layer {name!r} has {merged[name]} experts as rank {other} counts and "
                    f"{count} as rank {rank} does; all ranks of an ep group hold equally many, so "
                    "give each the same number, or the right group as ep="
                )
    return merged


def _with_module_states(extras: Mapping[str, object], model: nn.Module) -> Mapping[str, object]:
    """What modules keep beside parameters and buffers is an extra, where there is any."""
    states = ModuleStates(unwrap(model))
    return {**extras, "moc.modules": states} if states else extras
