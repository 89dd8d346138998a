"""What the commands have in common: options, lists of names, progress.

What needs triton or rich is imported where it is used, here and in every command; torch comes with
the package (3 s).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from railwave._check import check_positive_int

if TYPE_CHECKING:
    from railwave.topology import Topology

PROGRESS_DELAY_S = 3.0


class Parser(argparse.ArgumentParser):
    """Raise a mistake in the call as an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError: `main` prints it in one line."""
        raise ValueError(f"{message}; see {self.prog} --help")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Show the defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is None or action.default is False
        return action.help if hidden else super()._get_help_string(action)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add -v, which `main` reads."""
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done to stderr")


def add_rails(parser: argparse._ActionsContainer, default: str = "as many as GPUs") -> None:
    """Add --rails, which `topology` reads."""
    parser.add_argument(
        "--rails",
        type=_rails,
        metavar="R",
        help="rails (NICs) of a node, GPU g being on rail g * R // GPUS; or the rail of each GPU, "
        f"such as 0,0,1,1 (default: {default})",
    )


def _rails(text: str) -> int | tuple[int, ...]:
    """Return a number of rails, or of a comma list the rail of each GPU."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.removeprefix("-").isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be a number, or the rail of each GPU such as 0,0,1,1, got {text!r}"
        )
    return int(parts[0]) if len(parts) == 1 else tuple(int(part) for part in parts)


def topology(nodes: int, gpus: int, rails: int | Sequence[int] | None) -> Topology:
    """Return the cluster that --nodes, --gpus and --rails describe.

    Args:
        rails: a number, the rail of each GPU, or None for as many as GPUs.

    Raises:
        ValueError: there is no such cluster.

    Example:
        >>> topology(2, 4, (1, 1, 0, 0)).rail_of_gpu, topology(2, 4, 2).rail_of_gpu
        ((1, 1, 0, 0), (0, 0, 1, 1))
    """
    from railwave.topology import Topology

    if rails is None or isinstance(rails, int):
        return Topology(nodes, gpus, gpus if rails is None else rails)
    said = rails_text(rails)
    if len(rails) != check_positive_int(gpus, "--gpus"):
        raise ValueError(
            f"--rails must be a number or the rail of each of the {gpus} GPUs of a node, got "
            f"{len(rails)} of them: {said}"
        )
    if min(rails) < 0:
        raise ValueError(f"--rails must be numbers from 0 on, got {said}")
    return Topology(nodes, gpus, max(rails) + 1, rail_of_gpu=rails)


def rails_text(rails: int | Sequence[int]) -> str:
    """Write --rails as it is read."""
    return str(rails) if isinstance(rails, int) else ",".join(map(str, rails))


def chosen_names(given: Sequence[str] | None, allowed: Sequence[str], option: str) -> list[str]:
    """Return the names asked for, each once, in their order; all of them if none is.

    Args:
        given: what the option was given, each a comma list; None if it was not.
        allowed: the names there are; "all" stands for them.
        option: for the error.

    Raises:
        ValueError: a name that is not allowed.

    Example:
        >>> chosen_names(["b,a", "b"], ["a", "b", "c"], "--letter")
        ['b', 'a']
    """
    names = [name.strip() for part in given or ["all"] for name in part.split(",")]
    for name in names:
        if name not in (*allowed, "all"):
            raise ValueError(f"{option} must be of {', '.join(allowed)} or all, got {name!r}")
    return list(allowed) if "all" in names else list(dict.fromkeys(names))


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar on stderr, if that is a terminal, once the work has taken a while.

    Yields:
        What to call with the steps done so far and the name of the one that begins.
    """
    from tqdm import tqdm

    # disable=None: only where stderr is a terminal.
    with tqdm(total=total, delay=PROGRESS_DELAY_S, disable=None, leave=False) as bar:

        def progress(done: int, name: str) -> None:
            bar.set_description(name, refresh=False)
            bar.update(done - bar.n)

        yield progress
