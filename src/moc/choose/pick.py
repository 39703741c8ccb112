"""Which experts the next save holds, and which of them it persists.

One rule for both levels: the experts that waited longest. Persisted are the least recently
*committed* ones, so that a failed persist starves nobody; a snapshot holds these and the least
recently snapshotted of the rest. Only the tie-break is designed:

* Persist ties follow an order that goes round the holders, rotated by K_persist*m for MoE layer m.
  With K = 1 this is Figure 4 of the MoC paper, e(m, t) = (m + t) mod N; for any K it spreads the
  experts of one save evenly over the ranks, where the window of consecutive expert ids that the
  paper's figure suggests does not.
* Snapshot ties follow the same order, dealt out into ceil(N / K_snapshot) windows block by block
  (blocks of K_persist experts). The persist rotation moves on by one block per save, so the experts
  it needs are always those of the window that is due: persisting costs the memory tier no slot.

No holder snapshots more than its even share and one: that bounds the size of a buffer in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from moc.choose.policy import Policy

__all__ = ["NEVER", "Choice", "ChooseState", "caps", "choose", "deal", "pick", "rotation"]

NEVER = -1
"""Step of an expert that was never snapshotted or committed."""


class Choice(msgspec.Struct, frozen=True):
    """The experts of one save.

    Attributes:
        snapshot: global expert ids in the snapshot, ascending, [MoE layer][...].
        persist: those of them that are persisted, ascending, [MoE layer][...]; empty tuples where
            the save stays in memory.

    Raises:
        ValueError: an expert is persisted that is not in the snapshot.
    """

    snapshot: tuple[tuple[int, ...], ...]
    persist: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for layer, (held, wanted) in enumerate(zip(self.snapshot, self.persist, strict=True)):
            if not set(wanted) <= set(held):
                raise ValueError(f"MoE layer {layer} persists {wanted} out of snapshot {held}")


class ChooseState(msgspec.Struct, frozen=True):
    """When each expert was last saved.

    Attributes:
        last_snapshot: step of the newest snapshot of each expert, [MoE layer][expert].
        last_commit: step of the newest committed save of each expert, [MoE layer][expert].
    """

    last_snapshot: tuple[tuple[int, ...], ...]
    last_commit: tuple[tuple[int, ...], ...]

    @classmethod
    def fresh(cls, experts_per_layer: Sequence[int]) -> ChooseState:
        """Nothing was saved yet.

        Args:
            experts_per_layer: number of routed experts N of each MoE layer.
        """
        never = tuple((NEVER,) * count for count in experts_per_layer)
        return cls(never, never)

    def snapshotted(self, step: int, experts: Sequence[Sequence[int]]) -> ChooseState:
        """The state after a snapshot at ``step`` of ``experts``, [MoE layer][expert ids]."""
        return ChooseState(_stamp(self.last_snapshot, step, experts), self.last_commit)

    def committed(self, step: int, experts: Sequence[Sequence[int]]) -> ChooseState:
        """The state after the commit of ``step``, which persisted ``experts``."""
        return ChooseState(self.last_snapshot, _stamp(self.last_commit, step, experts))


def rotation(holders: Sequence[int], start: int) -> tuple[int, ...]:
    """Order of experts that goes round the holders.

    Expert 0 of every holder, then expert 1 of every holder, and so on; holders by number, the
    experts of a holder by id; rotated left by ``start``.

    Args:
        holders: the holder (rank, or class of symmetric ranks) of each expert, length N.
        start: positions to rotate by, modulo N.

    Returns:
        A permutation of ``range(N)``.
    """
    turns: dict[int, int] = {}
    places = []
    for expert, holder in enumerate(holders):
        turn = turns.get(holder, 0)
        turns[holder] = turn + 1
        places.append((turn, holder, expert))
    return _rotated(tuple(expert for _, _, expert in sorted(places)), start)


def _rotated(order: tuple[int, ...], start: int) -> tuple[int, ...]:
    start %= len(order) or 1
    return order[start:] + order[:start]


def deal(order: Sequence[int], block: int, windows: int) -> tuple[int, ...]:
    """Deal blocks of an order out over windows like cards, and join the windows.

    Args:
        order: expert ids.
        block: experts that are dealt together (K_persist).
        windows: number of windows (ceil(N / K_snapshot)).

    Returns:
        The same ids: blocks 0, W, 2W, ..., then blocks 1, W+1, 2W+1, ...
    """
    if windows == 1:
        return tuple(order)
    dealt: list[int] = []
    for window in range(windows):
        if block == 1:
            dealt += order[window::windows]
            continue
        for start in range(window * block, len(order), windows * block):
            dealt += order[start : start + block]
    return tuple(dealt)


def pick(keys: Sequence[int], k: int, order: Sequence[int]) -> tuple[int, ...]:
    """The k experts with the smallest key.

    Args:
        keys: key of each expert, length N.
        k: how many.
        order: candidates, and the tie-break: of equal keys the earlier position wins.

    Returns:
        Expert ids, ascending.
    """
    return tuple(sorted(sorted(order, key=keys.__getitem__)[:k]))


def caps(holders: Sequence[Sequence[int]], policy: Policy) -> dict[int, int]:
    """The most experts of one snapshot that each holder gets.

    Its even share, sum over MoE layers of K_snapshot * (experts it holds) / N, rounded up, and one
    more. A snapshot goes beyond it only where the experts that must be persisted do, or where a
    layer has no others left.

    Args:
        holders: holder of each expert, [MoE layer][expert].
        policy: K_snapshot, clipped to each layer's N.
    """
    whole = math.lcm(*(len(row) for row in holders if row))
    shares: Counter[int] = Counter()
    for row, layers in Counter(map(tuple, holders)).items():  # as a rule all layers are alike
        for holder, held in Counter(row).items():
            share = policy.experts_per_save(len(row))[0] * held * (whole // len(row))
            shares[holder] += layers * share
    return {holder: -(-share // whole) + 1 for holder, share in shares.items()}


def choose(
    last_snapshot: Sequence[Sequence[int]],
    last_commit: Sequence[Sequence[int]],
    holders: Sequence[Sequence[int]],
    policy: Policy,
    *,
    full: bool = False,
    marked: bool = True,
) -> Choice:
    """Choose the experts of the next save.

    Whatever N, K_snapshot and K_persist are, and whichever persists fail, an expert is committed at
    least once in every ceil(N / K_persist) commits. ceil(N / K_snapshot) successive saves that stay
    in memory hold every expert; so do as many persisted ones in a row, where K_persist divides
    K_snapshot and K_snapshot divides N. Else a persisted save may have to spend up to K_persist
    places on experts that are fresh in memory. Where `caps` bind, it takes one save more.

    Args:
        last_snapshot: step of each expert's newest snapshot, [MoE layer][expert], -1 for never.
        last_commit: step of each expert's newest commit, [MoE layer][expert], -1 for never.
        holders: holder of each expert, [MoE layer][expert].
        policy: K_snapshot and K_persist, clipped to each layer's N.
        full: take every expert (the first save, the last, ``save(full=True)``).
        marked: the save is to be persisted; False leaves ``persist`` empty.

    Returns:
        The choice, equal on all ranks that pass equal arguments; exactly K_snapshot and K_persist
        experts of every layer.

    Raises:
        ValueError: the shapes differ.
    """
    shapes = [[len(row) for row in rows] for rows in (last_snapshot, last_commit, holders)]
    if not shapes[0] == shapes[1] == shapes[2]:
        raise ValueError(f"experts per MoE layer differ: {shapes}")
    if full:
        everything = tuple(tuple(range(len(row))) for row in holders)
        return Choice(everything, everything if marked else ((),) * len(holders))

    quota = [policy.experts_per_save(len(row)) for row in holders]
    rounds = {row: rotation(row, 0) for row in set(map(tuple, holders))}
    orders = [
        _rotated(rounds[tuple(row)], k_persist * layer)
        for layer, (row, (_, k_persist)) in enumerate(zip(holders, quota, strict=True))
    ]
    persist = tuple(
        pick(keys, k_persist, order) if marked else ()
        for keys, (_, k_persist), order in zip(last_commit, quota, orders, strict=True)
    )
    windows = [
        deal(order, k_persist, -(-len(order) // k_snapshot)) if order else ()
        for order, (k_snapshot, k_persist) in zip(orders, quota, strict=True)
    ]
    sizes = [k_snapshot for k_snapshot, _ in quota]
    limit = caps(holders, policy)
    snapshot = _uncapped(last_snapshot, windows, sizes, persist)
    if not _keeps_caps(snapshot, persist, holders, limit):
        snapshot = _capped(last_snapshot, windows, sizes, persist, holders, limit)
    return Choice(tuple(tuple(sorted(ids)) for ids in snapshot), persist)


def _uncapped(
    last_snapshot: Sequence[Sequence[int]],
    windows: Sequence[Sequence[int]],
    sizes: Sequence[int],
    persist: Sequence[Sequence[int]],
) -> list[set[int]]:
    """What waited longest, layer by layer, and what is persisted."""
    snapshot = []
    for keys, turns, size, ids in zip(last_snapshot, windows, sizes, persist, strict=True):
        held = set(ids)
        for expert in sorted(turns, key=keys.__getitem__):
            if len(held) >= size:
                break
            held.add(expert)
        snapshot.append(held)
    return snapshot


def _keeps_caps(
    snapshot: Sequence[set[int]],
    persist: Sequence[Sequence[int]],
    holders: Sequence[Sequence[int]],
    limit: Mapping[int, int],
) -> bool:
    """Whether `_capped` would choose the same.

    It goes through the same experts and passes over those whose holder is full. Where no holder
    that got one besides the persisted is beyond its cap at the end, none was full before.
    """
    load: Counter[int] = Counter()
    chosen: set[int] = set()
    for row, held, ids in zip(holders, snapshot, persist, strict=True):
        load.update(map(row.__getitem__, held))
        chosen.update(map(row.__getitem__, held.difference(ids)))
    return all(load[holder] <= limit[holder] for holder in chosen)


def _capped(
    last_snapshot: Sequence[Sequence[int]],
    windows: Sequence[Sequence[int]],
    sizes: Sequence[int],
    persist: Sequence[Sequence[int]],
    holders: Sequence[Sequence[int]],
    limit: Mapping[int, int],
) -> list[set[int]]:
    """What waited longest over all layers, as far as holders have room; then what is lacking."""
    snapshot = [set(ids) for ids in persist]
    load = Counter(holders[layer][e] for layer, ids in enumerate(persist) for e in ids)
    candidates = [
        (last_snapshot[layer][expert], turn, layer, expert)
        for layer, turns in enumerate(windows)
        for turn, expert in enumerate(turns)
    ]
    left = []
    for _, _, layer, expert in sorted(candidates):
        if len(snapshot[layer]) < sizes[layer] and expert not in snapshot[layer]:
            holder = holders[layer][expert]
            if load[holder] < limit[holder]:
                load[holder] += 1
                snapshot[layer].add(expert)
            else:
                left.append((layer, expert))
    for layer, expert in left:
        if len(snapshot[layer]) < sizes[layer]:
            snapshot[layer].add(expert)
    return snapshot


def _stamp(
    steps: Sequence[Sequence[int]], step: int, experts: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """``steps`` with ``step`` set for these experts; an older step never replaces a newer one."""
    stamped = []
    for row, ids in zip(steps, experts, strict=True):
        out = list(row)
        for expert in ids:
            out[expert] = max(out[expert], step)
        stamped.append(tuple(out))
    return tuple(stamped)
