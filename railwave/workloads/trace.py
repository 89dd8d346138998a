"""Expert counts in the SmartMoE trace format.

A folder holds `table_iter<I>_rank<r>.log`, one file a source rank. Each line is
`layer:[[counts of the experts], ...]` with one list a micro-batch.

Shape: E experts.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from railwave._check import check_non_negative_int
from railwave.workloads.tokens import MAX_COUNT, check_counts

_FILE_NAME = re.compile(r"table_iter(0|[1-9][0-9]*)_rank(0|[1-9][0-9]*)\.log")


def list_iterations(folder: str | os.PathLike) -> list[int]:
    """List the iterations that a trace folder holds, ascending.

    Raises:
        FileNotFoundError: folder is not a directory.

    Example: a folder with table_iter501_rank0.log and table_iter501_rank1.log gives [501].
    """
    return sorted(_trace_files(folder))


def read_counts(
    folder: str | os.PathLike, iteration: int, layer: int, *, micro_batch: int = 0
) -> torch.Tensor:
    """Read the expert counts of every source rank for one layer and micro-batch.

    Args:
        folder: where the files are.
        iteration: I in the file names.
        layer: the number before the colon of a line.
        micro_batch: place in the line's list.

    Returns:
        (ranks, E) int64, tokens that each rank sends to each expert.

    Raises:
        FileNotFoundError: folder is not a directory.
        TypeError: iteration, layer or micro_batch is not an integer.
        ValueError: no such iteration, layer or micro-batch, a rank is missing, a line is bad
            (with file and line number), or ranks differ in their number of experts.

    Example: files with the lines `0:[[3.0, 1.0]]` (rank 0) and `0:[[0.0, 4.0]]` (rank 1) give
        [[3, 1], [0, 4]] for layer 0.
    """
    iteration = check_non_negative_int(iteration, "iteration")
    layer = check_non_negative_int(layer, "layer")
    micro_batch = check_non_negative_int(micro_batch, "micro_batch")
    rows = []
    for path in _files_of_iteration(folder, iteration):
        layers = _read_layers(path)
        if layer not in layers:
            raise ValueError(f"layer must be one of {sorted(layers)} in {path}, got {layer}")
        table = layers[layer]
        if micro_batch >= len(table):
            raise ValueError(
                f"micro_batch must be below {len(table)} (layer {layer} of {path}), "
                f"got {micro_batch}"
            )
        row = table[micro_batch]
        if rows and len(row) != len(rows[0]):
            raise ValueError(
                f"ranks must have the same number of experts, got {len(rows[0])} for rank 0 "
                f"and {len(row)} in {path} (layer {layer})"
            )
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def read_iteration(
    folder: str | os.PathLike, iteration: int
) -> dict[tuple[int, int], torch.Tensor]:
    """Read what `read_counts` returns for every (layer, micro-batch) of an iteration, ascending.

    Each file is read once.

    Raises:
        FileNotFoundError, TypeError, ValueError: as `read_counts`, or ranks differ in what they
            hold.

    Example: files with the lines `0:[[3.0, 1.0]]` (rank 0) and `0:[[0.0, 4.0]]` (rank 1) give
        {(0, 0): [[3, 1], [0, 4]]}.
    """
    ranks: list[dict[tuple[int, int], list[int]]] = []
    for path in _files_of_iteration(folder, check_non_negative_int(iteration, "iteration")):
        tables = sorted(_read_layers(path).items())
        ranks.append({(layer, m): row for layer, table in tables for m, row in enumerate(table)})
        wanted, sizes = ({p: len(row) for p, row in r.items()} for r in (ranks[0], ranks[-1]))
        if sizes != wanted:
            place = min(p for p in wanted.keys() | sizes.keys() if wanted.get(p) != sizes.get(p))
            raise ValueError(
                "ranks must have the same layers, micro-batches and experts, got for (layer, "
                f"micro-batch) {place} {wanted.get(place, 0)} experts for rank 0 and "
                f"{sizes.get(place, 0)} in {path}"
            )
    return {
        place: torch.tensor([rows[place] for rows in ranks], device="cpu") for place in ranks[0]
    }


def write_counts(folder: str | os.PathLike, iteration: int, counts: torch.Tensor) -> None:
    """Write the counts of one iteration, a file a rank; layers are numbered from 0.

    Args:
        folder: where to write; made if missing. Files of the same ranks are replaced.
        iteration: I in the file names.
        counts: (ranks, layers, micro_batches, E) integers in [0, 2**53], no axis empty.

    Raises:
        TypeError: iteration or counts are not integers.
        ValueError: counts have a wrong shape or range, or the folder already holds ranks of this
            iteration that would not be replaced.

    Example: counts [[[[3, 1]]]] give the file table_iter0_rank0.log with the line
        `0:[[3.0, 1.0]]` for iteration 0.
    """
    iteration = check_non_negative_int(iteration, "iteration")
    check_counts("counts", counts)
    if counts.dim() != 4 or counts.numel() == 0:
        raise ValueError(
            "counts must be of shape (ranks, layers, micro_batches, experts), no axis empty, "
            f"got {tuple(counts.shape)}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stale = [r for r in _trace_files(folder).get(iteration, {}) if r >= len(counts)]
    if stale:
        raise ValueError(
            f"folder must not hold other ranks of iteration {iteration} than the {len(counts)} "
            f"written, got ranks {sorted(stale)} in {folder}; remove them first"
        )
    for rank, layers in enumerate(counts.cpu().to(torch.float64).tolist()):
        lines = [f"{layer}:{json.dumps(table)}\n" for layer, table in enumerate(layers)]
        path = folder / f"table_iter{iteration}_rank{rank}.log"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _trace_files(folder: str | os.PathLike) -> dict[int, dict[int, Path]]:
    """Map iteration, then rank, to the file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be an existing directory of traces, got '{folder}'")
    files: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _FILE_NAME.fullmatch(path.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    return files


def _files_of_iteration(folder: str | os.PathLike, iteration: int) -> list[Path]:
    """List the files of ranks 0, 1, ..., refusing a hole."""
    files = _trace_files(folder)
    if iteration not in files:
        raise ValueError(f"iteration must be one of {sorted(files)} in {folder}, got {iteration}")
    of_rank = files[iteration]
    if max(of_rank) >= len(of_rank):
        missing = [rank for rank in range(len(of_rank) + 1) if rank not in of_rank]
        raise ValueError(
            f"folder must hold ranks 0 to {max(of_rank)} of iteration {iteration}, "
            f"got none for ranks {missing} and perhaps more in {folder}"
        )
    return [of_rank[rank] for rank in range(len(of_rank))]


def _read_layers(path: Path) -> dict[int, list[list[int]]]:
    """Map layer to its counts, [micro-batch][expert]; blank lines are skipped."""
    layers: dict[int, list[list[int]]] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            layer, table = _parse_line(line)
            if layer in layers:
                raise ValueError(f"layer {layer} must appear once")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {line_number}: {error}") from None
        layers[layer] = table
    return layers


def _parse_line(line: str) -> tuple[int, list[list[int]]]:
    layer, _, body = line.partition(":")
    if not re.fullmatch(r"\s*[0-9]+\s*", layer):
        raise ValueError(f"a line must be 'layer:[[counts], ...]', got {line[:40]!r}")
    try:
        table = json.loads(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"counts must be lists of numbers, got {line[:40]!r} ({error})") from None
    if not (isinstance(table, list) and table and all(isinstance(r, list) and r for r in table)):
        raise ValueError(f"counts must be non-empty lists in a list, got {body[:40]!r}")
    if len({len(row) for row in table}) != 1:
        raise ValueError(
            f"micro-batches must have the same number of experts, got {[len(r) for r in table]}"
        )
    for count in (count for row in table for count in row):
        is_number = type(count) in (int, float)
        if not (is_number and 0 <= count <= MAX_COUNT and count == int(count)):
            raise ValueError(f"counts must be integers in [0, 2**53], got {count!r}")
    return int(layer), [[int(count) for count in row] for row in table]
