"""Move the tokens of Mixture-of-Experts models between GPUs, evenly over rails and without incast.

`LocalWorld` runs a whole cluster's dispatch and combine in this process; `init` makes this process
one rank of several, all of which call `dispatch` and `combine`; `plan` shows how one node's records
are spread over its rails. See README.md for examples.
"""

import logging as _logging

from railwave._version import __version__ as __version__
from railwave.communicator import Communicator as Communicator
from railwave.cost_table import CostTable as CostTable
from railwave.default import check as check
from railwave.default import combine as combine
from railwave.default import combine_weights as combine_weights
from railwave.default import dispatch as dispatch
from railwave.default import finalize as finalize
from railwave.default import init as init
from railwave.default import reset as reset
from railwave.errors import PeerError as PeerError
from railwave.errors import PeerTimeoutError as PeerTimeoutError
from railwave.errors import ReceiveOverflowError as ReceiveOverflowError
from railwave.handle import Handle as Handle
from railwave.handle import Received as Received
from railwave.memory import eplb_bytes as eplb_bytes
from railwave.memory import paper_workspace_bytes as paper_workspace_bytes
from railwave.memory import workspace as workspace
from railwave.memory import workspace_bytes as workspace_bytes
from railwave.port_counters import PortCounters as PortCounters
from railwave.sched import Plan as Plan
from railwave.sched import plan as plan
from railwave.stats import Stats as Stats
from railwave.topology import Topology as Topology
from railwave.trace_files import merge_traces as merge_traces
from railwave.tracing import trace as trace
from railwave.workloads import Placement as Placement
from railwave.world import LocalWorld as LocalWorld

__all__ = [
    "Communicator",
    "CostTable",
    "Handle",
    "LocalWorld",
    "PeerError",
    "PeerTimeoutError",
    "Placement",
    "Plan",
    "PortCounters",
    "ReceiveOverflowError",
    "Received",
    "Stats",
    "Topology",
    "__version__",
    "check",
    "combine",
    "combine_weights",
    "dispatch",
    "eplb_bytes",
    "finalize",
    "init",
    "merge_traces",
    "paper_workspace_bytes",
    "plan",
    "reset",
    "trace",
    "workspace",
    "workspace_bytes",
]

# Silent unless the caller's program asks for logs.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
