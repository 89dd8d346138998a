"""The two clusters of the paper, as descriptions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from railwave._check import check_positive_int
from railwave.topology import Topology


@dataclass(frozen=True)
class Preset:
    """Hold a cluster and its rates; all rates are one way, in 1e9 bytes/s.

    Args:
        topo: nodes, GPUs, rails, and the rail of each GPU.
        rail_gbytes_s: what a rail of a node sends, and at the same time receives.
        nvlink_gbytes_s: what a GPU sends to the others of its node over NVLink.

    Raises:
        TypeError, ValueError: topo is not a Topology, or a rate is not a finite number above 0.
    """

    topo: Topology
    rail_gbytes_s: float
    nvlink_gbytes_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.topo, Topology):
            raise TypeError(f"topo must be a railwave.Topology, got {type(self.topo).__name__}")
        for name in ("rail_gbytes_s", "nvlink_gbytes_s"):
            rate = getattr(self, name)
            if isinstance(rate, bool) or not isinstance(rate, Real):
                raise TypeError(f"{name} must be a number, got {rate!r}")
            if not 0 < float(rate) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {rate}")


# Rails, rail rate, NVLink rate; see `preset`.
_CLUSTERS = {"h800": (8, 25.0, 200.0), "h20": (4, 50.0, 450.0)}
PRESETS = tuple(_CLUSTERS)


def preset(name: str, *, nodes: int = 4, nvlink_gbytes_s: float | None = None) -> Preset:
    """Return one of the paper's clusters: nodes of 8 GPUs, by name.

    - `h800`: 8 rails of 25 GB/s, GPU g on rail g. The paper's table says 200 Gb/s a port and its
      text 400 Gb/s an adapter; we take the port.
    - `h20`: 4 rails of 50 GB/s, GPUs 2r and 2r + 1 on rail r. The paper says that each pair of
      PCIe-local GPUs shares an adapter of two 200 Gb/s ports; that such a pair are neighbours in
      number is our assumption, usual on such machines. The paper also gives each GPU of the pair a
      port of its own, which one rail of 50 GB/s does not hold: a GPU alone may use both here.

    Args:
        name: "h800" or "h20".
        nodes: N; the paper has 4.
        nvlink_gbytes_s: one way, 1e9 bytes/s a GPU. The paper says NVLink and no rate. By default
            half of what is sold as the sum of both ways: 200 of 400 (H800), 450 of 900 (H20).
            A measured rate is lower: DeepSeek-V3's report (arXiv 2412.19437) uses 160 for H800.

    Raises:
        TypeError, ValueError: a name that is not listed, or a bad number.

    Source: A.1, Table 1.

    Example:
        >>> h20 = preset("h20")
        >>> h20.topo.nodes, h20.topo.rails_per_node, h20.rail_gbytes_s
        (4, 4, 50.0)
        >>> h20.topo.gpus_of_rail
        ((0, 1), (2, 3), (4, 5), (6, 7))
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {list(PRESETS)}, got {name!r}")
    rails, rail_rate, nvlink_rate = _CLUSTERS[name]
    topo = Topology(check_positive_int(nodes, "nodes"), 8, rails)
    rate = nvlink_rate if nvlink_gbytes_s is None else nvlink_gbytes_s
    return Preset(topo, rail_rate, rate)
