"""One greedy packing for every sharding; its sort order and tie-breaks are stated here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["assign"]


def assign(
    sizes: Mapping[str, int],
    holders: Mapping[str, Sequence[int]],
    load: Sequence[int],
) -> dict[str, int]:
    """Give every item to one of its holders, largest first, onto the least loaded one.

    Order: items with the fewest holders first (they have the least choice), then the larger,
    then by name; among holders the least loaded, then the lowest rank. All ranks must agree on
    this, hence the name and the rank as last keys.

    Args:
        sizes: bytes per item name.
        holders: ranks that can write the item.
        load: bytes that each rank writes already.

    Returns:
        The writing rank per item name.
    """
    load = list(load)
    writer = {}
    for name in sorted(sizes, key=lambda n: (len(holders[n]), -sizes[n], n)):
        rank = min(holders[name], key=lambda r: (load[r], r))
        writer[name] = rank
        load[rank] += sizes[name]
    return writer
