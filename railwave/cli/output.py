"""Files that a command writes."""

from __future__ import annotations

import json
from typing import Any

from railwave._files import check_writable as check_writable
from railwave._files import write_file


def write_json(path: str, data: Any) -> None:
    """Write `data` to `path` as JSON: all of it or, if anything fails, nothing."""
    write_file(path, (json.dumps(data, indent=2) + "\n").encode())
