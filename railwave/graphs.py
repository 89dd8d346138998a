"""Launch a repeated call whose memory is where it was before as one CUDA graph.

To launch a call kernel by kernel takes the host longer than most calls take the GPU. A loop's calls
come back to the same addresses, since torch's memory is reused; so what is launched at addresses
for a second time becomes a graph, of that call with these addresses, and is one launch from then
on. Nobody else's memory is in a graph, nor any of torch's own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("railwave")

MOST_GRAPHS = 256  # that are kept
MOST_SEEN = 4 * MOST_GRAPHS  # calls that are remembered, to know one when it comes again
UNUSED = 16 * MOST_GRAPHS  # calls for which a graph was not used when it gives way to another


def capture(launch: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of what is launched: on the current device, waiting for nothing.

    Unlike `torch.cuda.graph`, which waits for the GPU; what has been launched may wait for another
    rank, that waits for this one.
    """
    graph, stream = torch.cuda.CUDAGraph(), _own_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch(stream)
        except BaseException:
            with suppress(RuntimeError):  # what was launched may end in the middle
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@cache
def _own_stream(device: int) -> torch.cuda.Stream:
    """Return a stream that nobody but `capture` has: torch hands out the same 32 in turn.

    What another thread launched on it meanwhile would go into the graph, and not run. Two
    communicators that capture in two threads at once share it: one of them is refused.
    """
    from cuda.bindings import driver

    error, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a stream for graphs cannot be made: {error!r}")
    return torch.cuda.ExternalStream(int(stream), device=device)


class Graphs:
    """The graphs of one rank's repeated calls.

    A call that cannot be captured is launched kernel by kernel, as are all after it.

    Args:
        most: that are kept; 0: none is made.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self.launched = 0  # calls that were one launch
        self._most = most
        self._calls = 0
        self._fails = False  # to capture
        self._seen: dict[Hashable, None] = {}  # those that came once, the last one last
        # By call a graph and when it was last used; the one that was used last is the last one.
        self._graphs: OrderedDict[Hashable, list[Any]] = OrderedDict()

    def launch(self, call: Hashable, launch: Callable[[Any], None], stream: Any) -> None:
        """Launch a call on a stream, which is torch's current one.

        Args:
            call: what is launched, and at which addresses.
            launch: launches it kernel by kernel, on the stream that it is given.
        """
        self._calls += 1
        kept = self._graphs.get(call)
        if kept is None:
            graph = self._made(call, launch)
            if graph is None:
                launch(stream)
                return
            kept = self._graphs[call] = [graph, 0]
        kept[0].replay()
        self.launched += 1
        kept[1] = self._calls
        self._graphs.move_to_end(call)

    def _made(self, call: Hashable, launch: Callable[[Any], None]) -> Any:
        """Return a new graph of a call if it is time for one; None: there is to be none."""
        if self._fails or not self._most:
            return None
        if call not in self._seen:
            self._seen[call] = None
            if len(self._seen) > MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return None
        if len(self._graphs) >= self._most:
            oldest, (_, used) = next(iter(self._graphs.items()))
            # A loop of more calls than are kept has some of them as graphs, not each in turn.
            if self._calls - used < UNUSED:
                return None
            del self._graphs[oldest]
        del self._seen[call]
        return self._captured(launch)

    def rehearse(self, launch: Callable[[Any], None]) -> None:
        """Capture and replay something, so that what torch needs for that is loaded."""
        graph = self._captured(launch) if self._most else None
        if graph is not None:
            graph.replay()

    def _captured(self, launch: Callable[[Any], None]) -> Any:
        try:
            return capture(launch)
        except RuntimeError as error:
            self._fails = True
            logger.warning("calls are launched kernel by kernel: %s", error)
            return None

    def clear(self) -> None:
        """Let all graphs go."""
        self._graphs.clear()
        self._seen.clear()
