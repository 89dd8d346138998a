"""Decide, on the host and in plain Python and torch, what RailWave moves where and when.

Waves, quotas and matching as readable references, the plan of a node, traffic descriptors, and
whole-cluster schedulers with what they are compared with. Integers in, integers out: no device, no
group, no clock but for how long planning took; never imports triton.
"""

from railwave.sched.audit import audit, bound_s
from railwave.sched.demand import Demand
from railwave.sched.descriptors import (
    payload_per_gpu,
    receiver_concentration,
    source_rail_skew,
)
from railwave.sched.matching import ProxyMatch, RailMatch, assign_ref, match_ref
from railwave.sched.plan import Plan, plan
from railwave.sched.quota import native_quota_ref, quota_ref
from railwave.sched.schedule import Redistribution, Schedule
from railwave.sched.schedulers import SCHEDULERS
from railwave.sched.selector import Anchor, Decision, Scales, select
from railwave.sched.waves import wave_peer, wave_sender, waves

__all__ = [
    "SCHEDULERS",
    "Anchor",
    "Decision",
    "Demand",
    "Plan",
    "ProxyMatch",
    "RailMatch",
    "Redistribution",
    "Scales",
    "Schedule",
    "assign_ref",
    "audit",
    "bound_s",
    "match_ref",
    "native_quota_ref",
    "payload_per_gpu",
    "plan",
    "quota_ref",
    "receiver_concentration",
    "select",
    "source_rail_skew",
    "wave_peer",
    "wave_sender",
    "waves",
]
