"""All schedulers by name: demand in, transfers with their windows out."""

from __future__ import annotations

from collections.abc import Callable

from railwave.sched.birkhoff import fast
from railwave.sched.granted import granted
from railwave.sched.paths import joint, native, permutation, rail, rate
from railwave.sched.schedule import Schedule
from railwave.sched.spray import rails_lpt

# Each takes (demand, *, windows=None, ...). Only native and rail read the windows.
SCHEDULERS: dict[str, Callable[..., Schedule]] = {
    "native": native,
    "rail": rail,
    "permutation": permutation,
    "joint": joint,
    "granted": granted,
    "rails_lpt": rails_lpt,
    "fast": fast,
    "rate": rate,
}
