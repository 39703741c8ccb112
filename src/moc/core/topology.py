"""Which ranks share what: plain numbers, no process groups."""

from __future__ import annotations

import msgspec

from moc.errors import LayoutError

__all__ = ["Topology"]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of the job.

    Attributes:
        rank: global rank.
        world_size: number of ranks in the job.
        dp: global ranks that hold the same dense parameters, this rank among them.
        ep: global ranks over which the experts are spread, in expert order.
        edp: global ranks that hold the same experts as this rank.

    Raises:
        LayoutError: this rank is missing from a group, or a rank is out of range.
    """

    rank: int = 0
    world_size: int = 1
    dp: tuple[int, ...] = (0,)
    ep: tuple[int, ...] = (0,)
    edp: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for axis in ("dp", "ep", "edp"):
            ranks = getattr(self, axis)
            if self.rank not in ranks:
                raise LayoutError(
                    f"rank {self.rank} is not in its own {axis} group {ranks}; give each rank the "
                    f"{axis} group that it belongs to"
                )
            if len(set(ranks)) != len(ranks) or not all(0 <= r < self.world_size for r in ranks):
                raise LayoutError(
                    f"{axis} group {ranks} does not fit a world of {self.world_size}; a group "
                    "holds each rank once, by its number in the job"
                )

    @property
    def ep_rank(self) -> int:
        """Position of this rank in its expert-parallel group."""
        return self.ep.index(self.rank)

    @property
    def ep_size(self) -> int:
        """Number of ranks over which the experts of a layer are spread."""
        return len(self.ep)
