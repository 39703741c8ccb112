"""Fills the live state of one rank from a recovery plan: compare, read, verify, copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count, takewhile

import msgspec
import torch
from torch import Tensor

from moc.comm.group import agree, gather_values
from moc.core.box import Box, bounding_shape, uncovered
from moc.core.digest import digest_bytes
from moc.core.piece import EXTRA, MASTER, STEP_OF_EXPERT, WEIGHT
from moc.engine.report import SOURCES
from moc.engine.session import Session
from moc.engine.structure import EXTRAS, OPTIMIZER_GROUPS, large_extra
from moc.errors import DamagedError, MismatchError, StoreError
from moc.persist.writer import shared_buffer
from moc.recover.ladder import STORAGE, Fetch, RecoveryPlan, Source
from moc.snapshot.buffers import run_memory
from moc.state.extras import decode
from moc.state.groups import group_orders, match_groups, restore_groups
from moc.state.live import BUFFER, REGISTERED, SUMMED, Always, OwnedParam, Region
from moc.state.tensors import as_values, can_cast, over

__all__ = ["Bad", "Loader", "Wanted", "once_per_file"]

_PORTION_BYTES = 8 << 20
_SHOWN = 8
_MODEL_PARTS = (WEIGHT, BUFFER)
_NAMED_PARTS = (*_MODEL_PARTS, MASTER, REGISTERED, SUMMED)

Bad = list[tuple[tuple[int, str, int], str]]
"""Places whose bytes were bad or gone, with a line about each."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore is asked for; see `CheckpointManager.restore`.

    Attributes:
        strict: names must be the same in checkpoint and model.
        weights_only: parameters and buffers; nothing else is read or touched.
        cast: convert values of other dtypes.
    """

    strict: bool = True
    weights_only: bool = False
    cast: bool = False


class _Target(msgspec.Struct, frozen=True):
    """A live region to fill, and what to do when it is filled."""

    region: Region
    finish: Callable[[], None]


class Loader:
    """Fills this rank's live state from a plan."""

    def __init__(self, session: Session, plan: RecoveryPlan, wanted: Wanted) -> None:
        self._session = session
        self._plan = plan
        self._wanted = wanted
        self._extras: dict[str, bytearray] = {}
        self._targets: dict[tuple[str, str], list[_Target]] = {}
        self._steps: list[tuple[OwnedParam, torch.Tensor]] = []
        # Ranks beyond the old world take the place of an old one, in turn.
        self._as_rank = session.rank % plan.world_size
        self._fetches = [
            f
            for f in plan.fetches
            if (f.piece.rank in (-1, self._as_rank) or f.piece.part == SUMMED)
            and (f.piece.part in _MODEL_PARTS or not wanted.weights_only)
        ]
        self._table = _by_tensor(self._fetches)
        self.casts: list[tuple[str, str, str]] = []
        self.is_other_kind = False  # dtypes differ, or which parameters have masters
        self.nbytes = {c: dict.fromkeys(SOURCES, 0) for c in ("dense", "experts")}
        self.entries = 0

    def check(self) -> tuple[list[str], list[str]]:
        """Compare the plan with the model before anything is touched. Collective.

        Raises:
            MismatchError: shapes or (without a cast) dtypes differ, or (strict) names do.
        """
        regions = list(self._session.live.model_regions())
        if not self._wanted.weights_only:
            regions += [*self._session.live.master_regions(), *self._session.live.registered()]
        missing: list[str] = []
        casts: list[tuple[str, str, str]] = []
        differing = self._other_layers()
        for region in regions:
            label = f"{region.fqn} ({region.part})"
            entry = self._table.get((region.fqn, region.part))
            if entry is None:
                missing.append(label)
                continue
            wanted = self._session.live.logical_shape(region)
            dtype = region.logical or region.dtype
            others = sorted(entry.dtypes - {dtype})
            castable = entry.shape == wanted and all(can_cast(d, dtype) for d in others)
            if entry.shape != wanted or (others and not (castable and self._wanted.cast)):
                differing.append(
                    f"{label}: checkpoint {'/'.join(sorted(entry.dtypes))} {list(entry.shape)}, "
                    f"model {dtype} {list(wanted)}"
                    f"{' (restore(cast=True) converts it)' if castable else ''}"
                )
            elif uncovered(region.value_box, entry.boxes):
                missing.append(f"{label}: parts of it")
                if region.part == MASTER:
                    continue  # it becomes the weight
            casts += [(other, dtype, label) for other in others]
            self._targets.setdefault((region.fqn, region.part), []).append(
                _Target(region, _nothing)
            )
        here = {key for key in self._table if key in self._targets}
        here |= {
            (n, part) for n in self._session.live.frozen for part in (WEIGHT, MASTER)
        }  # left alone
        told = gather_values(
            self._session.group,
            (missing, differing, sorted(here), casts),
            tuple[list[str], list[str], list[tuple[str, str]], list[tuple[str, str, str]]],
        )
        known = {key for _, _, keys, _ in told for key in keys}
        self.casts = sorted({cast for *_, casts in told for cast in casts})
        names = {fqn for fqn, part in self._table if part in _NAMED_PARTS}
        fqns = {fqn for fqn, _ in known}
        masters = {fqn for fqn, part in self._table if part == MASTER and (fqn, part) not in known}
        unexpected = sorted({*(names - fqns), *(f"{n} ({MASTER})" for n in masters & fqns)})
        all_missing = sorted({text for texts, *_ in told for text in texts})
        all_differing = sorted({text for _, texts, *_ in told for text in texts})
        with_masters = any(f"({MASTER})" in text for text in (*all_missing, *unexpected))
        self.is_other_kind = bool(self.casts) or with_masters
        if all_differing or (self._wanted.strict and (all_missing or unexpected)):
            raise MismatchError(
                _tell_mismatch(self._plan, all_missing, unexpected, all_differing),
                missing=tuple(all_missing),
                unexpected=tuple(unexpected),
                differing=tuple(all_differing),
            )
        return all_missing, unexpected

    def _other_layers(self) -> list[str]:
        """MoE layers are compared even without ``strict``: experts are counted by them."""
        head, here = self._plan.head, self._session.live.experts
        saved = dict(zip(head.layers, map(len, head.routed), strict=True))
        now = dict(zip(here.layers, here.experts, strict=True))
        return [
            f"MoE layer {name}: {saved.get(name, 'no')} experts in the checkpoint, "
            f"{now.get(name, 'none')} in the model"
            for name in {**saved, **now}
            if saved.get(name) != now.get(name)
        ]

    def load(self) -> Bad:
        """Read, verify and copy everything this rank wants. Collective.

        Returns:
            Places whose bytes were bad or gone, on any rank, with a line about each.

        Raises:
            MismatchError: optimizers or extras differ; nothing was touched by this call.
        """
        bad = self._fetch([f for f in self._fetches if f.piece.part == EXTRA])
        if bad:
            return bad
        agree(self._session.group, self._check_small)
        self._session.live.unfold()
        if not self._wanted.weights_only:
            self._adopt_optimizer_state()
        for (_, part), targets in self._targets.items():
            if part == SUMMED:
                targets[0].region.live().detach().zero_()
        return self._fetch(
            [f for f in self._fetches if f.piece.part != EXTRA and self._is_wanted(f)]
        )

    def _check_small(self) -> None:
        if OPTIMIZER_GROUPS in self._extras:
            match_groups(self._session.live, decode(self._extras[OPTIMIZER_GROUPS]))
        if EXTRAS in self._extras and self._wanted.strict:
            self._session.extras.check(self._extras[EXTRAS], self._large())

    def _large(self) -> list[bytearray]:
        """Bytes of large tensors among the extras, in order."""
        names = takewhile(self._extras.__contains__, map(large_extra, count()))
        return [self._extras[name] for name in names]

    def _fetch(self, wanted: Sequence[Fetch]) -> Bad:
        chosen = [(f, self._source(f)) for f in wanted]
        bad: list[tuple[tuple[int, str, int], str]] = []
        with ExitStack() as stack:
            views: dict[str, memoryview] = {}
            home = self._session.node
            local = [(f, s) for f, s in chosen if self._reader_node(s) == home]
            for fetch, source in sorted(local, key=lambda item: item[1]):
                try:
                    data = self._read(fetch, source, views, stack)
                except (DamagedError, StoreError, OSError) as error:
                    bad.append((source.place, self._tell_bad(fetch, source, error)))
                    continue
                self._fill(fetch, data)
                self._count(fetch, source)
                del data
            remote = [(f, s) for f, s in chosen if self._reader_node(s) != home]
            bad += self._exchange(remote, views, stack)
            views.clear()
        return [item for told in gather_values(self._session.group, bad, Bad) for item in told]

    def finish(self) -> None:
        """After every byte has arrived: Python numbers, stale moments, groups, extras."""
        session = self._session
        if self.casts and session.rank == 0:
            session.note("warning", self._plan.version.step, text=_tell_casts(self.casts))
        self._follow_weights()
        if self._wanted.weights_only:
            return
        for targets in self._targets.values():
            for target in targets:
                target.finish()
        orders: dict[int, list[int]] = {}
        if OPTIMIZER_GROUPS in self._extras:
            groups = decode(self._extras[OPTIMIZER_GROUPS])
            restore_groups(session.live, groups)
            orders = group_orders(session.live, groups)
        for owned, steps in self._steps:  # by the betas that were saved
            entry = owned.entry
            assert entry is not None
            versions = self._plan.versions[entry.layer]
            stale = {
                entry.first + row: float(steps[row])
                for row in range(entry.count)
                if versions[entry.first + row] < self._plan.version
            }
            session.live.rescale(owned, stale)
        routed = self._plan.head.routed
        width = max(map(len, routed), default=0)
        total = torch.zeros((len(routed), width), dtype=torch.int64)
        if session.rank == 0:  # the total is a sum over ranks; one of them carries the past
            for layer, row in enumerate(routed):
                total[layer, : len(row)] = torch.tensor(row, dtype=torch.int64)
        session.tokens.load(total)
        if EXTRAS in self._extras:
            session.extras.restore(
                self._extras[EXTRAS],
                self._large(),
                strict=self._wanted.strict,
                group_orders=orders,
            )

    def _follow_weights(self) -> None:
        """A master that was not read becomes its weight, or the next step would undo that."""
        for region in self._session.live.master_regions():
            weights = self._targets.get((region.fqn, WEIGHT))
            if weights and (region.fqn, MASTER) not in self._targets:
                with torch.no_grad():
                    region.live().copy_(weights[0].region.live())

    def _adopt_optimizer_state(self) -> None:
        parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for (fqn, part), entry in self._table.items():
            if part not in (*_NAMED_PARTS, EXTRA, STEP_OF_EXPERT):
                parts.setdefault(fqn, {})[part] = (min(entry.dtypes), entry.shape)
        for fqn, changed in self._changed_dtypes().items():
            for part, (dtype, shape) in parts.get(fqn, {}).items():
                if part != "step" and dtype in changed:
                    parts[fqn][part] = (changed[dtype], shape)
        live = self._session.live
        self._steps = []
        self.entries = 0
        for owned in live.owned():
            name = live.global_name(owned.fqn)
            wanted = self._for_all_rows(owned, parts.get(name, {}))
            for region, finish in live.adopt(owned, wanted):
                self._clear_gaps(region)
                self._targets[region.fqn, region.part] = [_Target(region, finish)]
                self.entries += 1
            if (name, STEP_OF_EXPERT) in self._table and owned.entry is not None:
                steps = torch.zeros(owned.entry.count)
                box = Box((owned.entry.first,), (owned.entry.count,))
                self._steps.append((owned, steps))
                self._targets[name, STEP_OF_EXPERT] = [
                    _Target(
                        Region(
                            fqn=name,
                            part=STEP_OF_EXPERT,
                            box=box,
                            dtype="F32",
                            live=Always(steps),
                            overlapped=False,
                        ),
                        _nothing,
                    )
                ]

    def _for_all_rows(
        self, owned: OwnedParam, parts: dict[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Shapes with all experts, though some versions be from before the state appeared."""
        live, entry = self._session.live, owned.entry
        if entry is None or not entry.stacked:
            return parts
        name, experts = live.global_name(owned.fqn), live.experts.experts[entry.layer]
        return {
            part: (dtype, (experts, *shape[1:]) if self._table[name, part].is_expert else shape)
            for part, (dtype, shape) in parts.items()
        }

    def _clear_gaps(self, region: Region) -> None:
        if not uncovered(region.value_box, self._table[region.fqn, region.part].boxes):
            return
        region.live().zero_()
        text = f"some experts of {region.fqn} had no {region.part} yet when saved: it is zero"
        self._session.note("warning", self._plan.version.step, text=text)

    def _changed_dtypes(self) -> dict[str, dict[str, str]]:
        """By parameter, what the dtype of what is stepped was and is: its state goes with it."""
        changed: dict[str, dict[str, str]] = {}
        masters = {r.fqn: r for r in self._session.live.master_regions()}
        for (fqn, part), targets in self._targets.items():
            if part == WEIGHT:
                region = masters.get(fqn, targets[0].region)
                now = region.logical or region.dtype
                then = self._table.get((fqn, MASTER)) or self._table[fqn, WEIGHT]
                changed[fqn] = {old: now for old in then.dtypes if old != now}
        return changed

    def _is_wanted(self, fetch: Fetch) -> bool:
        piece, box = fetch.piece, fetch.piece.value_box
        if piece.part == SUMMED and self._session.rank != 0:
            return False  # one rank carries the total
        return any(
            box.numel == 0 or target.region.value_box.intersect(box) is not None
            for target in self._targets.get((piece.fqn, piece.part), ())
        )

    def _source(self, fetch: Fetch) -> Source:
        """Own memory, the store or own disk, another node's memory, another node's disk."""
        home = self._session.node
        return min(
            fetch.sources, key=lambda s: (self._reader_node(s) != home, s.node == STORAGE, s)
        )

    def _reader_node(self, source: Source) -> int:
        """The node that reads a source for this rank: this one wherever it can."""
        home = self._session.node
        if source.node != STORAGE:
            return source.node
        holders = self._session.holders.get(source.file) if self._session.node_local else None
        return home if not holders or home in holders else holders[0]

    def _read(
        self, fetch: Fetch, source: Source, views: dict[str, memoryview], stack: ExitStack
    ) -> memoryview | bytearray:
        nbytes = fetch.piece.nbytes
        data: memoryview | bytearray
        if source.node == STORAGE:
            data = self._read_stored(source, nbytes)
        else:
            if source.file not in views:
                folder = run_memory(self._session.memory_dir, self._session.run_id)
                views[source.file] = stack.enter_context(shared_buffer(str(folder / source.file)))
            data = views[source.file][source.offset : source.offset + nbytes]
        if len(data) != nbytes:
            raise DamagedError(f"{len(data)} bytes instead of {nbytes}")
        if source.digest and digest_bytes(memoryview(data)) != source.digest:
            raise DamagedError("the digest differs")
        return data

    def _read_stored(self, source: Source, nbytes: int) -> bytearray:
        """In portions: a store gives bytes, which no tensor can lie over, so all is copied once."""
        data = bytearray(nbytes)
        for start in range(0, nbytes, _PORTION_BYTES):
            wanted = min(_PORTION_BYTES, nbytes - start)
            portion = self._session.store.get(source.file, source.offset + start, wanted)
            if len(portion) != wanted:
                raise DamagedError(f"{start + len(portion)} bytes instead of {nbytes}")
            data[start : start + wanted] = portion
            del portion  # before the next one is there
        return data

    def _exchange(
        self,
        remote: Sequence[tuple[Fetch, Source]],
        views: dict[str, memoryview],
        stack: ExitStack,
    ) -> list[tuple[tuple[int, str, int], str]]:
        """Pieces that only another node holds: its lister reads, all ranks hear."""
        session = self._session
        index = {f.piece.name: i for i, f in enumerate(self._plan.fetches)}
        mine = [(index[f.piece.name], self._reader_node(s), s) for f, s in remote]
        told = gather_values(session.group, mine, list[tuple[int, int, Source]])
        asked = sorted({item for items in told for item in items})
        sources = {i: s for i, _, s in mine}
        bad = []
        for i, node, source in asked:
            fetch = self._plan.fetches[i]
            reader = session.nodes.index(node)
            data: bytes | None = None
            if session.rank == reader:
                try:
                    data = bytes(self._read(fetch, source, views, stack))
                except (DamagedError, StoreError, OSError) as error:
                    bad.append((source.place, self._tell_bad(fetch, source, error)))
                    data = b""
            data = session.group.broadcast(data, src=reader)
            if sources.get(i) == source and len(data) == fetch.piece.nbytes:
                self._fill(fetch, bytearray(data))
                self._count(fetch, source)
        return bad

    def _tell_bad(self, fetch: Fetch, source: Source, error: Exception) -> str:
        session = self._session
        where = f"the memory of node {source.node}"
        if source.node == STORAGE:
            where = f"the disk of {session.places[session.rank]}" if session.places else "the store"
        return f"{fetch.piece.name} in {source.file} ({where}) cannot be used: {error}"

    def _fill(self, fetch: Fetch, data: memoryview | bytearray) -> None:
        piece = fetch.piece
        if piece.part == EXTRA:
            nbytes = self._table[piece.fqn, EXTRA].shape[0]
            whole = self._extras.setdefault(piece.fqn, bytearray(nbytes))
            whole[piece.box.offsets[0] : piece.box.ends[0]] = data
            return
        source = over(data, 0, piece.dtype, piece.box.sizes)
        with torch.no_grad():
            for target in self._targets[piece.fqn, piece.part]:
                region = target.region
                if region.logical == piece.logical and piece.part != SUMMED:
                    # Bytes, where values are not plain.
                    _merge(source, piece.box, region.view, region.box, Tensor.copy_)
                    continue
                values = as_values(source, piece.logical) if piece.logical else source
                how = Tensor.add_ if piece.part == SUMMED else Tensor.copy_
                _merge(values, piece.value_box, region.values, region.value_box, how)

    def _count(self, fetch: Fetch, source: Source) -> None:
        kind = "experts" if fetch.piece.is_expert else "dense"
        place = {STORAGE: "storage", self._session.node: "memory"}.get(source.node, "peer")
        older = "_older" if fetch.version < self._plan.version else ""
        self.nbytes[kind][place + older] += fetch.piece.nbytes


class _Logical(msgspec.Struct):
    """A logical tensor in the checkpoint, in values."""

    dtypes: set[str]
    boxes: list[Box]
    shape: tuple[int, ...] = ()
    is_expert: bool = False


def _by_tensor(fetches: Sequence[Fetch]) -> dict[tuple[str, str], _Logical]:
    table: dict[tuple[str, str], _Logical] = {}
    for fetch in fetches:
        piece = fetch.piece
        entry = table.setdefault((piece.fqn, piece.part), _Logical(set(), []))
        entry.dtypes.add(piece.logical or piece.dtype)
        entry.boxes.append(piece.value_box)
        entry.is_expert = piece.is_expert
    for entry in table.values():
        entry.shape = bounding_shape(entry.boxes)
    return table


def _merge(
    source: Tensor,
    box: Box,
    view: Callable[[Box], Tensor],
    region: Box,
    how: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Copy or add what a box has in common with a region."""
    common = region.intersect(box) if box.sizes else box
    if common is not None:
        how(view(common), source[common.within(box)] if box.sizes else source)


def _nothing() -> None:
    """Nothing is left to do."""


def once_per_file(bad: Bad) -> list[str]:
    """A line for every file with bad or missing pieces: one lost file holds hundreds."""
    by_file: dict[tuple[int, str], list[str]] = {}
    for (node, file, _), text in sorted(bad):
        by_file.setdefault((node, file), []).append(text)
    return [
        texts[0] + (f" (and {len(texts) - 1} more pieces of it)" if len(texts) > 1 else "")
        for texts in by_file.values()
    ]


def _tell_casts(casts: Sequence[tuple[str, str, str]]) -> str:
    counts = Counter((then, now) for then, now, _ in casts)
    told = [f"{n} from {then} to {now}" for (then, now), n in sorted(counts.items())]
    return f"cast=True: converted {len(casts)} tensors of the model: {', '.join(told)}"


def _tell_mismatch(
    plan: RecoveryPlan,
    missing: Sequence[str],
    unexpected: Sequence[str],
    differing: Sequence[str],
) -> str:
    lines = [
        f"step {plan.version} is of another model, or does not fit this one; nothing was changed "
        "(another directory for another model, strict=False to load what fits)"
    ]
    frozen = {f"{name} ({WEIGHT})" for name in plan.head.frozen}
    for title, names in (
        (
            "left out of the checkpoint as frozen, so fill them from the base model and give "
            "exclude_frozen=True",
            [name for name in missing if name in frozen],
        ),
        ("missing in the checkpoint", [name for name in missing if name not in frozen]),
        ("unexpected in the checkpoint", unexpected),
        ("different", differing),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{title} ({len(names)}): {', '.join(names[:_SHOWN])}{more}")
    return "; ".join(lines)
