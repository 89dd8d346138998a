"""Make the tables of RESULTS.md's section "Emulated NICs" from the JSON lines alone.

python -m bench.evidence bench/results/emulated-h200.jsonl

Markdown goes to stdout. Of rows with the same case and method that with most samples counts, or the
last of those. Sums of quantiles by layer state how many layers they are of.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.emulated_cases import METHODS
from bench.evidence_replay import (
    Row,
    ablation,
    grouped,
    not_best,
    of_family,
    replay_tables,
    simulator,
    table,
)
from bench.output import read_results


def main(argv: list[str] | None = None) -> None:
    """Print the tables of the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines of bench.run emulated")
    try:
        rows = read(parser.parse_args(argv).files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not rows:
        parser.error("the files must have rows of bench.run emulated, got none")
    print("\n".join(tables(rows)))


def read(files: Iterable[Path]) -> list[Row]:
    """Return the rows of some files: of a case and method the last of those with most samples.

    Raises:
        OSError, ValueError: a file cannot be read, or a row of it lacks what names it.
    """
    found: dict[tuple[Any, Any], Row] = {}
    for file in files:
        for row in read_results(file):
            key = row.get("case_key"), row.get("method")
            before = found.get(key, {}).get("samples", 0)
            if row.get("bench") != "emulated" or row.get("samples", 0) < before:
                continue
            if missing := {"case_key", "family", "layout", "method"} - row.keys():
                raise ValueError(f"a row of {file} must have {sorted(missing)}, got {sorted(row)}")
            found[key] = row
    return list(found.values())


def tables(rows: list[Row]) -> list[str]:
    """Return all sections as lines of markdown, those without rows left out."""
    lines = [*about(rows)]
    for make in (
        *(replay_tables, ablation, not_best, simulator, ultraep, zipf, figure_9),
        *(shares, packing, selector, workspace),
    ):
        made = list(make(rows))
        lines += ["", *made] if made else []
    return lines


def about(rows: list[Row]) -> Iterable[str]:
    """Say what the rows were measured on."""
    for name in ("machine", "date", "torch", "triton", "pes", "hidden"):
        values = sorted({str(row[name]) for row in rows if name in row})
        yield f"- {name}: {', '.join(values) or 'not stated'}"
    yield f"- rows: {len(rows)}"


def _times(rows: list[Row], *names: str) -> Iterable[list[Any]]:
    """Yield a line a case: its names, then T* and each method's P50 in ms, and the paper's."""
    for key, group in grouped(rows, *names).items():
        methods = {row["method"]: row for row in group}
        line = [*key, f"{group[0]['bound_us'] / 1e3:.2f}"]
        for name in METHODS:
            ms = methods[name]["whole"]["median_us"] / 1e3 if name in methods else math.nan
            paper = methods.get(name, {}).get("paper_ms")
            line.append(f"{ms:.2f}".replace("nan", "") + (f" ({paper:.4g})" if paper else ""))
        yield line


def ultraep(rows: list[Row]) -> Iterable[str]:
    """Tell UltraEP's cases (Table 2)."""
    found = of_family(rows, "ultraep")
    if found:
        yield "### UltraEP, ms there and back, whole calls, P50 (the paper's, at its own scale)"
        yield ""
        names = "layout", "rate", "case"
        yield from table([*names, "T*", *METHODS], _times(found, *names))


def zipf(rows: list[Row]) -> Iterable[str]:
    """Tell pairs of nodes that differ: whole calls, and the network alone over T*."""
    found, names = of_family(rows, "zipf"), ("layout", "rate", "seed")
    if found:
        yield "### Pairs that differ, Zipf(2), ms there and back, whole calls, P50"
        yield ""
        yield from table([*names, "T*", *METHODS], _times(found, *names))
        yield ""
        yield "Network alone over T*, P50:"
        yield ""
        body = []
        for key, group in grouped(found, *names).items():
            of = {row["method"]: row["network"]["median_us"] / row["bound_us"] for row in group}
            body.append([*key, *(f"{of[name]:.3f}" if name in of else "" for name in METHODS)])
        yield from table([*names, *METHODS], body)
        outs = [row["most_out"] for row in rows if "most_out" in row]
        if outs:
            yield ""
            yield f"Grants out at once on a rail, in all rows of granted: {max(outs)} at most."


def figure_9(rows: list[Row]) -> Iterable[str]:
    """Tell rail skew by concurrency (Figure 9)."""
    found, names = of_family(rows, "figure 9"), ("mib", "rail_skew", "concurrency")
    if found:
        yield "### Rail skew x concurrency (Figure 9), ms there and back, whole calls, P50 (paper)"
        yield ""
        yield from table([*names, "T*", *METHODS], _times(found, *names))


def shares(rows: list[Row]) -> Iterable[str]:
    """Tell what each NIC position carries (Figure 8), the mean of the layers."""
    body = []
    for key, group in grouped(of_family(rows, "shares"), "layout", "pattern", "method").items():
        columns = [
            ", ".join(f"{100 * statistics.mean(part):.1f}" for part in zip(*of, strict=True))
            for of in ([row["transmit"] for row in group], [row["receive"] for row in group])
        ]
        paper = group[0]["paper_transmit"] if key[0] == "h20" else None
        text = ", ".join(f"{100 * share:.1f}" for share in paper or [])
        body.append([*key, len(group), *columns, text])
    if body:
        yield "### Shares of the NIC positions, %, as the kernels counted (Figure 8)"
        yield ""
        head = ["layout", "pattern", "method", "layers", "transmit", "receive", "paper, transmit"]
        yield from table(head, body)


def packing(rows: list[Row]) -> Iterable[str]:
    """Tell what packing beside a put saves (Table 6)."""
    body = []
    for (mib,), group in grouped(of_family(rows, "packing"), "mib").items():
        us = {row["method"]: row["whole"]["median_us"] for row in group}
        paper = {row["method"]: row["paper_ms"] for row in group}
        if {"pipelined", "sequential"} <= us.keys():
            cut, said = (1 - of["pipelined"] / of["sequential"] for of in (us, paper))
            pair = [f"{us[name] / 1e3:.3f} ({paper[name]})" for name in ("sequential", "pipelined")]
            body.append([mib, *pair, f"{100 * cut:.2f} ({100 * said:.2f})"])
    if body:
        yield "### Packing beside the put before it (Table 6), ms (the paper's)"
        yield ""
        yield from table(["MiB a GPU, paper's scale", "in turn", "beside", "less, %"], body)


def selector(rows: list[Row]) -> Iterable[str]:
    """Tell what the frozen table chose for requests that it lacks (Table 5)."""
    for row in of_family(rows, "selector"):
        found = row["summary"]
        yield "### Selector on unseen requests (Table 5)"
        yield ""
        yield (
            f"{len(row['anchors'])} anchors; {found['requests']} requests, {found['switches']} not "
            f"joint, of which {found['helped']} faster than joint; joint over chosen where it was "
            f"not joint: {found['ratio_switches']}, over all: {found['ratio_all']}. Paper: 12 "
            "requests, 4 switches, all faster, 1.061-1.196."
        )


def workspace(rows: list[Row]) -> Iterable[str]:
    """Tell what a GPU holds (Table 7)."""
    for row in of_family(rows, "workspace"):
        gib: Callable[[float], str] = lambda size: f"{size / 2**30:.3f}"  # noqa: E731
        yield "### Memory, GiB a GPU, for the paper's configuration (Table 7)"
        yield ""
        ours = [[f"railwave, {name}", gib(size)] for name, size in row["workspace_bytes"].items()]
        paper = [["the paper's formula (13)", gib(row["paper_workspace_bytes"])]]
        eplb = [[f"EPLB, {name}", gib(size)] for name, size in row["eplb_bytes"].items()]
        yield from table(["what", "GiB"], [*ours, *paper, *eplb])
        yield ""
        yield f"railwave with room for {row['max_recv_rows']} rows a rank (`max_recv_rows`)."


if __name__ == "__main__":
    main()
