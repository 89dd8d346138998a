"""The README's examples print what the README says."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from railwave.cli import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\.venv/bin/railwave (simulate.*)$", TEXT, re.M)
SELECT = re.findall(r"^\.venv/bin/railwave (select.*)\n```\n\n```\n(.*?)```", TEXT, re.M | re.S)
MACHINE = re.findall(r"^\.venv/bin/railwave ((?:doctor|topo).*)$", TEXT, re.M)


def printed_by(call, *args):
    """Return what a call prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        call(*args)
    return printed.getvalue()


def test_example_prints_what_it_says():
    example, output = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", TEXT, re.S
    ).groups()
    assert printed_by(exec, compile(example, str(README), "exec"), {}) == output


def without_planning_time(text):
    """Leave out the last column of the first table: a clock's."""
    times, rails = text.split("\nscheduler ")[1:]
    lines = [
        line.rsplit(maxsplit=1)[0].split() for line in times.splitlines() if line[:1].isalpha()
    ]
    return lines, rails


def test_simulate_prints_what_it_says():
    (output,) = re.findall(r"railwave simulate\n```\n\n```\n(.*?)```", TEXT, re.S)
    printed = printed_by(main, ["simulate"])
    assert printed.split("\nscheduler ")[0] == output.split("\nscheduler ")[0]
    assert without_planning_time(printed) == without_planning_time(output)


@pytest.mark.parametrize("command", COMMANDS)
def test_simulate_commands_run(command, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "loads.csv").write_text("1,2,3,4,5,6,7,8\n" * 4)
    np.save(tmp_path / "demand.npy", np.arange(16).reshape(4, 4))
    monkeypatch.chdir(tmp_path)
    assert "joint" in printed_by(main, shlex.split(command, comments=True))


def test_readme_has_simulate_commands():
    assert len(COMMANDS) >= 5


def test_what_else_python_is_shown_runs():
    blocks = re.findall(r"```py\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 1
    printed = printed_by(exec, compile(blocks[0], str(README), "exec"), {})
    assert "('native', " in printed and "('joint', " in printed


@pytest.mark.parametrize("command", MACHINE)
def test_commands_about_the_machine_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "dispatch will" if command == "doctor" else " GPUs, "
    assert said in printed_by(main, shlex.split(command))


def test_readme_has_commands_about_the_machine():
    assert [command.split()[0] for command in MACHINE] == ["doctor", "topo"]


def test_select_prints_what_it_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    ((command, output),) = SELECT
    assert printed_by(main, shlex.split(command)).startswith(output)
