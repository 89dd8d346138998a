"""Pictures of results: functions from plain data to a matplotlib Figure that nothing global knows.

pyplot is not used. Importing this needs matplotlib: pip install 'railwave[notebook]'.
"""

try:
    import matplotlib.axes
    import matplotlib.figure  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "railwave.plots needs matplotlib: pip install 'railwave[notebook]'"
    ) from error

from railwave.plots.comparison import plot_comparison
from railwave.plots.demand import plot_demand
from railwave.plots.path_map import plot_path_map
from railwave.plots.rails import plot_rail_shares
from railwave.plots.waves import plot_waves

__all__ = [
    "plot_comparison",
    "plot_demand",
    "plot_path_map",
    "plot_rail_shares",
    "plot_waves",
]
