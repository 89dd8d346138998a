"""A phase that this rank called wrongly: only that is told."""

from railwave.exchange.pe import Exchange, Stages

BAD_CALL = -1


def refuse(pe: Exchange) -> Stages:
    """Take part with a status alone, in a dispatch or a combine.

    Raises:
        CallsDiffer: always, as on every other rank.
    """
    pe.path = "none"
    pe.begin(BAD_CALL)
    yield from pe.hear_status()
