"""Tables of the replay and of the simulator: see `evidence`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.emulated_cases import PATHS

Row = dict[str, Any]
NEAR = 0.15  # of what was measured: how far the simulator may be off
PAPER_RANGE = {"h800": "2.02-5.84", "h20": "1.74-4.36"}  # joint over native, P50, three patterns
PAPER_OVER_BETTER = {"moderate": 1.44, "extreme": 1.97}  # joint over the better single mechanism
WAVE_CALLS = "joint, a call a wave"
REPLAY = ("layout", "routing", "rate", "pattern")


def table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> list[str]:
    """Return a markdown table.

    Example:
        >>> table(["a", "b"], [[1, 2.5]])
        ['| a | b |', '|---|---|', '| 1 | 2.5 |']
    """
    rows = [head, ["---"] * len(head), *body]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], lines[1].replace(" ", ""), *lines[2:]]


def of_family(rows: list[Row], family: str) -> list[Row]:
    """Keep the rows of a family."""
    return [row for row in rows if row["family"] == family]


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """Group rows by some of their values, in the order in which they come."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups


def by_method(rows: Iterable[Row]) -> dict[str, dict[Any, Row]]:
    """Return {method: {layer: row}}, of the layers that all methods have."""
    found: dict[str, dict[Any, Row]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row.get("layer")] = row
    common = set.intersection(*map(set, found.values())) if found else set()
    return {m: {k: v for k, v in of.items() if k in common} for m, of in found.items()}


def quantile_sum_ms(of: dict[Any, Row], form: str, quantile: str) -> float:
    """Add up a quantile over layers, in ms; NaN where a layer lacks it."""
    return sum(row[form].get(f"{quantile}_us", math.nan) for row in of.values()) / 1e3


def spread(values: Sequence[float]) -> str:
    """Say a median with its range.

    Example:
        >>> spread([1.0, 2.0, 4.0])
        '2.00 (1.00-4.00)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ratios(methods: dict[str, dict[Any, Row]], over: str, of: str, form: str) -> list[float]:
    """Return, layer by layer, how many times as long `over` takes as `of` at P50."""
    return [
        row[form]["median_us"] / methods[of][layer][form]["median_us"]
        for layer, row in methods[over].items()
    ]


def replay_tables(rows: list[Row]) -> Iterable[str]:
    """Tell joint over native, both forms, as many calls on both sides and one call beside it."""
    body, quantiles = [], []
    for key, group in grouped(of_family(rows, "replay"), *REPLAY).items():
        methods = by_method(group)
        if {"native", "joint"} <= methods.keys():
            body.append([*key, len(methods["joint"]), *_joint_over_native(methods)])
            body[-1].append(PAPER_RANGE[key[0]])
        many = by_method(row for row in group if row["samples"] >= 100)
        # P99 is of layers with 100 samples: those by themselves, too.
        for of in (methods, many) if many and many != methods else (methods,):
            quantiles += [[*key, *_sums(method, layers)] for method, layers in of.items()]
    if not quantiles:
        return
    yield "### Joint over native at P50: by layer, median (least-most)"
    yield ""
    head = [*REPLAY, "layers", "a call a wave, network", "of sums", "a call a wave, whole"]
    head += ["of sums", "one call, network", "of sums", "one call, whole", "of sums"]
    head += ["one call, whole / T*", "paper, of sums"]
    yield from table(head, body)
    yield ""
    yield "### Sums over layers of each layer's quantile, ms"
    yield ""
    head = [*REPLAY, "method", "layers"]
    head += [f"{form} {q}" for form in ("network", "whole") for q in ("P50", "P95", "P99")]
    yield from table(head, quantiles)


def _joint_over_native(methods: dict[str, dict[Any, Row]]) -> list[str]:
    waves = WAVE_CALLS if WAVE_CALLS in methods else "joint"
    columns = []
    for method in (waves, "joint"):
        for form in ("network", "whole"):
            native, other = (
                quantile_sum_ms(methods[name], form, "median") for name in ("native", method)
            )
            by_layer = ratios(methods, "native", method, form)
            columns += [spread(by_layer), f"{native / other:.2f}"]
    bound = [row["whole"]["median_us"] / row["bound_us"] for row in methods["joint"].values()]
    return [*columns, spread(bound)]


def _sums(method: str, layers: dict[Any, Row]) -> list[Any]:
    sums = [
        quantile_sum_ms(layers, form, quantile)
        for form in ("network", "whole")
        for quantile in ("median", "p95", "p99")
    ]
    return [method, len(layers), *("" if math.isnan(ms) else f"{ms:.1f}" for ms in sums)]


def ablation(rows: list[Row]) -> Iterable[str]:
    """Tell where the gain comes from (Figure 7): each mechanism alone, and both."""
    body = []
    for key, group in grouped(of_family(rows, "replay"), *REPLAY).items():
        methods = by_method(group)
        if set(PATHS) <= methods.keys():
            sums = {m: quantile_sum_ms(methods[m], "whole", "median") for m in PATHS}
            better = min(sums["rail"], sums["permutation"])
            speedups = [f"{sums['native'] / sums[m]:.2f}" for m in PATHS[1:]]
            paper = PAPER_OVER_BETTER.get(key[3], "") if key[0] == "h800" else ""
            body.append([*key, *speedups, f"{better / sums['joint']:.2f}", paper])
    if body:
        yield "### Where the gain comes from (Figure 7): over native, sums of P50, whole calls"
        yield ""
        head = [*REPLAY, "rail", "permutation", "joint"]
        yield from table([*head, "joint over the better one", "paper"], body)


def not_best(rows: list[Row]) -> Iterable[str]:
    """List the cases in which joint in one call is not the fastest, whole calls, at P50."""
    body, cases = [], 0
    for (key,), group in grouped((r for r in rows if "bound_us" in r), "case_key").items():
        times = {row["method"]: row["whole"]["median_us"] for row in group}
        if "joint" in times:
            cases += 1
            best = min(times, key=times.__getitem__)
            if best != "joint":
                body.append([key, best, f"{times['joint'] / times[best]:.3f}"])
    if cases:
        yield f"### Where joint is not the best: {len(body)} of {cases} cases"
        yield ""
        yield from table(["case", "fastest", "joint / fastest"], body)


def simulator(rows: list[Row]) -> Iterable[str]:
    """Say how near the simulator is, with what was measured beside it for all that is no network.

    First with as many empty calls; then, since the busiest rank packs and adds up longest before
    its first byte leaves, with how late it is beside the others, through NICs that cost nothing. A
    row that is off has its cause there if the second is near; or, if it is predicted too slow, in
    what empty calls take, if it is near with what was measured outside the network (`overlaps`).
    """
    timed = [row for row in rows if "predicted_us" in row and "same_as" not in row]
    if not timed:
        return
    body, off = [], [row for row in timed if abs(error(row)) > NEAR]
    for key, group in grouped(timed, "family", "layout", "rate", "method").items():
        errors = (spread([of(row) for row in group]) for of in (error, error_with_late))
        body.append([*key, len(group), *errors, sum(row in off for row in group)])
    late = [row for row in off if abs(error_with_late(row)) <= NEAR]
    beside = [row for row in off if row not in late and overlaps(row)]
    near = 1 - len(off) / len(timed)
    yield f"### The simulator: {near:.1%} of {len(timed)} rows within {NEAR:.0%} (target 90 %)"
    yield ""
    if any("late_us" in row for row in timed):
        with_late = statistics.mean(abs(error_with_late(row)) <= NEAR for row in timed)
        out = sum(abs(error_with_late(row)) > NEAR for row in timed if row not in off)
        yield f"With how late the busiest rank begins to put: {with_late:.1%}; {out} rows go out."
    else:
        yield "How late the busiest rank begins to put was not measured: it adds nothing here."
    yield ""
    head = ["family", "layout", "rate", "method", "rows", "error", "with packing", "off"]
    yield from table(head, body)
    yield ""
    yield (
        f"Of {len(off)} rows that are off, {len(late)} are near with how late the busiest rank "
        f"begins to put, measured beside them through NICs that cost nothing; {len(beside)} are "
        "predicted too slow, and near with what was measured outside the network in place of the "
        "empty calls: a part of what those do runs beside the wire."
    )
    for row in off:
        if row not in late and row not in beside:
            us = [row["predicted_us"], row["whole"]["median_us"], late_us(row)]
            numbers = ", ".join(f"{one:.0f}" for one in us)
            yield f"- not explained: {row['case_key']}, {row['method']}: predicted, measured, late"
            yield f"  {numbers} us"


def overlaps(row: Row) -> bool:
    """Say whether a prediction is too slow since what empty calls do runs beside the wire.

    Example: 70 us of network and 60 of empty calls, where 100 were measured, 80 of them network;
    with the other 20 in place of the 60 it is near, and would not be with 30 us of network
        >>> of = {"whole": {"median_us": 100.0}, "network": {"median_us": 80.0}}
        >>> overlaps({**of, "predicted_us": 130.0, "empties_us": 60.0})
        True
        >>> overlaps({**of, "predicted_us": 130.0, "empties_us": 100.0})
        False
    """
    if error(row) <= NEAR:
        return False
    whole_us, network_us = (row[form]["median_us"] for form in ("whole", "network"))
    network_model_us = row["predicted_us"] - row["empties_us"]
    return abs((network_model_us + whole_us - network_us) / whole_us - 1) <= NEAR


def error(row: Row) -> float:
    """Return how far the prediction is off, of what was measured."""
    return row["predicted_us"] / row["whole"]["median_us"] - 1


def error_with_late(row: Row) -> float:
    """Return the same with how late the busiest rank begins to put.

    Example: 100 us predicted and 30 late, where 125 were measured
        >>> row = {"predicted_us": 100.0, "late_us": 30.0, "whole": {"median_us": 125.0}}
        >>> round(error_with_late(row), 3)
        0.04
    """
    return (row["predicted_us"] + late_us(row)) / row["whole"]["median_us"] - 1


def late_us(row: Row) -> float:
    """Return how late the busiest rank begins to put; 0 in rows that do not have it."""
    return row.get("late_us", 0.0)
