"""Where the regions of a symmetric heap lie: names to byte ranges, the same on every PE."""

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 128  # bytes; also the least gap between two regions


@dataclass(frozen=True)
class Region:
    """A byte range of every PE's heap."""

    offset: int  # bytes from the heap's start, a multiple of ALIGNMENT
    size: int  # bytes


@dataclass(frozen=True)
class Layout:
    """Regions by name, in order, with an unused gap before, between and behind them.

    The gaps are guards: nothing may ever write there, and tests check that nothing does.
    """

    regions: Mapping[str, Region]
    size: int  # bytes of a PE's heap

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Layout":
        """Place regions of the given sizes in bytes one after the other.

        Example:
            >>> layout = Layout.of({"a": 8, "b": 200})
            >>> layout.regions["b"].offset, layout.size
            (384, 768)
        """
        regions, offset = {}, ALIGNMENT
        for name, size in sizes.items():
            regions[name] = Region(offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        return cls(regions, offset)

    def __getitem__(self, name: str) -> int:
        """Return the byte offset of a region."""
        return self.regions[name].offset

    def gaps(self) -> list[tuple[int, int]]:
        """Return the byte ranges [start, end) that belong to no region."""
        edges = [0]
        for region in self.regions.values():
            edges += [region.offset, region.offset + region.size]
        return list(zip(edges[::2], [*edges[1::2], self.size], strict=True))
