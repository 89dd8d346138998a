"""Files of Chrome trace events: written, and those of a machine's ranks put together."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from railwave._check import check_fields
from railwave._files import check_different, check_writable, write_file

_CLOCK = ("host", "boot", "clock")  # what a file's times are of
_ABOUT = {"base_ns": int, "lost_notes": int, **dict.fromkeys(_CLOCK, str)}
_EVENT = {"name": str, "ph": str, "pid": int, "tid": int, "ts": float}
_MOST_NS = 1 << 63  # what a clock can count


def write(file: str | os.PathLike, found: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write events as a JSON file; `about`: what merging needs."""
    held = {"traceEvents": found, "displayTimeUnit": "ns", "otherData": about}
    write_file(os.fspath(file), json.dumps(held, allow_nan=False).encode())


def clock_origin() -> dict[str, str]:
    """Say which host this is, and which of its boots: its clocks count from there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""  # the host's name must do
    return {"host": platform.node(), "boot": boot}


def merge_traces(files: Iterable[str | os.PathLike], out: str | os.PathLike) -> None:
    """Put the traces of several ranks of one machine into one file.

    Args:
        files: each of another rank, of one boot of the machine and by one kind of clock.
        out: the file to write, none of them.

    Raises:
        OSError: a file is not there, or out cannot be written.
        TypeError: files is one file's name, or not iterable, or holds what is no path.
        ValueError: there is no file, one holds no trace, is named twice or is out, two hold the
            same PE, or their times are of clocks that do not agree.
    """
    if isinstance(files, (str, bytes, os.PathLike)) or not isinstance(files, Iterable):
        raise TypeError(f"files must be several files, got {type(files).__name__} {files!s:.60}")
    named = list(files)
    for i, file in enumerate(named):
        if not isinstance(file, (str, os.PathLike)):
            raise TypeError(f"files[{i}] must be a path, got {type(file).__name__} {file!r:.60}")
    paths = [os.fspath(file) for file in named]
    check_writable(os.fspath(out), "out")
    written = [os.fspath(out)] if os.path.exists(out) else []
    check_different(paths + written, "files and out" if written else "files")
    held = {path: _read(path) for path in paths}
    if not held:
        raise ValueError("files must be one at least, got none")
    timed = {path: trace["otherData"] for path, trace in held.items() if trace["traceEvents"]}
    clock = _clock_of_all(timed)
    base_ns = min((about["base_ns"] for about in timed.values()), default=0)
    found: list[dict[str, Any]] = []
    owner: dict[int, str] = {}
    for path, trace in held.items():
        later_us = (trace["otherData"]["base_ns"] - base_ns) / 1e3
        for event in trace["traceEvents"]:
            if owner.setdefault(event["pid"], path) != path:
                raise ValueError(
                    f"files must hold different PEs, got PE {event['pid']} in {path} and "
                    f"{owner[event['pid']]}"
                )
            shift_us = 0 if event["ph"] == "M" else later_us
            found.append({**event, "ts": round(event["ts"] + shift_us, 3)})
    found.sort(key=lambda event: (event["ph"] != "M", event["ts"], -_dur(event)))
    lost = sum(trace["otherData"]["lost_notes"] for trace in held.values())
    write(out, found, {"lost_notes": lost, "base_ns": base_ns, **clock})


def _clock_of_all(abouts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return host, boot and clock of traces whose times fit together; refuse others."""
    clock = dict.fromkeys(_CLOCK, "")
    first = ""
    for path, about in abouts.items():
        own = {key: about[key] for key in _CLOCK}
        if not first:
            clock, first = own, path
        got = f"got {path} of {_said(own)} and {first} of {_said(clock)}"
        if own["clock"] != clock["clock"]:
            raise ValueError(f"files must be of one kind of clock, {got}")
        # A container may have another name than its host; both have the host's boot.
        machine = "boot" if own["boot"] or clock["boot"] else "host"
        if own[machine] != clock[machine]:
            raise ValueError(f"files must be of one machine, and one boot of it, {got}")
    return clock


def _said(clock: dict[str, str]) -> str:
    return f"{clock['host']}, boot {clock['boot'] or 'unknown'}, {clock['clock']}"


def _dur(event: dict[str, Any]) -> float:
    return event["dur"] if event["ph"] == "X" else 0.0


def _read(file: str) -> dict[str, Any]:
    """Return what a file holds, each field that is read later being of its type."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        held = json.loads(text, parse_constant=_refuse_constant)
        check_fields(held, {"otherData": dict, "traceEvents": list})
        about = held["otherData"]
        check_fields(about, _ABOUT, "otherData")
        if abs(about["base_ns"]) >= _MOST_NS:
            raise ValueError(f"base_ns must be of 64 bits, got {about['base_ns']!r:.60}")
        if about["lost_notes"] < 0:
            raise ValueError(f"lost_notes must be at least 0, got {about['lost_notes']}")
        for i, event in enumerate(held["traceEvents"]):
            check_fields(event, _EVENT, f"traceEvents[{i}]")
            if event["ph"] == "X":
                check_fields(event, {"dur": float}, f"traceEvents[{i}]")
                if event["dur"] < 0:
                    raise ValueError(f"dur must be at least 0, got {event['dur']}")
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        text = f"files must be traces of railwave's, got {file}: {error}"
        raise ValueError(text) from None
    return held


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, got {name}")
