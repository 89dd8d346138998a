"""Files that a command writes."""

from __future__ import annotations

import json
import os
from typing import Any

from railwave._files import replaceable, write_file


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


def write_json(path: str, data: Any) -> None:
    """Write `data` to `path` as JSON: all of it or, if anything fails, nothing."""
    write_file(path, (json.dumps(data, indent=2) + "\n").encode())
