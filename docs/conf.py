"""Settings of Sphinx; `make docs` builds the site, without a warning."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from railwave._version import __version__

project = "railwave"
author = project_copyright = "railwave contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"railwave {release}"
html_static_path: list[str] = []
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
napoleon_use_rtype = False

_COLON = "\0"  # stands for a colon, of which napoleon would make a type
# A shape letter that ends a sentence is no number of a list.
_LETTER = re.compile(r"(^\s*|: )([A-Za-z])\. ")
_MARKUP = re.compile(r"(`[^`]+`)|([*|])|(?<=\w)_(?!\w)")


def plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: `code` becomes code, and * | _ stand for themselves."""
    if what == "data":  # what its type says of itself
        lines.clear()
    _describe_fields(thing, lines)
    example = False
    for place, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            lines[place] = _LETTER.sub(r"\1\2\\. ", _MARKUP.sub(_escaped, line))
    if what == "property":
        lines[:] = [line.replace(":", _COLON) for line in lines]


def put_colons_back(app: Any, what: str, name: str, thing: Any, opts: Any, text: list[str]) -> None:
    """Undo what `plain_text` did, once napoleon has read it."""
    text[:] = [line.replace(_COLON, ":") for line in text]


def _escaped(found: re.Match) -> str:
    return f"`{found[1]}`" if found[1] else f"\\{found[0]}"


def _describe_fields(thing: Any, lines: list[str]) -> None:
    """Add the comments beside a dataclass's fields, where its docstring does not list them."""
    if not (inspect.isclass(thing) and hasattr(thing, "__dataclass_fields__")):
        return
    if any(line.strip() in ("Args:", "Attributes:") for line in lines):
        return
    source = inspect.getsource(thing).splitlines()
    found = []
    for field in ast.parse(inspect.cleandoc("\n".join(source))).body[0].body:
        if isinstance(field, ast.AnnAssign) and not field.target.id.startswith("_"):
            text = source[field.end_lineno - 1][field.end_col_offset :].partition("#")[2].strip()
            found.append(
                f"    {field.target.id}: {text or _above(source, field.lineno - 1)}".rstrip()
            )
    lines += ["", "Attributes:", *found, ""] if found else []


def _above(source: list[str], line: int) -> str:
    """Return the comment that ends before a line, as one text."""
    first = line
    while source[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip(" #") for text in source[first:line])


def setup(app: Any) -> None:
    """Connect the hooks: before napoleon's, and after it."""
    app.connect("autodoc-process-docstring", plain_text, priority=400)
    app.connect("autodoc-process-docstring", put_colons_back, priority=600)
