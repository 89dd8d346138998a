"""The default communicator: `railwave.init` makes it, the module's verbs use it."""

from __future__ import annotations

import torch

from railwave._signature import as_method, with_arguments_of
from railwave.communicator import Communicator
from railwave.handle import Received

_default: Communicator | None = None


@with_arguments_of(Communicator)
def init(*args: object, **kwargs: object) -> Communicator:
    """Make a `Communicator`, whose arguments these are, and the default of the verbs below.

    All ranks call it. It replaces an earlier default without closing it.
    """
    global _default
    _default = Communicator(*args, **kwargs)  # type: ignore[arg-type]
    return _default


@as_method(Communicator.dispatch)
def dispatch(*args: object, **kwargs: object) -> Received:
    """Call `Communicator.dispatch` of the default one."""
    return _current().dispatch(*args, **kwargs)  # type: ignore[arg-type]


@as_method(Communicator.combine)
def combine(*args: object, **kwargs: object) -> torch.Tensor:
    """Call `Communicator.combine` of the default one."""
    return _current().combine(*args, **kwargs)  # type: ignore[arg-type]


@as_method(Communicator.combine_weights)
def combine_weights(*args: object, **kwargs: object) -> torch.Tensor:
    """Call `Communicator.combine_weights` of the default one."""
    return _current().combine_weights(*args, **kwargs)  # type: ignore[arg-type]


@as_method(Communicator.check)
def check() -> None:
    """Call `Communicator.check` of the default one."""
    _current().check()


@as_method(Communicator.reset)
def reset() -> int:
    """Call `Communicator.reset` of the default one."""
    return _current().reset()


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
