"""The notebook runs, and what is stored of its last run is light and names no machine."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "schedulers.ipynb"


def test_stored_outputs_are_there_and_light():
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kinds = [
        kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})
    ]
    assert kinds.count("image/png") == 10
    assert all(cell["execution_count"] == place for place, cell in enumerate(cells, start=1))
    assert len(text) < 400_000
    for place in ("/tmp", "/home", "/work", "/root", "site-packages"):
        assert place not in text, place


def test_it_runs(monkeypatch):
    """As a user would, on the stand-in; the kernel finds railwave from the repository's root."""
    reason = "needs pip install '.[notebook]'"
    for package in ("matplotlib", "ipykernel"):
        pytest.importorskip(package, reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    monkeypatch.delenv("RAILWAVE_TRACE", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT))
    first = notebook.cells[1].outputs[0]["text"]
    assert first == "45 layers of 128 experts; routing: stand-in, 45 phases\n"
