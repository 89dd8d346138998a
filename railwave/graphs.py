"""Launch a repeated call whose memory is where it was before as one CUDA graph.

To launch a call kernel by kernel takes the host longer than most calls take the GPU. A loop's calls
come back to the same addresses, since torch's memory is reused; so what is launched at addresses
for a second time becomes a graph, of that call with these addresses, and is one launch from then
on. Nobody else's memory is in a graph, nor any of torch's own.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("railwave")

MOST_GRAPHS = 256  # that are kept
MOST_SEEN = 4 * MOST_GRAPHS  # calls that are remembered, to know one when it comes again
UNUSED = 16 * MOST_GRAPHS  # calls for which a graph was not used when it gives way to another


class Graph:
    """A CUDA graph that can be launched; given back with the object, or once it has run.

    Args:
        driver: `cuda.bindings.driver`.
        runnable: its CUgraphExec.
    """

    def __init__(self, driver: Any, runnable: Any) -> None:
        self._driver, self._runnable = driver, runnable
        self._launch, self._well = driver.cuGraphLaunch, driver.CUresult.CUDA_SUCCESS
        self.used = 0  # the last call that it was launched for

    def replay(self, stream: Any) -> None:
        """Launch it on a stream.

        Raises:
            RuntimeError: the driver refuses; nothing is launched.
        """
        [error] = self._launch(self._runnable, stream.cuda_stream)
        if error != self._well:
            raise RuntimeError(f"a graph cannot be launched: {error!r}")

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process there may be no driver
            self._driver.cuGraphExecDestroy(self._runnable)


def capture(launch: Callable[[torch.cuda.Stream], None]) -> Graph:
    """Return a graph of what is launched: on the current device, waiting for nothing.

    Unlike `torch.cuda.graph`, which waits for the GPU; what has been launched may wait for another
    rank, that waits for this one. And unlike `torch.cuda.CUDAGraph`, which while it captures keeps
    other threads from drawing random numbers, and has an allocator's pool: nothing is drawn or
    allocated here.

    Raises:
        RuntimeError: the driver refuses.
    """
    from cuda.bindings import driver

    stream = _own_stream(torch.cuda.current_device())
    captured, mode = driver.CUstream(stream.cuda_stream), driver.CUstreamCaptureMode
    whole = False
    with torch.cuda.stream(stream), _no_collection():
        _done(driver.cuStreamBeginCapture(captured, mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            launch(stream)
            whole = True
        finally:
            error, graph = driver.cuStreamEndCapture(captured)
            if not whole and graph is not None:
                driver.cuGraphDestroy(graph)
    _done((error,))
    try:
        [runnable] = _done(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)
    return Graph(driver, runnable)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no finalizer in, which might call what a capture does not allow."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _done(result: tuple[Any, ...]) -> list[Any]:
    """Return what the driver gave, if it did as it was told."""
    error, *values = result
    if error != type(error).CUDA_SUCCESS:
        raise RuntimeError(f"a graph cannot be made: {error!r}")
    return values


@cache
def _own_stream(device: int) -> torch.cuda.Stream:
    """Return a stream that nobody but `capture` has: torch hands out the same 32 in turn.

    What another thread launched on it meanwhile would go into the graph, and not run. (The stream
    beside a put is one of those 32.) Two communicators that capture in two threads at once share
    it: one of them is refused.
    """
    from cuda.bindings import driver

    [stream] = _done(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
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
        self._fails = False  # to capture, or to launch what was captured
        self._seen: dict[Hashable, None] = {}  # those that came once, the last one last
        # By call; the one that was used last is the last one.
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()

    def launch(self, call: Hashable, launch: Callable[[Any], None], stream: Any) -> None:
        """Launch a call on a stream, which is torch's current one.

        Args:
            call: what is launched, and at which addresses.
            launch: launches it kernel by kernel, on the stream that it is given.
        """
        self._calls += 1
        graph = self._graphs.get(call)
        if graph is None:
            graph = self._made(call, launch)
        if graph is None or not self._replay(graph, stream):
            launch(stream)
            return
        self.launched += 1
        graph.used = self._calls
        self._graphs[call] = graph
        self._graphs.move_to_end(call)

    def _replay(self, graph: Any, stream: Any) -> bool:
        try:
            graph.replay(stream)
        except RuntimeError as error:
            self.give_up(error)
            return False
        return True

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
            oldest = next(iter(self._graphs))
            # A loop of more calls than are kept has some of them as graphs, not each in turn.
            if self._calls - self._graphs[oldest].used < UNUSED:
                return None
            del self._graphs[oldest]
        del self._seen[call]
        return self._captured(launch)

    def rehearse(
        self, launch: Callable[[Any], None], stream: Any, works: Callable[[], bool]
    ) -> None:
        """Capture and replay something, so that what that needs is loaded.

        Args:
            works: waits, and says whether it has been replayed; if not, no graph is made.
        """
        graph = self._captured(launch) if self._most else None
        if graph is not None and self._replay(graph, stream) and not works():
            self.give_up("the graph of a rehearsal did nothing")

    def give_up(self, why: Any) -> None:
        """Launch all calls kernel by kernel from now on."""
        self._fails = True
        self.clear()
        logger.warning("calls are launched kernel by kernel: %s", why)

    def _captured(self, launch: Callable[[Any], None]) -> Any:
        try:
            return capture(launch)
        except RuntimeError as error:
            self.give_up(error)
            return None

    def clear(self) -> None:
        """Let all graphs go."""
        self._graphs.clear()
        self._seen.clear()
