"""The calibrated table that a selector reads: anchors, and the measurements that they rest on.

JSON, so that people can read it, and checked in every field, since people edit it. A table belongs
to the configuration whose fingerprint it carries; on another it would mislead, so it is refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from railwave._files import write_file
from railwave._version import __version__
from railwave.config import PATHS, Config
from railwave.retention import CONTROL
from railwave.sched import Anchor, Decision, Scales, select

FORMAT = 1
MOST = 1e15  # of any number in a table


@dataclass(frozen=True)
class Point:
    """One measured point of traffic, raw."""

    payload_mib: float
    rho: float
    kappa: float
    samples_us: Mapping[str, tuple[float, ...]]  # by path, dispatch and combine, slowest rank
    verdict: str  # why it became an anchor, or why not


@dataclass(frozen=True)
class CostTable:
    """Anchors of one configuration.

    Args:
        fingerprint: what the measurements depend on, by name; see `fingerprint`.
        scales: how traffic is compared with an anchor.
        anchors: where another path than joint was measured to be faster.
        points: all that was measured; empty in a table that was not measured here.

    Example:
        >>> table = CostTable({"rails": "8"}, Scales(rails=8), (Anchor(28, 1, 1, "native"),))
        >>> table.select(payload_bytes=28 << 20, rho=1.0, kappa=1.0).path
        'native'
    """

    fingerprint: Mapping[str, str]
    scales: Scales
    anchors: tuple[Anchor, ...] = ()
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        for name in ("anchors", "points"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def select(self, *, payload_bytes: float, rho: float, kappa: float) -> Decision:
        """Choose a path, as `railwave.sched.select` does."""
        traffic = {"payload_bytes": payload_bytes, "rho": rho, "kappa": kappa}
        return select(self.anchors, self.scales, **traffic)

    def check_fits(self, fingerprint: Mapping[str, str]) -> None:
        """Raise unless the table is of this configuration.

        Raises:
            ValueError: with the entries of both fingerprints that differ.
        """
        names = sorted({*self.fingerprint, *fingerprint})
        differ = [n for n in names if self.fingerprint.get(n) != fingerprint.get(n)]
        if differ:
            mend = "make one with: railwave calibrate"
            if fingerprint.get("transport") == "one process":
                mend = "a LocalWorld takes one made by hand; railwave calibrate's are for init"
            here, there = fingerprint.get, self.fingerprint.get
            lines = [f"{name}: here {here(name)!r}, table {there(name)!r}" for name in differ]
            first = f"the cost table must be of this configuration; {mend}"
            raise ValueError("\n".join([first, *lines]))

    def save(self, path: str | os.PathLike) -> None:
        """Write the table to a file, all of it or nothing."""
        data = {
            "format": FORMAT,
            "fingerprint": dict(self.fingerprint),
            "scales": asdict(self.scales),
            "anchors": [asdict(anchor) for anchor in self.anchors],
            "points": [asdict(point) for point in self.points],
        }
        write_file(os.fspath(path), (json.dumps(data, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostTable:
        """Read a table and check every field.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no such table; with the file, the field, the rule and the value.
        """
        repeated: list[str] = []

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            repeated.extend(
                name for name, times in Counter(n for n, _ in pairs).items() if times > 1
            )
            return dict(pairs)

        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            rule = "must be a JSON cost table, as railwave calibrate writes it, got no JSON"
            line = getattr(error, "lineno", 0)
            where = f" from line {line} on" if line else ""
            raise ValueError(f"{path}: {rule}{where}") from None
        try:
            if repeated:
                raise ValueError(f"a field must be given once, got {repeated[0]} again")
            return cls._of(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _of(cls, data: Any) -> CostTable:
        _check_names(data, ("format", "fingerprint", "scales", "anchors", "points"), "the table")
        if data["format"] is True or data["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {data['format']!r}")
        return cls(
            _fingerprint(data["fingerprint"]),
            _scales(data["scales"]),
            tuple(_anchor(a, f"anchors[{i}]") for i, a in _numbered(data["anchors"], "anchors")),
            tuple(_point(p, f"points[{i}]") for i, p in _numbered(data["points"], "points")),
        )


def fingerprint(config: Config, transport: str) -> dict[str, str]:
    """Say what may change which path is faster here.

    Of staging and the most tokens only the rounds that a slice takes: they are launches that native
    and rail are spared. Experts and top-k are left out: what they add is the same on every path.

    Args:
        config: sizes.
        transport: how records reach other nodes.
    """
    topo, device = config.topo, config.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    barred = [tuple(place) for place in (~topo.eligible_rails).nonzero().tolist()]
    between = [(s, d, rail) for s, d, rail in barred if s != d]
    rounds = config.rounds_per_wave
    return {
        "topology": f"{topo.nodes} nodes x {topo.gpus_per_node} GPUs",
        "rail_of_gpu": str(list(topo.rail_of_gpu)),
        "ineligible_rails": str(between),
        "hidden": str(config.hidden),
        "dtype": str(config.dtype),
        "device": name,
        "transport": transport,
        "rounds_per_wave": "1" if rounds == 1 else f"{rounds} of {config.staging_records} records",
        "railwave": __version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # built under another name
        return "unknown"


def table_for(given: Any, config: Config, transport: str) -> CostTable | None:
    """Return the table for a configuration, from a file if need be; None for None.

    Raises:
        TypeError, ValueError: it is no table, is one of another configuration, or chooses paths
            that the configuration does not have.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        given = CostTable.load(given)
    if not isinstance(given, CostTable):
        raise TypeError(
            f"cost_table must be a railwave.CostTable or its file, got {type(given).__name__}"
        )
    given.check_fits(fingerprint(config, transport))
    if given.scales.rails != config.topo.rails_per_node:
        raise ValueError(
            f"cost_table's scales.rails must be {config.topo.rails_per_node} here, got "
            f"{given.scales.rails}"
        )
    wanted = {"native", "joint", *(anchor.path for anchor in given.anchors)}
    if not wanted <= set(config.paths):
        raise ValueError(
            f"paths must hold all that cost_table may choose, {sorted(wanted)}, got "
            f"{list(config.paths)}"
        )
    return given


def _fingerprint(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise ValueError(f"fingerprint must be an object of strings, got {data!r:.80}")
    return data


def _scales(data: Any) -> Scales:
    _check_names(data, [field.name for field in fields(Scales)], "scales")
    numbers = {n: _number(v, f"scales.{n}") for n, v in data.items() if n != "rails"}
    return _made(lambda: Scales(rails=data["rails"], **numbers), "scales")


def _anchor(data: Any, name: str) -> Anchor:
    _check_names(data, [field.name for field in fields(Anchor)], name)
    if data["path"] not in PATHS:
        raise ValueError(f"{name}.path must be one of {list(PATHS)}, got {data['path']!r}")
    place = _traffic(data, name)
    return _made(lambda: Anchor(*place, data["path"]), name)


def _made(make: Callable[[], Any], name: str) -> Any:
    """Call what checks its own fields; say which part of the table they are of."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.{error}") from None


def _point(data: Any, name: str) -> Point:
    _check_names(data, [field.name for field in fields(Point)], name)
    samples = data["samples_us"]
    if not isinstance(samples, dict) or not set(samples) <= {*PATHS, CONTROL}:
        raise ValueError(f"{name}.samples_us must be an object by path of {[*PATHS, CONTROL]}")
    measured = {
        path: tuple(
            _number(us, f"{name}.samples_us.{path}[{i}]")
            for i, us in _numbered(times, f"{name}.samples_us.{path}")
        )
        for path, times in samples.items()
    }
    if "joint" not in measured:
        raise ValueError(f"{name}.samples_us must hold times of joint, got {list(measured)}")
    for path, times in measured.items():
        if not times:
            raise ValueError(f"{name}.samples_us.{path} must hold times, got none")
    if not isinstance(data["verdict"], str):
        raise ValueError(f"{name}.verdict must be a text, got {data['verdict']!r}")
    return Point(*_traffic(data, name), measured, data["verdict"])


def _traffic(data: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    return (
        _number(data["payload_mib"], f"{name}.payload_mib"),
        _number(data["rho"], f"{name}.rho"),
        _number(data["kappa"], f"{name}.kappa"),
    )


def _check_names(data: Any, names: Any, where: str) -> None:
    if not isinstance(data, dict) or set(data) != set(names):
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{where} must be an object with the fields {sorted(names)}, got {got}")


def _numbered(data: Any, name: str) -> enumerate:
    if not isinstance(data, list):
        raise ValueError(f"{name} must be a list, got {type(data).__name__}")
    return enumerate(data)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= MOST:
        raise ValueError(f"{name} must be a number in (0, {MOST:g}], got {value!r:.40}")
    return float(value)
