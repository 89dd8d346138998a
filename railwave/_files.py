"""Files that are written whole, or not at all."""

from __future__ import annotations

import os
import shutil


def write_file(path: str, content: bytes) -> None:
    """Write `content` to `path`: all of it or, if anything fails, nothing.

    A new file takes an old one's place, and its mode, where a link points; devices and pipes are
    written to.
    """
    if not replaceable(path):
        with open(path, "wb") as file:
            file.write(content)
        return
    target = os.path.realpath(path)
    part = f"{target}.{os.getpid()}.part"
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
