"""`railwave select`: the paper's table explains its requests; mistakes are named."""

import json
from pathlib import Path

import pytest

import railwave
from test_cli import run

TABLE_4 = Path(__file__).parent.parent / "examples" / "cost_table_paper.json"


@pytest.mark.parametrize(
    "payload, kappa, path", [(8.75, 1, "permutation"), (35, 1, "native"), (35, 3, "joint")]
)
def test_the_papers_table_explains_its_requests(payload, kappa, path, tmp_path):
    file = tmp_path / "decision.json"
    argv = ("--table", TABLE_4, "--payload-mib", payload, "--kappa", kappa, "--json", file)
    result = run("select", *argv)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == path
    decision = json.loads(file.read_text())
    assert set(decision) == {"path", "anchor", "distance", "reason"}
    assert decision["path"] == path and decision["reason"] in result.out
    assert (decision["anchor"] is None) == (path == "joint")


def test_the_papers_table_is_refused_for_another_configuration():
    table = railwave.CostTable.load(TABLE_4)
    assert [anchor.path for anchor in table.anchors] == ["permutation"] * 3 + ["native"]
    topo = railwave.Topology(2, 2, 2)
    with pytest.raises(ValueError, match=r"must be of this configuration; a LocalWorld"):
        sizes = dict(num_experts=4, top_k=1, hidden=2, max_tokens_per_rank=1)
        railwave.LocalWorld(topo, **sizes, cost_table=TABLE_4)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--table", "none.json", "--payload-mib", "1"], "none.json"),
        (
            ["--table", TABLE_4, "--payload-mib", "-1"],
            "--payload-mib must be finite and at least 0",
        ),
        (
            ["--table", TABLE_4, "--payload-mib", "1e308"],
            "--payload-mib must be 0 or in [1e-09, 1e+09], got 1e+308",
        ),
        (["--table", TABLE_4, "--payload-mib", "5e-324"], "--payload-mib must be 0 or in [1e-09,"),
        (["--table", TABLE_4, "--payload-mib", "1", "--rho", "nan"], "--rho must be finite"),
        (["--table", TABLE_4, "--payload-mib", "1", "--kappa", "0"], "--kappa must be finite"),
        (["--table", TABLE_4], "--payload-mib"),
        (["--table", __file__, "--payload-mib", "1"], "must be a JSON cost table"),
    ],
)
def test_mistakes_are_named(argv, said):
    result = run("select", *argv)
    assert result.code == 2 and said in result.err and result.out == ""


@pytest.mark.parametrize("content, where", [("1 2", " from line 1 on"), ("[" * 10**5, "")])
def test_a_file_that_is_no_table_is_named(content, where, tmp_path):
    file = tmp_path / "no.json"
    file.write_text(content)
    result = run("select", "--table", file, "--payload-mib=1")
    rule = "must be a JSON cost table, as railwave calibrate writes it, got no JSON"
    assert (result.code, result.err) == (2, f"railwave: error: {file}: {rule}{where}\n")


def test_a_decision_is_not_written_over_its_table(tmp_path):
    file, link = tmp_path / "table.json", tmp_path / "link.json"
    file.write_bytes(TABLE_4.read_bytes())
    link.symlink_to(file)
    for out in (file, link):
        result = run("select", "--table", file, "--payload-mib=14", "--json", out)
        said = f"railwave: error: --table and --json must be different ones, got {file} and {out}\n"
        assert (result.code, result.out, result.err) == (2, "", said)
    assert file.read_bytes() == TABLE_4.read_bytes()
