"""Say which nodes talk at the same time: cyclic permutations of the nodes, eq. 10.

Shape letters: N nodes.
"""

from __future__ import annotations

from railwave._check import check_index, check_int, check_positive_int


def wave_peer(node: int, wave: int, nodes: int) -> int:
    """Return the node that `node` sends to in wave `wave`.

    Args:
        node: the sender, in [0, N).
        wave: k, in [1, N); the wave 0 would be the node itself.
        nodes: N.

    Source: eq. (10).

    Example:
        >>> [wave_peer(2, wave, 4) for wave in (1, 2, 3)]
        [3, 0, 1]
    """
    _check_wave(node, wave, nodes)
    return (node + wave) % nodes


def wave_sender(node: int, wave: int, nodes: int) -> int:
    """Return the node that sends to `node` in wave `wave`, the inverse of `wave_peer`.

    Source: eq. (10).

    Example:
        >>> [wave_sender(2, wave, 4) for wave in (1, 2, 3)]
        [1, 0, 3]
    """
    _check_wave(node, wave, nodes)
    return (node - wave) % nodes


def waves(nodes: int) -> tuple[tuple[int, ...], ...]:
    """List the destinations of all nodes, wave by wave.

    Returns:
        N - 1 tuples for the waves 1 .. N - 1; entry s of each is the node that s sends to.

    Source: eq. (10).

    Example:
        >>> waves(3)
        ((1, 2, 0), (2, 0, 1))
    """
    num_nodes = check_positive_int(nodes, "nodes")
    return tuple(
        tuple(wave_peer(node, wave, num_nodes) for node in range(num_nodes))
        for wave in range(1, num_nodes)
    )


def _check_wave(node: int, wave: int, nodes: int) -> None:
    num_nodes = check_positive_int(nodes, "nodes")
    check_index(node, num_nodes, "node")
    if not 1 <= check_int(wave, "wave") < num_nodes:
        raise ValueError(f"wave must be in [1, {num_nodes}), got {wave}")
