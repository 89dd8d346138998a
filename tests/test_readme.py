"""The README's example prints exactly what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_prints_what_it_says():
    example, output = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README.read_text(encoding="utf-8"), re.S
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {})
    assert printed.getvalue() == output
