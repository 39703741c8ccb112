"""A box: an n-dimensional region of one logical (global) tensor.

Resharding is nothing but the intersection of the boxes that a rank wants with the boxes that
were written, so this is the only geometry in the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

__all__ = ["Box", "bounding_shape", "uncovered"]


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Half-open region ``[offset, offset + size)`` along every dimension.

    Attributes:
        offsets: first index along each dimension; empty for a 0-d tensor.
        sizes: extent along each dimension; a 0 makes the box empty.

    Raises:
        ValueError: ranks differ or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"box offsets {self.offsets} and sizes {self.sizes} differ in rank")
        if any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise ValueError(f"negative number in box {self.offsets}:{self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where the boxes share no element."""
        if len(self.sizes) != len(other.sizes):
            return None
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that select this box inside a local tensor that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + s)
            for o, s, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )

    def tiles(self, max_numel: int) -> Iterator[Box]:
        """Tile the box by boxes of at most ``max_numel`` elements, cut along leading dimensions.

        The tiling depends on nothing but the box, so that every rank cuts alike.
        """
        dim = next((d for d, size in enumerate(self.sizes) if size > 1), None)
        if dim is None or self.numel <= max_numel:
            yield self
            return
        rows = max(1, max_numel // (self.numel // self.sizes[dim]))
        for start in range(0, self.sizes[dim], rows):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dim] += start
            sizes[dim] = min(rows, self.sizes[dim] - start)
            yield from Box(tuple(offsets), tuple(sizes)).tiles(max_numel)

    def subtract(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes that cover this box without ``other``."""
        common = self.intersect(other)
        if common is None:
            yield self
            return
        low, high = list(self.offsets), list(self.ends)
        for dim in range(len(low)):
            for start, end in ((low[dim], common.offsets[dim]), (common.ends[dim], high[dim])):
                if start < end:
                    offsets, sizes = list(low), [b - a for a, b in zip(low, high, strict=True)]
                    offsets[dim], sizes[dim] = start, end - start
                    yield Box(tuple(offsets), tuple(sizes))
            low[dim], high[dim] = common.offsets[dim], common.ends[dim]


def bounding_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Smallest global shape that contains every box; all boxes of one rank."""
    return tuple(max(ends) for ends in zip(*(b.ends for b in boxes), strict=True))


def uncovered(wanted: Box, held: Sequence[Box]) -> list[Box]:
    """The parts of ``wanted`` that no held box covers; empty where it is covered."""
    left = [] if wanted.numel == 0 else [wanted]
    for box in held:
        left = [rest for part in left for rest in part.subtract(box)]
        if not left:
            break
    return left
