"""The command line: `railwave demo` on made-up routing, `railwave replay` on recorded counts.

`railwave simulate` times schedulers on a simulated cluster; `railwave calibrate` makes a cost table
of this machine, and `railwave select` explains what one chooses; `railwave topo` shows this node's
GPUs and NICs, `railwave doctor` says whether dispatch will run here; `railwave clean` removes the
shared memory that killed processes left.

Exit codes: 0, done (and every path is verified, dispatch will run, or nodes have the same map); 1,
a path is not verified, dispatch will not run, or nodes differ; 2, a mistake in the call.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from railwave._version import __version__
from railwave.cli import calibrate, machine, select, simulate, verify
from railwave.cli.options import Parser, add_verbose
from railwave.cli.output import check_writable, write_json

__all__ = ["check_writable", "main", "write_json"]

logger = logging.getLogger("railwave")

PIPE_CLOSED = 141  # as of a program that SIGPIPE ends
FRAMES = "\nException raised from "  # where torch adds a stack of C++ frames
TOO_LARGE = ("can't allocate memory", "Storage size calculation overflowed")  # torch's words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; the process's own if None.

    Returns:
        The exit code.
    """
    try:
        args = _parser().parse_args(argv)
        with _logging(args.verbose):
            return args.command(args)
    except BrokenPipeError:
        # Whoever reads the output has enough; Python would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, TypeError, OverflowError, OSError) as error:
        return _refuse(str(error))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in TOO_LARGE):
            raise
        return _refuse("this run needs more memory than there is; make its sizes smaller")
    except KeyboardInterrupt:
        print("railwave: interrupted", file=sys.stderr)
        return 130


def _refuse(message: str) -> int:
    print(f"railwave: error: {message.partition(FRAMES)[0]}", file=sys.stderr)
    return 2


def _clean(args: argparse.Namespace) -> int:
    from railwave.heap import shm

    removed = shm.clean()
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"nothing of yours to remove in {shm.FOLDER}")
    return 0


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Show railwave's log on stderr while a command runs, if asked to."""
    if not verbose:
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="railwave",
        description="Dispatch and combine tokens of a whole cluster in this process, on a CPU, and "
        "check the result bit for bit; or simulate how long schedulers take. Exit code 0: done and "
        "verified, 1: not verified, 2: a mistake in the call.",
    )
    parser.add_argument("--version", action="version", version=f"railwave {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    verify.add_commands(commands)
    simulate.add_command(commands)
    calibrate.add_command(commands)
    select.add_command(commands)
    machine.add_commands(commands)
    clean = commands.add_parser(
        "clean", help="remove shared memory that killed processes of yours left on this machine"
    )
    clean.set_defaults(command=_clean)
    add_verbose(clean)
    return parser
