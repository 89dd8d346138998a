"""The experiment through emulated NICs: its cases, a tiny run of all of it on a CPU, its tables."""

import argparse
import doctest
import json

import numpy as np
import pytest
import torch

from bench import (
    emulated,
    emulated_cases,
    emulated_model,
    emulated_rank,
    evidence,
    evidence_replay,
    output,
    run,
)
from bench import emulated_extras as extras
from railwave import Topology
from railwave.workloads import RECORD_BYTES, preset, replay


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    emulated.add_arguments(parser)
    return parser.parse_args([*arguments])


@pytest.mark.parametrize("module", [emulated_cases, emulated_rank, evidence_replay])
def test_the_examples_hold(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("layout", ["h800", "h20"])
@pytest.mark.parametrize("pattern", ["ring", "moderate", "extreme"])
def test_every_method_moves_the_same_records(layout, pattern):
    on = emulated_cases.cluster(layout, 4, 8, 1.0)
    counts = torch.arange(16) ** 2
    case = emulated_cases.Case({}, replay(pattern, counts, on.topo, record_bytes=1), 1)
    owned = case.replay.demand.owned
    most_sent = emulated_cases.most_sent([case])
    assert most_sent.sum() < 1.5 * owned.sum()  # no rank has room for what others send
    for plan in emulated_cases.plans(case):
        assert all((call.sum(axis=1) <= most_sent).all() for call in plan.calls), plan.method
        moved = sum(plan.calls).reshape(4, 8, 4, 8)
        assert np.array_equal(moved.sum(axis=(1, 3)), case.replay.demand.between_nodes), plan.method
        if plan.method != "fast":  # which has spread them over the rails beforehand
            assert np.array_equal(moved.sum(axis=3), owned), plan.method
        assert plan.schedule.transfer_bytes.sum() == owned.sum()
        # A call is a window of the schedule, of methods that are replayed call by call.
        if plan.path in ("native", "rail"):
            for number, call in enumerate(plan.calls):
                here = plan.schedule.window == number
                assert call.sum() == plan.schedule.transfer_bytes[here].sum()


def test_the_replay_through_the_model_is_the_paper_s_arithmetic():
    """Permutation : Moderate : Extreme = 3 : 5 : 8, and T* at an eighth of payload and rate."""
    on = emulated_cases.cluster("h800", 4, 8, 25 / 8)
    counts, times = torch.full((8,), 4095 // 8 // 3 * 3), {}
    for pattern in ("moderate", "extreme"):
        case = emulated_cases.Case({}, replay(pattern, counts, on.topo, record_bytes=1), 1)
        made = emulated_cases.plans(case)
        sizes = RECORD_BYTES, RECORD_BYTES
        times[pattern] = emulated_model.network(case, made, on.nic_gbs, *sizes)
    joint = times["moderate"].by_method["joint"]
    assert times["moderate"].by_method["native"] / joint == pytest.approx(5 / 3)
    assert times["extreme"].by_method["native"] / joint == pytest.approx(8 / 3)
    assert joint == pytest.approx(times["moderate"].bound_us)
    records = int(counts.sum())
    rate = preset("h800").rail_gbytes_s * 1e9 / 8
    assert joint == pytest.approx(2e6 * records / 8 * RECORD_BYTES / rate)


def test_slices_are_parts_of_the_whole_and_cost_about_the_same():
    whole = [case.key for case in emulated.work(options_of())]
    parts = [[c.key for c in emulated.work(options_of("--slice", f"{i}/4"))] for i in (1, 2, 3, 4)]
    assert [key for part in parts for key in part] == whole
    assert len(set(whole)) == len(whole) and all(parts)
    deep = [c for c in emulated.work(options_of("--families", "replay")) if c.samples == 100]
    assert len(deep) == 18 and {c.rate for c in deep} == {1.0}
    for text in ("0/4", "5/4", "x"):
        with pytest.raises(ValueError, match="--slice must be i/n"):
            emulated.work(options_of("--slice", text))


def test_a_gpu_a_node_has_pairs_that_differ_and_no_path_of_all_peers_at_once():
    options = options_of("--layouts", "wide")
    on = emulated.clusters(options)["wide"]
    assert on.topo.nodes == 32 and not {"native", "rail"} & set(on.paths)
    cases = emulated.work(options)
    assert [case.about["family"] for case in cases] == ["zipf"] * 4
    for case in cases:
        asked = emulated._asked(options, on)
        made = [plan for plan in emulated_cases.plans(case) if plan.method in asked]
        assert {plan.path for plan in made} == set(on.paths)
        sent = made[0].calls[0]
        most = max(sent.sum(axis=0).max(), sent.sum(axis=1).max())
        assert 900 < most <= emulated._sizes(options, on).tokens == 1024
    assert emulated.symmetric_bytes(options, cases) < 2 << 30


def test_room_is_asked_for_what_the_slice_has():
    found = []
    for family in ("shares", "selector"):
        options = options_of("--families", family, "--layouts", "h800")
        found.append(emulated.symmetric_bytes(options, emulated.work(options)))
    assert emulated.ROOM < found[0] < found[1] < 2 << 30


def test_a_case_without_a_gpu_end_to_end(tmp_path, capfd):
    """Two PEs, a case of most families; then nothing is left to do; then the tables."""
    out = tmp_path / "results.jsonl"
    sizes = ["--nodes", "2", "--gpus", "1", "--tokens", "6", "--hidden", "16", "--nic-gbs", "1e-4"]
    asked = ["--families", "replay", "zipf", "shares", "packing", "workspace", "--layouts", "h800"]
    asked += ["--methods", "native", "joint", "granted", "--cases", "1", "--samples", "1"]
    command = ["emulated", *sizes, *asked, "--device", "cpu", "--out", str(out)]
    assert run.main(command) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["family"], row["method"]) for row in rows] == [
        *(("replay", "native"), ("replay", "joint"), ("replay", "granted")),
        *(("zipf", "native"), ("zipf", "joint"), ("zipf", "granted")),
        *(("shares", "native"), ("shares", "joint")),
        *(("packing", "pipelined"), ("packing", "sequential"), ("workspace", "railwave")),
    ]
    for row in rows[:6]:
        assert row["bound_us"] <= row["network"]["median_us"] < row["whole"]["median_us"]
        assert row["bound_us"] <= row["network_model_us"] < row["predicted_us"]
        assert row["data_path_us"] > row["late_us"] >= 0 and "p99_us" not in row["whole"]
        assert row["empties_us"] == row["empty_us"]  # of one call
    assert rows[6]["transmit"] == rows[6]["receive"] == [1.0]
    capfd.readouterr()
    assert run.main(command) == 0
    assert "has every row of slice 1/1" in capfd.readouterr().err
    assert len(out.read_text().splitlines()) == len(rows)
    evidence.main([str(out)])
    text = capfd.readouterr().out
    for title in ("Joint over native", "Shares of the NIC", "Packing beside", "Memory, GiB"):
        assert f"### {title}" in text
    assert "| h800 | stand-in | 1.0 | ring | joint | 1 |" in text


def test_a_file_that_was_cut_is_gone_on_with_or_named(tmp_path, capfd):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"case_key": "a", "method": "joint"}')  # without the line's end
    output.print_results([{"case_key": "b", "method": "joint"}], {}, file)
    assert list(emulated.keys_in(file)) == ["a | joint", "b | joint"]
    file.write_text(file.read_text()[:-5])
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 must be a JSON object, got '{\"case"):
        emulated.keys_in(file)


def made_row(method, layer, us, **more):
    about = {"bench": "emulated", "case_key": f"layer {layer}", "family": "replay"}
    about |= {"layout": "h800", "routing": "stand-in", "rate": 1.0, "pattern": "moderate"}
    form = {"median_us": us, "min_us": us, "p95_us": 2 * us}
    about |= {"whole": form, "network": form, "bound_us": 500.0, "samples": 20, "empty_us": 1.0}
    about |= {"network_model_us": us, "predicted_us": us, "late_us": 5.0, "paper_ms": None}
    return {**about, "method": method, "layer": layer, **more}


def test_tables_tell_ratios_sums_and_what_is_off(tmp_path):
    rows = [made_row(m, layer, us * (1 + layer)) for layer in (0, 1) for m, us in TIMES.items()]
    rows.append(made_row("native", 0, 3000.0, predicted_us=1000.0, network_model_us=1000.0))
    slow = {"predicted_us": 1500.0, "network": {"median_us": 900.0, "p95_us": 900.0}}
    rows.append(made_row("joint", 0, 1000.0, **slow, empties_us=550.0))  # 950, and 100 outside
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(evidence.tables(evidence.read([file])))
    assert "3.00 (3.00-3.00)" in text and "| native | 2 | 9.0 | 18.0 |  | 9.0 | 18.0 |  |" in text
    # Native takes 9 ms, rail 6, permutation 4.5 and joint 3.
    assert "| moderate | 1.50 | 2.00 | 3.00 | 1.50 | 1.44 |" in text
    assert "75.0% of 8 rows within 15%" in text and "- not explained: layer 0, native" in text
    assert "0 are near with how late" in text and "1 are predicted too slow, and near" in text
    assert "layer 0, joint: predicted" not in text


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "No such file"),
        ("", "must have rows of bench.run emulated, got none"),
        ('{"bench": "emulated", "method": "joint"}', r"must have ['case_key', 'family', 'layout']"),
    ],
)
def test_files_without_evidence_are_named(text, words, tmp_path, capfd):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        evidence.main([str(file)])
    assert words in capfd.readouterr().err


TIMES = {"native": 3000.0, "rail": 2000.0, "permutation": 1500.0, "joint": 1000.0}


def test_the_selector_s_requests_fit_what_is_declared():
    on = emulated_cases.cluster("h800", 4, 2, 1.0)
    payloads, declared = extras.selector_sizes(4096, emulated_rank.Sizes(4096, 64), on)
    assert payloads[1] == pytest.approx(2 * payloads[0])
    # All of a node's payload on one rail, as calibration has it, and half as much again.
    assert declared["max_tokens_per_rank"] >= 1.5 * payloads[-1] * 2**20 / 128 * 2
    assert (
        Topology(4, 2, 2).max_proxy_records(declared["max_tokens_per_rank"])
        <= (declared["staging_records"])
    )
