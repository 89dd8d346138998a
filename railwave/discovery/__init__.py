"""Find the GPUs and NIC ports of this node, how far apart they are, and which port each GPU uses.

A rail is a port that some GPU uses; rails are numbered by the names of their ports, so that nodes
built alike number them alike.
"""

from railwave.discovery.agree import Said as Said
from railwave.discovery.agree import differences as differences
from railwave.discovery.agree import joined as joined
from railwave.discovery.agree import visible_gpus as visible_gpus
from railwave.discovery.agree import visible_rails as visible_rails
from railwave.discovery.node import LINK_MEANING as LINK_MEANING
from railwave.discovery.node import LINKS as LINKS
from railwave.discovery.node import Distance as Distance
from railwave.discovery.node import Gpu as Gpu
from railwave.discovery.node import Nic as Nic
from railwave.discovery.node import Node as Node
from railwave.discovery.spread import arrange as arrange
from railwave.discovery.system import SYSFS as SYSFS
from railwave.discovery.system import discover as discover
from railwave.discovery.system import is_own_sysfs as is_own_sysfs

__all__ = [
    "LINKS",
    "LINK_MEANING",
    "SYSFS",
    "Distance",
    "Gpu",
    "Nic",
    "Node",
    "Said",
    "arrange",
    "differences",
    "discover",
    "is_own_sysfs",
    "joined",
    "visible_gpus",
    "visible_rails",
]
