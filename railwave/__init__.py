"""Move the tokens of Mixture-of-Experts models between GPUs, evenly over rails and without incast.

`LocalWorld` runs a whole cluster's dispatch and combine in this process; `plan` shows how one
node's records are spread over its rails. See README.md for an example.
"""

import logging as _logging

from railwave._version import __version__ as __version__
from railwave.handle import Handle as Handle
from railwave.handle import Received as Received
from railwave.sched import Plan as Plan
from railwave.sched import plan as plan
from railwave.topology import Topology as Topology
from railwave.world import LocalWorld as LocalWorld

__all__ = ["Handle", "LocalWorld", "Plan", "Received", "Topology", "__version__", "plan"]

# Silent unless the caller's program asks for logs.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
