"""The selector and its table: the paper's anchors and requests, every bound, every field."""

import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railwave.cost_table import CostTable, Point
from railwave.sched import Anchor, Scales, select
from railwave.sched.selector import MIB, SLACK

# Table 4, its "≈3" as 3.
TABLE_4 = (
    Anchor(7, 1, 1, "permutation"),
    Anchor(7, 1, 3, "permutation"),
    Anchor(14, 1, 1, "permutation"),
    Anchor(28, 1, 1, "native"),
)
SCALES = Scales(rails=8)


def choose(payload_mib, rho=1.0, kappa=1.0, *, anchors=TABLE_4, scales=SCALES):
    return select(anchors, scales, payload_bytes=payload_mib * MIB, rho=rho, kappa=kappa)


@pytest.mark.parametrize(
    "payload_mib, kappa, path, anchor",
    [
        (8.75, 1, "permutation", 0),
        (8.75, 3, "permutation", 1),
        (17.5, 1, "permutation", 2),
        (35, 1, "native", 3),
        (17.5, 3, "joint", None),
        (35, 3, "joint", None),
    ],
)
def test_the_papers_anchors_on_the_papers_requests(payload_mib, kappa, path, anchor):
    decision = choose(payload_mib, kappa=kappa)
    assert (decision.path, decision.anchor) == (path, anchor)
    assert (decision.distance is None) == (anchor is None)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place, path", [(0.999, "native"), (1.0, "native"), (1.001, "joint")])
def test_each_bound_just_inside_at_and_just_outside(sign, place, path):
    anchors = (Anchor(28, 3.0, 2.0, "native"),)
    traffic = {"rho": 3.0, "kappa": 2.0}
    at = {**traffic, "anchors": anchors}
    assert choose(28 * (1.25 * place) ** sign, **at).path == path
    assert choose(28, **{**at, "rho": 3.0 + sign * 0.02 * 7 * place}).path == path
    assert choose(28, **{**at, "kappa": 2.0 + sign * 0.04 * place}).path == path


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("beyond, path", [(5e-10, "native"), (2e-9, "joint")])
def test_each_bound_has_a_slack_of_a_billionth(sign, beyond, path):
    """Of the factor between payloads, and of the features of rho and kappa."""
    at = {"rho": 3.0, "kappa": 2.0, "anchors": (Anchor(28, 3.0, 2.0, "native"),)}
    assert choose(28 * (1.25 * (1 + beyond)) ** sign, **at).path == path
    assert choose(28, **{**at, "rho": 3.0 + sign * (0.02 + beyond) * 7}).path == path
    assert choose(28, **{**at, "kappa": 2.0 + sign * (0.02 + beyond) * 2}).path == path


def test_beyond_a_bound_the_reason_names_it():
    anchors = (Anchor(28, 1.0, 1.0, "native"),)
    apart = "payload 36 MiB is more than 1.25 times apart: the anchor takes 22.4 to 35"
    assert apart in choose(36, anchors=anchors).reason
    apart = "rho differs by 0.1429 of its scale, above 0.02: the anchor takes 1 to 1.14"
    assert apart in choose(28, rho=2.0, anchors=anchors).reason
    apart = "kappa differs by 0.5 of its scale, above 0.02: the anchor takes 1 to 1.04"
    assert apart in choose(28, kappa=2.0, anchors=anchors).reason
    assert "no anchor" in choose(28, anchors=()).reason
    assert choose(0).path == "native" and "no remote payload" in choose(0).reason


def test_the_nearest_anchor_wins_and_the_first_of_equals():
    anchors = (
        Anchor(24, 1, 1, "rail"),
        Anchor(28, 1, 1, "native"),
        Anchor(28, 1, 1, "permutation"),
    )
    assert choose(27, anchors=anchors).anchor == 1
    assert choose(25, anchors=anchors).anchor == 0
    nearer = (Anchor(28, 1.1, 1, "rail"), Anchor(28, 1, 1.03, "native"))
    # In features: 0.1 / 7 = 0.0143 against 0.03 / 2 = 0.015.
    assert choose(28, anchors=nearer).path == "rail"


def test_one_rail_cannot_be_uneven():
    anchors = (Anchor(28, 1, 1, "native"),)
    assert choose(28, rho=1.0, anchors=anchors, scales=Scales(rails=1)).path == "native"
    assert choose(28, rho=5.0, anchors=anchors, scales=Scales(rails=1)).path == "native"


@pytest.mark.parametrize("name, value", [("payload_bytes", -1), ("rho", 0.5), ("kappa", math.nan)])
def test_numbers_that_no_traffic_has_are_refused(name, value):
    traffic = {"payload_bytes": 1.0, "rho": 1.0, "kappa": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"^{name} must be finite and at least"):
        select(TABLE_4, SCALES, **traffic)


@given(
    st.lists(
        st.builds(
            Anchor,
            *(st.floats(1, 100), st.floats(1, 8), st.floats(1, 4)),
            st.sampled_from(["native", "rail", "permutation"]),
        ),
        max_size=5,
    ),
    *(st.floats(1, 100), st.floats(1, 8), st.floats(1, 4)),
)
def test_a_decision_is_of_an_anchor_within_all_bounds_and_no_nearer_one_is(
    anchors, payload_mib, rho, kappa
):
    decision = choose(payload_mib, rho, kappa, anchors=anchors)

    def distance(anchor):
        return math.dist(
            SCALES.features(payload_mib, rho, kappa),
            SCALES.features(anchor.payload_mib, anchor.rho, anchor.kappa),
        )

    near = [
        a
        for a in anchors
        if max(payload_mib / a.payload_mib, a.payload_mib / payload_mib) <= 1.25
        and abs(rho - a.rho) <= 0.14
        and abs(kappa - a.kappa) <= 0.04
    ]
    if near:
        assert decision.anchor is not None
        # Distances within the slack of one another are a tie.
        assert distance(anchors[decision.anchor]) <= min(map(distance, near)) + SLACK
    if decision.anchor is None:
        assert decision.path == "joint"
    else:
        assert decision.path == anchors[decision.anchor].path


TABLE = CostTable(
    {"rails": "8", "hidden": "7168"},
    SCALES,
    TABLE_4,
    (Point(7.0, 1.0, 1.0, {"joint": (10.0, 11.5), "native": (9.0,)}, "kept"),),
)


def test_a_table_is_the_same_after_a_file(tmp_path):
    path = tmp_path / "table.json"
    TABLE.save(path)
    assert CostTable.load(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]  # no part of it is left
    empty = CostTable({}, Scales(rails=1))
    empty.save(path)
    assert CostTable.load(path) == empty
    assert empty.select(payload_bytes=5.0, rho=1.0, kappa=1.0).path == "joint"


def test_a_table_of_another_configuration_is_refused_with_both():
    TABLE.check_fits({"rails": "8", "hidden": "7168"})
    with pytest.raises(ValueError) as caught:
        TABLE.check_fits({"rails": "4", "hidden": "7168", "device": "cpu"})
    differ = ["device: here 'cpu', table None", "rails: here '4', table '8'"]
    assert str(caught.value).splitlines()[1:] == differ


def change(data, place, value):
    """Set data[a][b]... to a value, or delete it."""
    *folders, last = place
    for folder in folders:
        data = data[folder]
    if value is DELETE:
        del data[last]
    else:
        data[last] = value


DELETE = object()


@pytest.mark.parametrize(
    "place, value, said",
    [
        (("format",), 2, "format must be 1, got 2"),
        (("anchors",), DELETE, "the table must be an object with the fields"),
        (("fingerprint",), {"rails": 8}, "fingerprint must be an object of strings"),
        (("scales", "rails"), 0, "scales.rails must be at least 1, got 0"),
        (("scales", "kappa"), 0, r"scales.kappa must be a number in \(0, 1e\+15\], got 0"),
        (
            ("scales", "payload_factor"),
            0.5,
            r"scales.payload_factor must be in \[1, 1e\+06\], got 0.5",
        ),
        (("scales", "shape"), DELETE, "scales must be an object with the fields"),
        (("anchors",), {}, "anchors must be a list, got dict"),
        (("anchors", 1, "path"), "joynt", r"anchors\[1\].path must be one of"),
        (("anchors", 1, "rho"), 0.9, r"anchors\[1\].rho must be in \[1, 1e\+06\], got 0.9"),
        (("anchors", 2, "payload_mib"), "7", r"anchors\[2\].payload_mib must be a number"),
        (("anchors", 0, "kappa"), True, r"anchors\[0\].kappa must be a number"),
        (
            ("points", 0, "samples_us", "joint", 1),
            -1,
            r"points\[0\].samples_us.joint\[1\] must be a number",
        ),
        (("points", 0, "samples_us"), {"fast": []}, r"points\[0\].samples_us must be an object"),
        (("anchors", 1, "rho"), 10**400, r"anchors\[1\].rho must be a number in \(0, 1e\+15\]"),
        (("scales", "rails"), 10**400, "scales.rails must be below"),
        (("scales", "kappa"), 1e-320, "scales.kappa must be in"),
        (
            ("points", 0, "samples_us"),
            {"native": [1.0]},
            r"points\[0\].samples_us must hold times of joint",
        ),
        (
            ("points", 0, "samples_us", "native"),
            [],
            r"points\[0\].samples_us.native must hold times",
        ),
        (("format",), True, "format must be 1, got True"),
        (("points", 0, "verdict"), None, r"points\[0\].verdict must be a text, got None"),
    ],
)
def test_a_damaged_table_names_file_and_field(place, value, said, tmp_path):
    path = tmp_path / "table.json"
    TABLE.save(path)
    data = copy.deepcopy(json.loads(path.read_text()))
    change(data, place, value)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"table\.json: {said}"):
        CostTable.load(path)


@pytest.mark.parametrize("field", ["format", "anchors", "shape", "path", "joint"])
def test_a_field_that_is_given_twice_is_named(field, tmp_path):
    path = tmp_path / "table.json"
    TABLE.save(path)
    path.write_text(path.read_text().replace(f'"{field}":', f'"{field}": 1, "{field}":', 1))
    with pytest.raises(ValueError, match=rf"table\.json: a field must be given once, got {field} "):
        CostTable.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "nan", '{"format": 1}', "[" * 100_000])
def test_what_is_no_table_is_refused(text, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json: "):
        CostTable.load(path)


@pytest.mark.parametrize(
    "one, other, at",
    [
        (Anchor(7, 1.29, 1, "native"), Anchor(7, 1.45, 1, "rail"), (7, 1.37, 1)),
        (Anchor(8, 1, 1, "native"), Anchor(12.5, 1, 1, "rail"), (10, 1, 1)),
    ],
)
def test_ties_go_to_the_first_whatever_float64_rounds(one, other, at):
    scales = Scales(rails=8, shape=1.0)
    for anchors in ((one, other), (other, one)):
        assert choose(*at, anchors=anchors, scales=scales).anchor == 0


@pytest.mark.parametrize("values", [(math.nan, 1, 1), (7, math.nan, 1), (0, 1, 1), (7, 1, 0.5)])
def test_an_anchor_that_no_traffic_could_be_near_is_refused(values):
    with pytest.raises(ValueError, match="must be in"):
        Anchor(*values, "native")


def test_a_table_is_written_where_a_link_points(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    TABLE.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and CostTable.load(tmp_path / "real.json") == TABLE
