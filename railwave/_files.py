"""Files that are written whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence


def write_file(path: str, content: bytes) -> None:
    """Write `content` to `path`: all of it or, if anything fails, nothing.

    A new file takes an old one's place, and its mode, where a link points; devices and pipes are
    written to.

    Raises:
        OSError: with `path`, or with what is in the way of the part that is written first.
    """
    if not replaceable(path):
        with open(path, "wb") as file:
            file.write(content)
        return
    target = os.path.realpath(path)
    part = f"{target}.{os.getpid()}.part"
    try:
        _write_by(part, target, content)
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _write_by(part: str, target: str, content: bytes) -> None:
    file = open(part, "xb")  # noqa: SIM115  (what is another's is not removed below)
    try:
        with file:
            file.write(content)
        if os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise


def replaceable(path: str) -> bool:
    """Say whether a new file may take the place of what is there."""
    return os.path.isfile(path) or not os.path.exists(path)


def check_writable(path: str, option: str = "--json") -> None:
    """Refuse a path that `write_file` could not write, before any work is done.

    Args:
        path: the file.
        option: that asked for it, for the error.

    Raises:
        OSError: with the path and the reason.
    """
    if not path:
        raise FileNotFoundError(f"{option} must be a file, got an empty name")
    if path == "-":
        raise FileNotFoundError(
            f"{option} must be a file, got '-': /dev/stdout is the output, ./- a file of that name"
        )
    if os.path.isdir(path):
        raise IsADirectoryError(f"{option} must be a file, got the directory {path!r}")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{option} must be in an existing folder, got {path!r}")
    # A new file is written beside the old one and takes its place; a device or pipe is written to.
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PermissionError(f"{option} must be a file that may be written, got {path!r}")
    if replaceable(path) and not os.access(folder, os.W_OK):
        raise PermissionError(f"{option} must be in a folder that may be written, got {path!r}")


def check_different(paths: Sequence[str], name: str) -> None:
    """Refuse files of which two are one, by whatever names.

    Raises:
        OSError: one is not there.
        ValueError: with `name` and both paths.
    """
    seen: dict[tuple[int, int], str] = {}
    for path in paths:
        stat = os.stat(path)
        file = stat.st_dev, stat.st_ino
        if file in seen:
            raise ValueError(f"{name} must be different ones, got {seen[file]} and {path}")
        seen[file] = path
