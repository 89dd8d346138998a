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
    pe.advance()
    pe.counts.zero_()
    pe.counts[0] = BAD_CALL
    pe.kernels.notify.notify(
        *(pe.heap.bases, pe.state, pe.counts, pe.expert_start),
        **pe.notify_args(),
        shape=pe.config.shape,
    )
    yield from pe.hear_status()
