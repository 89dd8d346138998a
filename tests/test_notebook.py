"""Each notebook runs, and what is stored of its last run is light and names no machine."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Pictures stored of each, so that one which is lost shows.
PICTURES = {
    "01_rail_shares": 2,
    "02_the_plan_by_hand": 1,
    "03_records_on_the_wire": 1,
    "04_waves_and_incast": 6,
    "05_choosing_a_path": 2,
    "06_your_own_routing": 3,
    "07_schedulers": 11,
    "08_evidence": 3,
}
MOST_S = 120  # of a cell, so that none hangs: a notebook takes seconds, a busy machine longer


def path_of(name):
    return ROOT / "notebooks" / f"{name}.ipynb"


def code_cells(text):
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def test_all_notebooks_are_tested_and_named_in_order_by_the_readme():
    names = sorted(file.stem for file in (ROOT / "notebooks").glob("*.ipynb"))
    assert names == list(PICTURES)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\(notebooks/(\w+)\.ipynb\)", readme) == names


@pytest.mark.parametrize("name", PICTURES)
def test_stored_outputs_are_there_and_light(name):
    text = path_of(name).read_text(encoding="utf-8")
    cells = code_cells(text)
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == PICTURES[name]
    assert {output["output_type"] for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert all(cell["execution_count"] == place for place, cell in enumerate(cells, start=1))
    assert len(text) < (450_000 if name == "07_schedulers" else 200_000)
    for place in ("/tmp", "/home", "/work", "/root", "site-packages"):
        assert place not in text, place


def test_each_plot_is_shown():
    pytest.importorskip("matplotlib", reason="needs pip install '.[notebook]'")
    code = "".join(
        "".join(c["source"]) for n in PICTURES for c in code_cells(path_of(n).read_text())
    )
    from railwave import plots

    assert [name for name in plots.__all__ if f"{name}(" not in code] == []


@pytest.mark.parametrize("name", PICTURES)
def test_it_runs(name, monkeypatch):
    """As a user would, in the notebooks' folder, and 07 on the stand-in; railwave is this one."""
    reason = "needs pip install '.[notebook]'"
    for package in ("matplotlib", "ipykernel", "pandas"):
        pytest.importorskip(package, reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    monkeypatch.delenv("RAILWAVE_TRACE", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    stored = code_cells(path_of(name).read_text(encoding="utf-8"))
    notebook = nbformat.read(path_of(name), as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=MOST_S, kernel_name="python3")
    client.execute(cwd=str(ROOT / "notebooks"))
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if name == "07_schedulers":
        said = "45 layers of 128 experts; routing: stand-in, 45 phases\n"
        assert ran[0].outputs[0]["text"] == said
        return
    # The text around a cell speaks of what is printed there: it must still be so, but for times.
    for before, after in zip(stored, ran, strict=True):
        printed = printed_by(after["outputs"])
        if "times" in before["metadata"].get("tags", ()):
            assert bool(printed) == bool(printed_by(before["outputs"]))
        else:
            assert printed == printed_by(before["outputs"])


def printed_by(outputs):
    """Return what a cell printed and the text of what it shows, as one: it comes in any pieces."""
    pieces = []
    for output in outputs:
        if output["output_type"] == "stream":
            pieces.append(output["text"])
        elif "image/png" not in output["data"]:  # a table
            pieces.append(output["data"]["text/plain"])
    return "".join("".join(piece) for piece in pieces)


def test_what_a_cell_printed_and_its_table_are_compared():
    table = {
        "output_type": "execute_result",
        "data": {"text/html": "<b>", "text/plain": ["a", "b"]},
    }
    printed = {"output_type": "stream", "text": ["c\n", "d"]}
    picture = {"output_type": "display_data", "data": {"image/png": "", "text/plain": "Figure"}}
    assert printed_by([printed, table, picture]) == "c\ndab"
