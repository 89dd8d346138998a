"""A demand of one's own from a file: bytes from rank to rank, as .npy or CSV.

Letters: W = N * G ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import numpy as np

from railwave.sched import Demand
from railwave.topology import Topology
from railwave.workloads.load_files import rows_of_csv
from railwave.workloads.records import MAX_RECORDS


def read_demand(path: str | os.PathLike, topo: Topology) -> Demand:
    """Read a table of bytes, one row for each sending rank and one column for each receiving one.

    - `.npy`: an array of whole numbers, of any integer or float dtype.
    - `.csv`: one line a rank, whole numbers separated by commas. Blank lines, and lines that begin
      with `#`, are skipped.

    Args:
        path: the file; its suffix, in any case, says the format.
        topo: a cluster with as many ranks; rank = node * GPUs a node + local index.

    Returns:
        Demand; what stays within a node is not in it.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: another suffix, text that is not the format, another shape than
            (W, W), or an entry that is not a whole number in [0, 2**53); with file, rule and value.

    Example: the file `demand.csv` with the lines `0,8` and `3,0` gives, on 2 x 1 GPUs, 8 bytes from
        node 0 to node 1 and 3 back.
    """
    path = Path(path)
    readers = {".npy": _table_of_npy, ".csv": _table_of_csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"a demand must be a .npy or .csv file, got '{path}'")
    table = readers[path.suffix.lower()](path)
    ranks = topo.num_ranks
    if table.shape != (ranks, ranks):
        raise ValueError(
            f"{path}: must be of shape ({ranks}, {ranks}), the ranks of {topo.nodes} x "
            f"{topo.gpus_per_node} GPUs, got {table.shape}"
        )
    wrong = ~((table >= 0) & (table < MAX_RECORDS) & (table == np.floor(table)))
    for row, column in np.argwhere(wrong)[:1].tolist():
        raise ValueError(
            f"{path}, row {row}, column {column}: must be a whole number in [0, 2**53), "
            f"got {table[row, column]}"
        )
    if float(table.sum(dtype=np.float64)) >= MAX_RECORDS:
        raise ValueError(f"{path}: must have a sum below 2**53, got {table.sum(dtype=float):.4g}")
    return Demand.of(table, topo)


# What numpy raises for files that are not its own, or no longer.
DAMAGED = (ValueError, TypeError, EOFError, OverflowError, BadZipFile, TokenError)


def _table_of_npy(path: Path) -> np.ndarray:
    try:
        table = np.load(path, allow_pickle=False)
    except (*DAMAGED, MemoryError) as error:
        raise ValueError(f"{path}: must be a .npy file of numbers: {error}") from None
    if not isinstance(table, np.ndarray) or table.dtype.kind not in "iuf":
        raise TypeError(f"{path}: must be numbers, got {getattr(table, 'dtype', 'an archive')}")
    return table


def _table_of_csv(path: Path) -> np.ndarray:
    rows = rows_of_csv(path)
    for place, row in rows:
        if len(row) != len(rows[0][1]):
            raise ValueError(
                f"{path}, {place}: rows must have the same number of ranks, got {len(row)} and "
                f"{len(rows[0][1])} in {rows[0][0]}"
            )
    return np.array([row for _, row in rows], dtype=np.int64)
