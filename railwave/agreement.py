"""What all ranks must agree on, at init and in every call, and how they say that they do not."""

from __future__ import annotations

import os
from typing import NoReturn

import torch
import torch.distributed as dist

from railwave.config import WAVES, Config
from railwave.errors import PeerError
from railwave.handle import Call
from railwave.heap import Gather
from railwave.topology import Topology

DEADLINE_S = 300.0
MAX_DEADLINE_S = 1e9
# Fields of a config that must be equal.
SAME = (
    *("topo", "num_experts", "top_k", "hidden", "max_tokens_per_rank", "dtype"),
    *("expert_to_rank", "staging_records", "paths", "max_recv_rows", "num_sms", "pipeline"),
    "nic_gbs",
)


def check_same_config(
    config: Config, others: dict[str, str], gather: Gather, rank: int, wrong: Exception | None
) -> None:
    """Raise on every rank if an argument is wrong on any, or differs.

    Args:
        config: not looked at where something is wrong.
        others: arguments beside it, as texts.
        wrong: what is wrong with this rank's.

    Raises:
        Exception: `wrong`, here.
        PeerError: an argument of another rank is wrong.
        ValueError: an argument differs.
    """
    own = {} if wrong else {**others, **{name: repr(getattr(config, name)) for name in SAME}}
    said = gather((str(wrong or ""), own))
    if wrong:
        raise wrong
    bad = {rank: text for rank, (text, _) in enumerate(said) if text}
    if bad:
        raise PeerError(f"rank(s) called init wrongly: {bad}")
    for other_rank, (_, other) in enumerate(said):
        for name, value in own.items():
            if other[name] != value:
                ours, theirs = shortened(value, other[name])
                raise ValueError(
                    f"{name} must be the same on all ranks, got {ours} at rank {rank} and {theirs} "
                    f"at rank {other_rank}"
                )


def shortened(a: str, b: str) -> list[str]:
    """Cut two texts to where they differ, if they are long."""
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, first - 60)
    return [
        text if len(text) <= 200 else f"...{text[start : first + 60]}... (from character {start})"
        for text in (a, b)
    ]


def say_call(call: Call, grads: str) -> str:
    """Say what a dispatch was called with, for others whose call differs."""
    text = f"dispatch on path {call.path}, hidden {call.x.shape[1]} {call.x.dtype}"
    kinds = [f"{extra.shape[1]} {extra.dtype}" for extra in call.extras]
    text += f", extras {', '.join(kinds)}" if kinds else ""
    text += f", gradients of {grads}" if grads else ""
    if call.again:
        return f"{text}, with the handle of call {call.again.epoch}"
    assert call.topk_idx is not None
    top_k, dtype = call.topk_idx.shape[1], call.topk_idx.dtype
    return f"{text}, top-k {top_k} {dtype}, static_shapes {call.static_shapes}"


def check_capture(capturing: bool, decided_there: bool) -> None:
    if capturing and not decided_there:
        raise RuntimeError(
            "a CUDA graph cannot hold a call that waits for the GPU: dispatch with "
            "static_shapes=True, and combine with that dispatch's handle"
        )


def raise_differ(verb: str, wrong: Exception | None, texts: list[str]) -> NoReturn:
    if wrong:
        raise wrong from None
    said = {rank: text.partition(": ") for rank, text in enumerate(texts)}
    bad = {rank: text for rank, (how, _, text) in said.items() if how == "wrong"}
    if bad:
        raise PeerError(f"nothing moved in {verb}: rank(s) called it wrongly: {bad}") from None
    callers: dict[str, list[int]] = {}
    for rank, (_, _, text) in said.items():
        callers.setdefault(text, []).append(rank)
    calls = "; ".join(f"{text} by ranks {ranks}" for text, ranks in callers.items())
    text = f"nothing moved in {verb}: calls must agree on all ranks, got {calls}"
    raise PeerError(text) from None


def check_fit(config: Config, sharing: int, programs: int) -> None:
    """Check that what waits at once leaves room on a GPU: a program for each peer, at least.

    Granted's put is one program. With a GPU a rail all has landed when it ends, and unpack waits
    for nothing then; beside it unpack waits where there is room (`programs_beside_granted`).
    """
    all_at_once = sorted(set(config.paths) - set(WAVES))
    if config.topo.max_gpus_per_rail == 1:
        all_at_once = [path for path in all_at_once if path != "granted"]
    if sharing > 1 and all_at_once and config.topo.nodes - 1 > programs:
        raise ValueError(
            f"paths must be without {', '.join(all_at_once)} where {sharing} ranks share a GPU "
            f"and there are {config.topo.nodes} nodes: {programs} programs of each may wait at once"
        )


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checked_wire(
    wire: str | None, device: torch.device, nic_gbs: float | None = None
) -> str | None:
    if wire not in (None, "nvshmem"):
        raise ValueError(f"wire must be None or 'nvshmem', got {wire!r}")
    if wire and device.type == "cpu":
        raise ValueError(f"wire must be None on a CPU, got {wire!r}")
    if wire and nic_gbs is not None:
        raise ValueError(f"wire must be None where NICs are emulated (nic_gbs), got {wire!r}")
    return wire


def checked_deadline(deadline_s: float | None) -> float:
    name, value = "deadline_s", deadline_s
    if deadline_s is None:
        name, value = "RAILWAVE_DEADLINE_S", os.environ.get("RAILWAVE_DEADLINE_S", DEADLINE_S)
    elif isinstance(deadline_s, (str, bytes, bool)):
        raise TypeError(f"deadline_s must be a number of seconds, got {deadline_s!r}")
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be a number of seconds, got {value!r}") from None
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise ValueError(f"{name} must be above 0 and at most 1e9 seconds, got {value!r}")
    return seconds


def check_group(group: dist.ProcessGroup | None, topo: Topology) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised first, for example by "
            'torch.distributed.init_process_group("gloo") under torchrun'
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this rank")
    ranks = dist.get_world_size(group)
    if ranks != topo.num_ranks:
        raise ValueError(
            f"group must have topo.num_ranks = {topo.num_ranks} ranks ({topo.nodes} nodes x "
            f"{topo.gpus_per_node} GPUs), got {ranks}; start as many processes (torchrun "
            "--nproc-per-node), or change topo"
        )
