"""Results as JSON lines, each with what it was measured on."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch


def machine(device: torch.device) -> dict[str, str]:
    """Say what a result was measured on, and with which versions."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {package: version(package) for package in ("torch", "triton", "numpy")}
    return {"machine": name, "date": datetime.date.today().isoformat(), **versions}


def read_results(file: Path) -> list[dict]:
    """Return the results in a file of JSON lines.

    Raises:
        ValueError: a line is none: a run that was killed may have cut the last one.
    """
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{file}, line {number} must be a JSON object, got {line[:40]!r}: delete it, "
                    "and run again"
                ) from error
    return rows


def print_results(results: Iterable[dict], about: dict[str, str], out: Path | None) -> None:
    """Print each result as a JSON line as it comes, with `about`; append it to a file, too."""
    if out and out.exists() and out.read_text(encoding="utf-8")[-1:] not in ("", "\n"):
        with out.open("a") as file:
            print(file=file)  # a run that was killed may have cut the last line's end
    for result in results:
        line = json.dumps({**result, **about})
        print(line, flush=True)
        if out:
            with out.open("a") as file:
                print(line, file=file)
