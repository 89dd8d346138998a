"""Where the recorded traces are, for tests that use them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def find_real_trace():
    place = os.environ.get("RAILWAVE_TRACE")
    if place and (Path(place) / "table_iter501_rank0.log").is_file():
        return Path(place)
    return None


REAL_TRACE = find_real_trace()
needs_real_trace = pytest.mark.skipif(
    REAL_TRACE is None,
    reason="no SmartMoE trace (SmartMoE-AE, moe_trace) in the folder RAILWAVE_TRACE",
)
