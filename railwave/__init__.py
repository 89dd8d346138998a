"""Move the tokens of Mixture-of-Experts models between GPUs, evenly over rails and without incast.

`LocalWorld` runs a whole cluster's dispatch and combine in this process; `plan` shows how one
node's records are spread over its rails. See README.md for an example.
"""

import logging as _logging
from collections.abc import Callable as _Callable
from inspect import signature as _signature
from typing import ParamSpec as _ParamSpec

import torch

from railwave._version import __version__ as __version__
from railwave.communicator import Communicator as Communicator
from railwave.errors import PeerError as PeerError
from railwave.errors import PeerTimeoutError as PeerTimeoutError
from railwave.handle import Handle as Handle
from railwave.handle import Received as Received
from railwave.sched import Plan as Plan
from railwave.sched import plan as plan
from railwave.topology import Topology as Topology
from railwave.world import LocalWorld as LocalWorld

__all__ = [
    "Communicator",
    "Handle",
    "LocalWorld",
    "PeerError",
    "PeerTimeoutError",
    "Plan",
    "Received",
    "Topology",
    "__version__",
    "combine",
    "dispatch",
    "finalize",
    "init",
    "plan",
]

_default: Communicator | None = None
_Arguments = _ParamSpec("_Arguments")


def _with_arguments_of(
    made: _Callable[_Arguments, Communicator],
) -> _Callable[[_Callable[..., Communicator]], _Callable[_Arguments, Communicator]]:
    """Give a function the signature of what it makes, for type checkers and `help`."""

    def decorate(make: _Callable[..., Communicator]) -> _Callable[_Arguments, Communicator]:
        make.__signature__ = _signature(made).replace(return_annotation=Communicator)  # type: ignore[attr-defined]
        return make

    return decorate


@_with_arguments_of(Communicator)
def init(*args: object, **kwargs: object) -> Communicator:
    """Make a `Communicator` and the default of `dispatch` and `combine`. All ranks call it."""
    global _default
    _default = Communicator(*args, **kwargs)  # type: ignore[arg-type]
    return _default


def dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, path: str = "joint"
) -> Received:
    """Call `Communicator.dispatch` of the default one."""
    return _current().dispatch(x, topk_idx, topk_weights, path=path)


def combine(out: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Call `Communicator.combine` of the default one."""
    return _current().combine(out, handle)


def finalize() -> None:
    """Close the default communicator, if there is one."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


def _current() -> Communicator:
    if _default is None:
        raise RuntimeError("call railwave.init(...) first, on all ranks")
    return _default


# Silent unless the caller's program asks for logs.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
