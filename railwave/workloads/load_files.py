"""Expert loads from files: a table of layers by experts, as CSV or JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from railwave.workloads.records import MAX_RECORDS


def read_loads(path: str | os.PathLike) -> torch.Tensor:
    """Read expert loads, one row a layer.

    - `.csv`: one line a layer, numbers separated by commas. Blank lines, and lines that begin with
      `#`, are skipped. If the first line left begins with the field `layer`, it is a header, and
      the first number of every line is the layer's, which must run 0, 1, 2, ... A header of
      numbers alone cannot be told from a layer: leave it out.
    - `.json`: a list of lists, or an object {"0": [...], "1": [...], ...} of lists by layer, which
      may be in any order but must be layers 0, 1, 2, ...

    Args:
        path: the file; its suffix, in any case, says the format.

    Returns:
        (layers, experts) int64.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another suffix, no layers, text that is not the format, layers with different
            numbers of experts, or an entry that is not a whole number in [0, 2**53); with file,
            line or field, rule and value.

    Example: the file `loads.csv` with the lines `3,1` and `0,4` gives [[3, 1], [0, 4]].
    """
    path = Path(path)
    readers = {".csv": rows_of_csv, ".json": _rows_of_json}
    if path.suffix.lower() not in readers:
        raise ValueError(f"path must end in .csv or .json, got '{path}'")
    rows = readers[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"{path}: must hold at least one layer, got none")
    first_place, first = rows[0]
    for place, row in rows:
        if not row:
            raise ValueError(f"{path}, {place}: must hold at least one expert, got none")
        if len(row) != len(first):
            raise ValueError(
                f"{path}, {place}: layers must have the same number of experts, "
                f"got {len(row)} and {len(first)} in {first_place}"
            )
    return torch.tensor([row for _, row in rows], dtype=torch.int64, device="cpu")


def rows_of_csv(path: Path) -> list[tuple[str, list[int]]]:
    """List (place, counts) of each line of numbers; see `read_loads` for what is skipped.

    Raises:
        FileNotFoundError, ValueError: as `read_loads`.

    Example: the file `loads.csv` with the lines `# two layers`, `3,1` and `0,4` gives
        [("line 2", [3, 1]), ("line 3", [0, 4])].
    """
    text = _read_text(path)
    lines = [
        (f"line {number}", [field.strip().strip('"') for field in line.split(",")])
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    has_layers = bool(lines) and lines[0][1][0].lower() == "layer"
    rows = []
    for layer, (place, fields) in enumerate(lines[has_layers:]):
        if has_layers:
            if fields[0] != str(layer):
                raise ValueError(
                    f"{path}, {place}, field 1: layers must run 0, 1, 2, ..., "
                    f"so {layer} here, got {fields[0]!r}"
                )
            fields = fields[1:]
        counts = [
            _checked_count(_number(field), f"{path}, {place}, field {number}")
            for number, field in enumerate(fields, start=1 + has_layers)
        ]
        rows.append((place, counts))
    return rows


def _number(field: str) -> Any:
    """Return the number that a field writes out, or the field."""
    try:
        return field if "_" in field else float(field)  # Python alone reads 1_000 as a number
    except ValueError:
        return field


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 text: {error}") from None


def _rows_of_json(path: Path) -> list[tuple[str, list[int]]]:
    """List (place, counts) of each layer."""
    text = _read_text(path)
    try:
        table = json.loads(text, object_pairs_hook=_refuse_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: must be JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if isinstance(table, dict):
        wanted = [str(layer) for layer in range(len(table))]
        if set(table) != set(wanted):
            raise ValueError(
                f"{path}: layers must be 0 to {len(table) - 1}, got {sorted(table)[:8]}"
            )
        table = [table[layer] for layer in wanted]
    if not isinstance(table, list):
        raise ValueError(f"{path}: must be a list or an object of layers, got {table!r:.40}")
    rows = []
    for layer, row in enumerate(table):
        if not isinstance(row, list):
            raise ValueError(f"{path}, layer {layer}: must be a list of counts, got {row!r:.40}")
        counts = [
            _checked_count(value, f"{path}, layer {layer}, expert {expert}")
            for expert, value in enumerate(row)
        ]
        rows.append((f"layer {layer}", counts))
    return rows


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        repeated = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"a layer must appear once, got {repeated!r} again")
    return dict(pairs)


def _checked_count(value: Any, place: str) -> int:
    """Return a whole number in [0, 2**53); 3.0 counts as one, true does not."""
    is_number = type(value) in (int, float)
    if not (is_number and 0 <= value < MAX_RECORDS and value == int(value)):
        raise ValueError(f"{place}: must be a whole number in [0, 2**53), got {value!r:.40}")
    return int(value)
