"""What the simulated network can do."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

# a of the receiver efficiency 1 / (1 + a (f - 1)): none; as mild as the paper's replay (Figure
# 2(c)); as severe as its Table 2. Read off those results, not fitted per scheduler.
INCAST = {"none": 0.0, "mild": 0.046, "severe": 4.0}


# So that no time overflows, whatever is sent.
RANGES = {
    **dict.fromkeys(("rail_bytes_s", "nvlink_bytes_s"), (1e-6, 1e18)),
    **dict.fromkeys(("wave_latency_s", "grant_latency_s", "incast"), (0.0, 1e6)),
}


@dataclass(frozen=True)
class Fabric:
    """Hold rates, latencies and the incast model.

    Args:
        rail_bytes_s: bytes per second of a NIC, in each direction, in [1e-6, 1e18].
        nvlink_bytes_s: bytes per second of a GPU's NVLink, in each direction, in the same range.
            Infinite: redistribution is free.
        wave_latency_s: seconds added to each window that sends anything, in [0, 1e6].
        grant_latency_s: seconds added to each such window after the first, where receivers grant
            waves; the round trip of a grant, to its first byte, where they grant chunks.
        incast: a in [0, 1e6]. A NIC that receives from f NICs at once receives at rail_bytes_s
            times 1 / (1 + a (f - 1)). See `INCAST`.

    Raises:
        TypeError, ValueError: a value that is no number, or out of range.

    Example:
        Five senders under severe incast: 1 / (1 + 4 * 4).

        >>> Fabric(25e9, incast=INCAST["severe"]).efficiency(5) == 1 / 17
        True
    """

    rail_bytes_s: float
    nvlink_bytes_s: float = math.inf
    wave_latency_s: float = 0.0
    grant_latency_s: float = 0.0
    incast: float = 0.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
            low, high = RANGES[name]
            if not (low <= value <= high or (name == "nvlink_bytes_s" and value == math.inf)):
                raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")

    def efficiency(self, num_senders: Any) -> Any:
        """Return 1 / (1 + a (f - 1)) for f senders, an int or an array of at least 1."""
        return 1 / (1 + self.incast * (num_senders - 1))
