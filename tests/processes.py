"""Run a function in one process per rank: a gloo group, a hard time-out, every result back."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from railwave.kernels import load

# Ranks are forked from a server that has imported this module, and so torch and the kernels, once.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["processes", "worlds"])
_fresh = multiprocessing.get_context("spawn")
load(interpret=True)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int | None  # exit code; negative for a signal
    value: Any  # what the function returned
    error: str  # its traceback; "" if it returned


def run(function, num_ranks, *args, timeout_s=120.0, fresh=False, meanwhile=None):
    """Run `function(rank, *args)` in a process per rank; return a list of `Ended`.

    A rank stays until all have ended, so that none leaves its group too early.

    Args:
        timeout_s: after so long every process is killed, and the test fails.
        fresh: start Python anew, seconds a process, and end it as Python ends.
        meanwhile: called with the processes' ids once they have started.
    """
    context = _fresh if fresh else _forked
    start_server()
    until = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            where = (f"file://{folder}/group", rank, num_ranks, timeout_s)
            ranks.append(context.Process(target=_main, args=(theirs, where, function, args)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            if meanwhile:
                meanwhile([rank.pid for rank in ranks])
            said = _listen(pipes, until)
            for rank in ranks:
                rank.join(max(0.0, until - time.monotonic()))
            late = [i for i, rank in enumerate(ranks) if rank.is_alive()]
            assert not late, f"ranks {late} did not end in {timeout_s} s; said: {said}"
        finally:
            for rank, pipe in zip(ranks, pipes, strict=True):
                if rank.is_alive():
                    os.kill(rank.pid, signal.SIGKILL)
                rank.join()
                pipe.close()
        return [Ended(rank.exitcode, *said[i]) for i, rank in enumerate(ranks)]


def run_all(function, num_ranks, *args, **options):
    """Run as `run` does; return the values, or fail with every rank's traceback."""
    ended = run(function, num_ranks, *args, **options)
    errors = "\n".join(f"rank {i}: {e.error}" for i, e in enumerate(ended) if e.error)
    assert not errors, errors
    assert [e.code for e in ended] == [0] * num_ranks
    return [e.value for e in ended]


def state_of(pid):
    """Return a process's state, as /proc has it: T stopped; Z ended, its parent told or not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def start_server():
    """Start the server, once; Python 3.11 gives it no sys.path but by the environment."""
    paths = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        forkserver.ensure_running()


def _listen(pipes, until):
    """Return (value, error) of every rank, once all have said so or died; then let them go."""
    said, open_pipes = {}, dict(enumerate(pipes))
    while open_pipes and time.monotonic() < until:
        for pipe in wait(list(open_pipes.values()), timeout=max(0.0, until - time.monotonic())):
            rank = pipes.index(pipe)
            try:
                said[rank] = pipe.recv()
            except EOFError:
                said[rank] = (None, "")
            del open_pipes[rank]
    for pipe in pipes:
        with contextlib.suppress(OSError):  # it may have died
            pipe.send("go")
    return [said.get(rank, (None, "said nothing")) for rank in range(len(pipes))]


def _main(pipe, where, function, args):
    method, rank, num_ranks, timeout_s = where
    faulthandler.dump_traceback_later(0.95 * timeout_s)  # where a rank stands that is killed soon
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank draws the same
    try:
        dist.init_process_group(
            "gloo",
            init_method=method,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        said = (function(rank, *args), "")
    except BaseException:
        said = (None, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    pipe.send(said)
    pipe.recv()
