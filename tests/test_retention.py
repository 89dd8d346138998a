"""The rules by which a measured point becomes an anchor, on samples at and about each bound."""

import doctest
from pathlib import Path

import pytest

from railwave import CostTable, retention
from railwave.retention import CONTROL, judge

RECORDED = Path(__file__).parents[1] / "bench" / "results" / "calibrate-h200.json"


def spread(median, ratio=1.0, count=11):
    """Samples with a median, whose p90 / p10 is `ratio`."""
    low = 2 * median / (1 + ratio)
    # The outermost are beyond the deciles of 11 samples, which are samples 1 and 9.
    middle = [median] * (count - 4)
    return [low, low, *middle, low * ratio, low * ratio]


def point(joint=100.0, again=None, **others):
    samples = {"joint": joint, CONTROL: joint if again is None else again, **others}
    return {k: v if isinstance(v, list) else spread(v) for k, v in samples.items()}


def test_the_example_holds():
    assert doctest.testmod(retention).failed == 0


def test_the_fastest_of_those_that_qualify_gets_the_anchor():
    samples = point(native=90.0, rail=80.0, permutation=85.0)
    assert judge(samples, relocated=True).path == "rail"
    noisy = {**samples, "rail": spread(80.0, 1.3)}
    verdict = judge(noisy, relocated=True)
    assert verdict.path == "permutation" and "1.176" in verdict.reason


@pytest.mark.parametrize("ratio, path", [(1.05, "native"), (1.0499, None), (1.06, "native")])
def test_an_advantage_of_five_percent_is_asked(ratio, path):
    verdict = judge(point(joint=ratio * 100.0, native=100.0), relocated=True)
    assert verdict.path == path
    assert f"{ratio:.3f}" in verdict.reason


def test_the_advantage_is_of_joints_p10_over_the_candidates_p90():
    """Medians are 1.2 apart, but the deciles only 1.2 / 1.1 / 1.1."""
    wide = {"joint": spread(120.0, 1.19), "native": spread(100.0, 1.19)}
    verdict = judge(point(**wide, again=wide["joint"]), relocated=True)
    assert verdict.path is None and "less than 1.05" in verdict.reason


@pytest.mark.parametrize("ratio, path", [(1.199, "native"), (1.201, None)])
@pytest.mark.parametrize("wide", ["joint", "native"])
def test_a_spread_above_twenty_percent_is_refused(wide, ratio, path):
    medians = {"joint": 200.0, "native": 100.0}
    samples = {name: spread(median) for name, median in medians.items()}
    samples[wide] = spread(medians[wide], ratio)
    verdict = judge(point(**samples, again=200.0), relocated=True)
    assert verdict.path == path
    assert path or f"{wide} spreads by {ratio}" in verdict.reason


@pytest.mark.parametrize(
    "again, noisy", [(109.9, False), (110.1, True), (90.92, False), (90.8, True)]
)
def test_a_path_measured_twice_must_agree_within_ten_percent(again, noisy):
    verdict = judge(point(again=again, native=50.0), relocated=True)
    assert (verdict.path is None) == noisy
    assert verdict.reason.startswith("noisy: joint and joint again") == noisy


@pytest.mark.parametrize("one, other", [("native", "rail"), ("permutation", "joint")])
def test_paths_that_do_the_same_must_agree_where_nothing_is_relocated(one, other):
    medians = {"native": 80.0, "rail": 80.0, "permutation": 100.0, "joint": 100.0, "again": 100.0}
    assert judge(point(**medians), relocated=False).path == "native"
    apart = {**medians, one: medians[other] * 1.2}
    verdict = judge(point(**apart), relocated=False)
    assert verdict.path is None and verdict.reason.startswith(f"noisy: {one} and {other}")
    assert judge(point(**apart), relocated=True).path in ("native", "rail")


def test_equivalents_are_no_anchors_against_each_other():
    """Where nothing is relocated permutation is joint: 9 % between them are noise."""
    samples = point(native=150.0, rail=150.0, permutation=92.0)
    assert judge(samples, relocated=True).path == "permutation"
    assert judge(samples, relocated=False).path is None


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="must hold joint and 'joint again'"):
        judge({"joint": spread(1.0)}, relocated=True)
    with pytest.raises(ValueError, match=r"\['native'\] must hold at least 5 times, got 4"):
        judge(point(native=[1.0] * 4), relocated=True)
    with pytest.raises(ValueError, match=r"\['native'\] must be finite and above 0, got 0"):
        judge(point(native=[1.0] * 4 + [0.0]), relocated=True)
    assert judge(point(), relocated=True).reason == "no path beside joint was measured"


def test_with_two_nodes_waves_change_nothing():
    samples = point(native=80.0, permutation=81.0, rail=100.0)
    assert judge(samples, relocated=True, one_wave=True).path == "native"
    rail = point(native=100.0, permutation=100.0, rail=80.0)
    assert judge(rail, relocated=True).path == "rail"
    assert "noisy: rail and joint" in judge(rail, relocated=True, one_wave=True).reason
    same = point(native=92.0, permutation=92.0, rail=92.0)
    assert judge(same, relocated=False, one_wave=True).reason == "all paths do the same here"


def test_an_advantage_of_exactly_five_percent_is_enough():
    for native in range(100, 400):
        samples = {"joint": [1.05 * native] * 5, CONTROL: [1.05 * native] * 5}
        assert judge({**samples, "native": [float(native)] * 5}, relocated=True).path == "native"


def test_recorded_samples_of_a_gpu_are_judged_as_their_table_says():
    table = CostTable.load(RECORDED)
    found = []
    for point in table.points:
        # Its 4 nodes x 2 GPUs have a rail each: balancing moves records where all are on one.
        verdict = judge(point.samples_us, relocated=point.rho > 1.5)
        assert verdict.reason == point.verdict
        if verdict.path:
            found.append((point.payload_mib, point.rho, point.kappa, verdict.path))
    assert len(table.points) == 16 and {path for *_, path in found} == {"native", "rail"}
    assert found == [(a.payload_mib, a.rho, a.kappa, a.path) for a in table.anchors]


# Recorded in ms: 2 processes of a busy machine with two CPU cores, even rails.
BUSY = {
    "native": [459, 602, 321, 317, 345],
    "rail": [496, 545, 475, 296, 325],
    "permutation": [624, 625, 599, 306, 333],
    "joint": [409, 537, 617, 314, 292],
    CONTROL: [490, 513, 321, 320, 306],
}
CALMER = {  # but for the second turn
    "native": [194, 265, 182, 174, 180],
    "rail": [190, 182, 180, 176, 180],
    "permutation": [194, 334, 182, 185, 179],
    "joint": [196, 361, 181, 184, 177],
    CONTROL: [191, 222, 191, 179, 179],
}


def test_recorded_noise_gets_no_anchor():
    verdict = judge(BUSY, relocated=False)
    assert verdict.path is None
    assert verdict.reason == "noisy: joint and joint again differ by 1.274, more than 1.1"
    for relocated in (False, True):
        verdict = judge(CALMER, relocated=relocated)
        assert verdict.path is None and "joint spreads by 1.652, more than 1.2" in verdict.reason
