"""The pictures show the numbers they are given, and refuse what they could not draw."""

import doctest
import importlib
import io
import math
import re
import sys
import warnings

import pytest

pytest.importorskip("matplotlib", reason="needs pip install '.[notebook]'")

import numpy as np
import torch
from matplotlib.colors import to_hex

from railwave.plots import (
    plot_comparison,
    plot_demand,
    plot_path_map,
    plot_rail_shares,
    plot_waves,
)
from railwave.plots.style import NODE, PATH
from railwave.sched import Anchor, Scales


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_rail_shares_are_of_each_nodes_own_sum():
    native, joint = [[6, 2], [0, 0], [1, 3]], [[4, 4], [0, 0], [2, 2]]
    figure = plot_rail_shares({"native": native, "joint": joint}, title="a $b")
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[75, 25, 50, 50], [0, 0, 0, 0], [25, 75, 50, 50]]
    assert [axes.get_title() for axes in figure.axes] == ["node 0", "node 1", "node 2"]
    assert labels(figure) == ["native", "joint", "even: 50 %"]
    assert figure.get_suptitle() == r"a \$b"
    assert {axes.lines[0].get_ydata()[0] for axes in figure.axes} == {50}


def test_every_series_is_in_the_legend_and_huge_loads_are_shares():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_rail_shares({"_a": [[1e300, 1e300]], "b": [[3e-320, 1e-320]]})
    assert labels(figure) == ["_a", "b", "even: 50 %"]
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights[:2] == [50, 50] and heights[2] == pytest.approx(75, rel=1e-3)
    bars = [container.patches[0].get_facecolor() for container in figure.axes[0].containers]
    assert [patch.get_facecolor() for patch in figure.legends[0].get_patches()] == bars


def test_rail_shares_of_many_nodes_fill_lines_of_panels():
    figure = plot_rail_shares({"native": np.ones((5, 20))})
    assert [axes.get_visible() for axes in figure.axes] == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    "loads, error, message",
    [
        ({}, ValueError, r"loads must be 1 to 6 tables of one shape, got \{\}"),
        ({"a": [[1]], "b": [[1, 2]]}, ValueError, r"one shape, got .*'a': \(1, 1\)"),
        (
            {"a": [1]},
            ValueError,
            r"loads\['a'\] must have 2 non-empty dimensions, got shape \(1,\)",
        ),
        ({"a": [[1, -2]]}, ValueError, r"at least 0, got -2.0 at \(0, 1\)"),
        ({"a": [["x"]]}, TypeError, r"loads\['a'\] must be a table of real numbers"),
    ],
)
def test_rail_shares_refuse(loads, error, message):
    with pytest.raises(error, match=message):
        plot_rail_shares(loads)


def test_demand_numbers_all_but_the_diagonal():
    figure = plot_demand([[7, 1 << 30, 0], [3 << 29, 7, 0], [0, 0, 7]], unit="GiB")
    axes, bar = figure.axes
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(1, 0): "1", (2, 0): "0", (0, 1): "1.5", (2, 1): "0", (0, 2): "0", (1, 2): "0"}
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == (
        "to node",
        "from node",
        "GiB",
    )
    shown = axes.images[0].get_array()
    assert not shown.data.diagonal().any()  # colours are scaled by what is masked, too
    assert shown.mask.tolist() == np.eye(3, dtype=bool).tolist() and shown[1, 0] == 1.5


def test_demand_of_many_nodes_and_of_nothing():
    assert not plot_demand(np.ones((17, 17))).axes[0].texts
    assert [text.get_text() for text in plot_demand(np.zeros((2, 2))).axes[0].texts] == ["0", "0"]
    assert not plot_demand([[5]]).axes[0].texts


def test_demand_refuses():
    with pytest.raises(ValueError, match=r"unit must be one of .*, got 'GB'"):
        plot_demand([[0, 1], [1, 0]], unit="GB")
    with pytest.raises(ValueError, match=r"demand must be of shape \(N, N\), got \(1, 2\)"):
        plot_demand([[0, 1]])


def test_waves_give_a_lone_sender_the_whole_lane():
    """Though others shared it before; 0.1 + 0.2 is a little more than 0.3."""
    figure = plot_waves([(1, 0, 0, 0.1 + 0.2), (2, 0, 0, 0.1), (3, 0, 0.3, 0.6)])
    heights = [round(bar.get_height(), 2) for bar in figure.axes[0].patches]
    assert heights == [0.42, 0.42, 0.84]


def test_waves_stack_what_overlaps_and_number_it():
    figure = plot_waves([(1, 0, 0, 2), (2, 0, 1, 3), (3, 0, 2, 4), (0, 2, 0, 4)], nodes=5)
    (axes,) = figure.axes
    bars = [(bar.get_x(), bar.get_width(), round(bar.get_height(), 2)) for bar in axes.patches]
    # To node 0 there are two lines: node 3 begins as node 1 ends, and takes its line.
    assert bars == [(0, 2, 0.42), (1, 2, 0.42), (2, 2, 0.42), (0, 4, 0.84)]
    tops = [round(bar.get_y(), 2) for bar in axes.patches]
    assert tops == [-0.42, 0, -0.42, 1.58]
    colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colours == [NODE[1], NODE[2], NODE[3], NODE[0]]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "0"]
    assert labels(figure) == ["from 0", "from 1", "from 2", "from 3"]
    patches = figure.legends[0].get_patches()
    assert [to_hex(patch.get_facecolor()) for patch in patches] == list(NODE[:4])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        f"to node {d}" for d in range(5)
    ]


@pytest.mark.parametrize("begin", [-1000, 0, 1e6, 1e9])
def test_waves_number_what_is_long_beside_the_axis_wherever_time_begins(begin):
    """0.035 of it is the least; bars that follow one another share no lane, whatever is rounded."""
    times = [(1, 0, 0, 60), (2, 0, 60, 96.4), (3, 0, 96.4, 100), (2, 1, 0, 3.4), (3, 1, 5, 9)]
    figure = plot_waves([(s, d, begin + a, begin + b) for s, d, a, b in times])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "3"]
    assert {round(bar.get_height(), 2) for bar in axes.patches} == {0.84}
    assert axes.get_xlim() == (begin, begin + 100)


@pytest.mark.parametrize("at", [0, 7, -1e300])
def test_waves_of_no_length_warn_of_nothing(at):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (axes,) = plot_waves([(1, 0, at, at), (2, 0, at, at)]).axes
    low, high = axes.get_xlim()
    assert low < at < high and not axes.texts


@pytest.mark.parametrize(
    "spans, nodes, message",
    [
        ([], None, "spans must hold at least one transfer, got none"),
        ([(0, 0, 0, 1)], None, r"spans\[0\] must be between two nodes .*, got \(0, 0\)"),
        ([(0, 2, 0, 1)], 2, r"spans\[0\] must be between two nodes of 2, got \(0, 2\)"),
        ([(0, 0.5, 0, 1)], None, r"between two nodes .*, got \(0, 0.5\)"),
        ([(0, 1, 2, 1)], None, r"end no sooner than it begins, got 2 to 1"),
        ([(0, 1, 0, float("inf"))], None, r"must be finite"),
    ],
)
def test_waves_refuse(spans, nodes, message):
    with pytest.raises(ValueError, match=message):
        plot_waves(spans, nodes=nodes)


def cell_at(axes, rho, kappa):
    """Return the path whose colour a panel of a path map has at a point."""
    (mesh,) = axes.collections
    corners = mesh.get_coordinates()
    column = np.searchsorted(corners[0, :, 0], rho) - 1
    row = np.searchsorted(corners[:, 0, 1], kappa) - 1
    return list(PATH)[int(mesh.get_array()[row, column])]


def test_path_map_draws_what_select_takes():
    anchors = [Anchor(28, 1, 1, "native"), Anchor(14, 4, 2, "permutation")]
    figure = plot_path_map(anchors, Scales(rails=8), [28, 14], points=[(2, 1.5)])
    at_28, at_14 = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["28 MiB a GPU", "14 MiB a GPU"]
    # 0.02 of the scales: 0.14 of rho, 0.04 of kappa; the bounds are cells' edges.
    assert cell_at(at_28, 1.139, 1.039) == "native"
    assert {cell_at(at_28, 1.141, 1.039), cell_at(at_28, 1.139, 1.041)} == {"joint"}
    assert cell_at(at_14, 3.861, 2.039) == "permutation" and cell_at(at_14, 1.1, 1.01) == "joint"
    marks = [(line.get_marker(), line.get_markerfacecolor()) for line in at_28.lines]
    assert marks[:2] == [("D", "none"), ("D", PATH["native"])] and marks[2][0] == "x"
    marked = ["anchor", "anchor, other payload", "this traffic"]
    assert labels(figure) == ["native", "permutation", "joint", *marked]


def test_path_map_leaves_out_anchors_beyond_its_range():
    anchors = [Anchor(28, 1, 1, "native"), Anchor(28, 1, 3, "native")]
    figure = plot_path_map(anchors, Scales(rails=8), [28], rho=(1, 1.3), kappa=(1, 1.1))
    assert [line.get_ydata()[0] for line in figure.axes[0].lines] == [1]


def test_path_map_of_an_empty_table_is_joint():
    figure = plot_path_map([], Scales(rails=1), [1.0])
    assert cell_at(figure.axes[0], 1.5, 2.0) == "joint" and labels(figure) == ["joint"]


def test_path_map_refuses():
    with pytest.raises(ValueError, match="payloads_mib must name at least one payload, got none"):
        plot_path_map([], Scales(rails=8), [])
    with pytest.raises(ValueError, match=r"rho must be a range from at least 1, got \(0.0, 2.0\)"):
        plot_path_map([], Scales(rails=8), [1], rho=(0, 2))


def test_pyplot_stays_out_and_examples_hold():
    had_pyplot = "matplotlib.pyplot" in sys.modules
    for name in ("comparison", "demand", "path_map", "rails", "style", "waves"):
        result = doctest.testmod(importlib.import_module(f"railwave.plots.{name}"))
        assert result.attempted > 0 and result.failed == 0, name
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize(
    "spans, nodes, error, said",
    [
        (5, None, TypeError, "spans must be a sequence of transfers, got int"),
        ([(0, 1)], None, TypeError, "spans[0] must be four numbers"),
        ([("a", 1, 0, 1)], None, TypeError, "spans[0] must be four numbers"),
        ([(math.nan, 1, 0, 1)], None, ValueError, "spans[0] must be between two nodes"),
        ([(0, 1, 0, 1)], 0, ValueError, "nodes must be"),
        ([(0, 1, 0, 1)], 1.5, TypeError, "nodes must be"),
        ([(0, 999, 0, 1)], None, ValueError, "nodes must be at most 128"),
    ],
)
def test_waves_that_cannot_be_drawn_are_refused(spans, nodes, error, said):
    with pytest.raises(error, match=re.escape(said)):
        plot_waves(spans, nodes=nodes)


def test_rail_shares_that_cannot_be_drawn_are_refused():
    with pytest.raises(TypeError, match="loads must be tables by name, got list"):
        plot_rail_shares([[1, 2]])
    with pytest.raises(ValueError, match="loads must be of at most 128 nodes, got 200"):
        plot_rail_shares({"native": [[1, 2]] * 200})


ROW = {"scheduler": "joint", "time_us": 4.0, "speedup": 2.0, "rail_share": [0.5, 0.5]}


def compare(*rows, **entries):
    return plot_comparison({"bound_us": 1.0, "rows": list(rows) or [ROW], **entries})


def path_map(anchors=(), scales=Scales(rails=8), payloads_mib=(1.0,), **more):  # noqa: B008
    return plot_path_map(anchors, scales, payloads_mib, **more)


@pytest.mark.parametrize(
    "draw, error, said",
    [
        (lambda: plot_comparison([ROW]), TypeError, "comparison must be a mapping with bound_us, "),
        (
            lambda: plot_comparison({"rows": [ROW]}),
            ValueError,
            "comparison must have bound_us, row",
        ),
        (lambda: plot_comparison({}), ValueError, "got no bound_us, rows"),
        (
            lambda: compare(rows=None),
            TypeError,
            "comparison['rows'] must be a sequence of rows, go",
        ),
        (
            lambda: compare(rows=ROW),
            TypeError,
            "comparison['rows'] must be a sequence of rows, got",
        ),
        (lambda: compare(rows=[]), ValueError, "comparison must have at least one row, got none"),
        (lambda: compare(bound_us=None), TypeError, "comparison['bound_us'] must be a number, got"),
        (
            lambda: compare(bound_us=-1),
            ValueError,
            "comparison['bound_us'] must be finite and at l",
        ),
        (
            lambda: compare(ROW, 3),
            TypeError,
            "comparison['rows'][1] must be a mapping with schedul",
        ),
        (
            lambda: compare({"scheduler": "joint"}),
            ValueError,
            "[0] must have scheduler, time_us, s",
        ),
        (
            lambda: compare(ROW | {"scheduler": 1}),
            TypeError,
            "['scheduler'] must be a str, got int",
        ),
        (lambda: compare(ROW | {"time_us": "4"}), TypeError, "['time_us'] must be a number, got s"),
        (
            lambda: compare(ROW | {"time_us": math.nan}),
            ValueError,
            "['time_us'] must be finite and",
        ),
        (
            lambda: compare(ROW | {"speedup": None}),
            TypeError,
            "['speedup'] must be a number, got N",
        ),
        (
            lambda: compare(ROW | {"rail_share": 1}),
            TypeError,
            "['rail_share'] must be a sequence of",
        ),
        (lambda: compare(ROW | {"rail_share": []}), ValueError, "at least one, got 0"),
        (
            lambda: compare(ROW, ROW | {"rail_share": [1]}),
            ValueError,
            "rails, at least one, got 1, r",
        ),
        (
            lambda: compare(ROW | {"rail_share": [1, -1]}),
            ValueError,
            "['rail_share'][1] must be fin",
        ),
        (lambda: path_map(anchors=5), TypeError, "anchors must be a sequence of Anchor, got int 5"),
        (
            lambda: path_map(anchors=[(1, 1)]),
            TypeError,
            "anchors[0] must be an Anchor, got tuple (",
        ),
        (
            lambda: path_map(anchors=[Anchor(28, 1, 1, "fast")]),
            ValueError,
            "anchors[0].path must be one of native, rail, permutation, joint, granted, got",
        ),
        (lambda: path_map(scales=8), TypeError, "scales must be Scales, got int 8"),
        (
            lambda: path_map(payloads_mib=28),
            TypeError,
            "payloads_mib must be a sequence of numbers",
        ),
        (
            lambda: path_map(payloads_mib=["28"]),
            TypeError,
            "payloads_mib[0] must be a number, got s",
        ),
        (
            lambda: path_map(payloads_mib=[-1]),
            ValueError,
            "payloads_mib[0] must be finite and at le",
        ),
        (lambda: path_map(rho=2), TypeError, "rho must be a sequence of 2 numbers, got int 2"),
        (
            lambda: path_map(rho=(1, 2, 3)),
            ValueError,
            "rho must be 2 numbers, got 3: tuple (1, 2, 3)",
        ),
        (lambda: path_map(rho=()), ValueError, "rho must be 2 numbers, got 0"),
        (
            lambda: path_map(kappa=None),
            TypeError,
            "kappa must be a sequence of 2 numbers, got None",
        ),
        (lambda: path_map(kappa=(1, math.inf)), ValueError, "kappa[1] must be finite, got inf"),
        (
            lambda: path_map(kappa=(2, 1)),
            ValueError,
            "kappa must be a range from at least 1, got (2",
        ),
        (
            lambda: path_map(points=3),
            TypeError,
            "points must be a sequence of (rho, kappa), got int",
        ),
        (lambda: path_map(points=[(1, 2), 3]), TypeError, "points[1] must be a sequence of 2 numb"),
        (lambda: path_map(points=[(1, "a")]), TypeError, "points[0][1] must be a number, got str"),
        (
            lambda: path_map(points=[(1, math.nan)]),
            ValueError,
            "points[0][1] must be finite, got na",
        ),
        (lambda: plot_demand([[0, 1j]]), TypeError, "demand must be a table of real numbers"),
        (
            lambda: plot_demand(np.ones((2, 2)) * 1j),
            TypeError,
            "demand must be a table of real num",
        ),
        (lambda: plot_demand([[10**400]]), TypeError, "demand must be a table of real numbers"),
        (
            lambda: plot_demand(torch.ones(2, 2, requires_grad=True)),
            TypeError,
            "demand must be a table of real numbers",
        ),
        (lambda: plot_demand({"a": 1}), TypeError, "demand must be a table of real numbers"),
        (
            lambda: plot_demand([[1]], unit=["MiB"]),
            ValueError,
            "unit must be one of ['records', 'Mi",
        ),
        (lambda: plot_rail_shares({"a": None}), ValueError, "loads['a'] must have 2 non-empty dim"),
        (
            lambda: plot_waves([(0, 1, 0, 10**400)]),
            TypeError,
            "spans[0] must be four numbers (sour",
        ),
        (
            lambda: plot_waves([(0, 1, "0", 1)]),
            TypeError,
            "spans[0] must be four numbers (source, ",
        ),
        (lambda: plot_waves([5]), TypeError, "spans[0] must be four numbers (source, destination,"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(draw, error, said):
    with pytest.raises(error, match=re.escape(said)):
        draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda most: plot_waves([(0, 1, 0, most)]),
        lambda most: plot_waves([(0, 1, -most, most)]),
        lambda most: plot_demand([[0, most], [1, 0]], unit="GiB"),
        lambda most: plot_rail_shares({"a": [[most] * 8]}),
        lambda most: compare(ROW | {"time_us": most}, ROW),
        lambda most: compare(ROW | {"time_us": most}, bound_us=most),
        lambda most: compare(ROW | {"time_us": most}, bound_us=1 / most),
    ],
)
@pytest.mark.filterwarnings("ignore:constrained_layout")  # of labels with 300 digits
def test_huge_numbers_are_drawn_up_to_a_bound(draw):
    with pytest.raises(ValueError, match=r"1e\+300.* got .*1e\+301"):
        draw(1e301)
    draw(1e300).savefig(io.BytesIO())


def test_names_are_no_formulas():
    name = "$x_{$"
    assert labels(plot_rail_shares({name: [[1]]}))[0] == r"\$x_{\$"
    ticks = compare(ROW | {"scheduler": name}).axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == [r"\$x_{\$"]
    assert plot_waves([(0, 1, 0, 1)], xlabel=name).axes[0].get_xlabel() == r"\$x_{\$"
    with pytest.raises(TypeError, match="xlabel must be a str, got NoneType None"):
        plot_waves([(0, 1, 0, 1)], xlabel=None)


@pytest.mark.parametrize(
    "draw",
    [
        lambda title: plot_comparison({"bound_us": 1.0, "rows": [ROW]}, title=title),
        lambda title: path_map(title=title),
        lambda title: plot_demand([[0, 1], [1, 0]], title=title),
        lambda title: plot_rail_shares({"a": [[1]]}, title=title),
        lambda title: plot_waves([(0, 1, 0, 1)], title=title),
    ],
)
def test_a_title_is_text(draw):
    assert draw("mine").get_suptitle() == "mine"
    with pytest.raises(TypeError, match="title must be a str, got int 5"):
        draw(5)


def test_arrays_and_tensors_are_as_good_as_lists():
    row = ROW | {"rail_share": np.array([0.5, 0.5]), "time_us": np.float32(4)}
    assert len(compare(row, rows=(row,)).axes) == 2
    figure = path_map(rho=np.array([1, 2]), payloads_mib=torch.tensor([1.0, 2.0]), points=[[1, 1]])
    assert len(figure.axes) == 2 and figure.axes[0].get_xlim() == (1, 2)
    spans = [[1, 0, 0, 3], [2, 0, 3, 4]]
    for kind in (np.array, torch.tensor):
        (axes,) = plot_waves(kind(spans)).axes
        assert [text.get_text() for text in axes.texts] == ["1", "2"]
        with pytest.raises(ValueError, match=r"between two nodes of 2, got \(2, 0\)"):
            plot_waves(kind(spans), nodes=2)
