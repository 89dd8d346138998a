"""Dispatch and combine as the stages of one PE.

`dispatch` and `combine` are generators over an `Exchange`, which holds what one PE has: they launch
the kernels of one stage and yield the words that the next stage waits for. Who drives them decides
what a yield means: a process of its own may go on (the kernels wait) or poll the words first,
`LocalWorld` runs other PEs until the words are there. No stage waits for a word that is written in
the same or a later stage of any PE, and no program waits for another program of its launch; so any
order of ready PEs comes to an end.
"""

from railwave.exchange.combine import PLAIN as PLAIN
from railwave.exchange.combine import Options as Options
from railwave.exchange.combine import apart as apart
from railwave.exchange.combine import combine as combine
from railwave.exchange.dispatch import dispatch as dispatch
from railwave.exchange.pe import CallsDiffer as CallsDiffer
from railwave.exchange.pe import Exchange as Exchange
from railwave.exchange.pe import Failure as Failure
from railwave.exchange.pe import Late as Late
from railwave.exchange.pe import Observer as Observer
from railwave.exchange.pe import Stages as Stages
from railwave.exchange.pe import Wait as Wait
from railwave.exchange.pe import Waits as Waits
from railwave.exchange.refuse import refuse as refuse

__all__ = [
    "PLAIN",
    "CallsDiffer",
    "Exchange",
    "Failure",
    "Late",
    "Observer",
    "Options",
    "Stages",
    "Wait",
    "Waits",
    "apart",
    "combine",
    "dispatch",
    "refuse",
]
