"""A phase that this rank called wrongly: only that is told."""

from railwave.exchange.pe import Exchange, Stages

BAD_CALL = -1


def refuse(pe: Exchange) -> Stages:
    """Take part with a status alone, in a dispatch or a combine.

    Raises:
        CallsDiffer: always, as on every other rank.
    """
    wire, pe.path = pe.kernels.wire, "none"
    pe.state[wire.EPOCH.value] += 1
    pe.state[wire.NOTIFIES.value] += 1
    pe.epoch += 1
    yield from pe.compare_status(BAD_CALL)
