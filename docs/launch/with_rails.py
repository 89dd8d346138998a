"""Give this process the NIC port of its GPU's rail, then run a program in it.

    torchrun ... docs/launch/with_rails.py PROGRAM [ARGUMENTS]
    torchrun ... docs/launch/with_rails.py -m MODULE [ARGUMENTS]

Each process gets a mapping of its own, so it does not matter in which order GPUs use rails. GPUs
are numbered in PCI order here: set CUDA_DEVICE_ORDER=PCI_BUS_ID where CUDA would number them
otherwise.
What the environment already says of the mapping is left alone.
"""

import os
import runpy
import sys

from railwave.discovery import Node, discover, visible_gpus

SET_BY_HAND = ("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_HCA_LIST")


def mapping(node: Node, local_rank: int, nodes: int, shown: str | None) -> dict[str, str]:
    """Return the variables for the process that runs on the GPU of `local_rank`.

    Args:
        node: this node.
        local_rank: of the process.
        nodes: of the job.
        shown: CUDA_VISIBLE_DEVICES.
    """
    if nodes == 1 or not node.gpus:
        return node.environment(nodes=1)
    gpus = visible_gpus(node, shown or None)
    if not gpus:
        raise ValueError(f"CUDA_VISIBLE_DEVICES must show a GPU, got {shown!r}")
    return node.environment(nodes=nodes, gpu=gpus[local_rank % len(gpus)])


def main() -> None:
    """Set the variables before anything loads NVSHMEM."""
    given = os.environ.get
    local_rank, here = int(given("LOCAL_RANK", "0")), int(given("LOCAL_WORLD_SIZE", "1"))
    nodes = int(given("WORLD_SIZE", "1")) // here
    if not any(name in os.environ for name in SET_BY_HAND):
        os.environ.update(mapping(discover(), local_rank, nodes, given("CUDA_VISIBLE_DEVICES")))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
