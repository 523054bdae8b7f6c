"""The plot of a plan."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.cloud._drawn_fleets import an_offer
from thrifty.cloud import Fleet, Interval, MachineGroup
from thrifty.cloud._plan_plot import plot_front
from thrifty.cloud.planning._planner import FleetPlan
from thrifty.core import CloudError, MissingExtraError


pytestmark = pytest.mark.slow


def a_fleet(num, hours, usd, spread=1.25):
    def about(value):
        return Interval(median=value, low=value / spread, high=value * spread)

    machines = (MachineGroup(offer=an_offer(), num=num, batch=8),)
    return Fleet(
        machines=machines, step_s=about(1.0), time_s=about(hours * 3600.0), cost_usd=about(usd)
    )


FRONT = (a_fleet(4, 1.0, 40.0), a_fleet(2, 2.0, 30.0), a_fleet(1, 4.0, 20.0))


def a_plan(best=FRONT[1], front=FRONT):
    return FleetPlan(best=best, front=front, num_considered=9)


def points(axes):
    """Return the centres and the ends of the error bars, by label."""
    return {
        container.get_label(): (
            container.lines[0].get_xydata().tolist(),
            [bars.get_segments() for bars in container.lines[2]],
        )
        for container in axes.containers
    }


def numbered(figure):
    """Return where the number of each listed fleet is drawn, by the fleet's name."""
    places = {text.get_text(): text.xy for text in figure.axes[0].texts}
    listed = (text.get_text().split(":  ") for text in figure.legends[1].get_texts())
    return {name: places[number] for number, name in listed}


def test_every_fleet_is_where_it_belongs():
    figure = plot_front(a_plan())
    (axes,) = figure.axes
    found = points(axes)
    assert found["no other is both cheaper and faster"][0] == [[1.0, 40.0], [4.0, 20.0]]
    middles, (times, costs) = found["chosen"]
    assert middles == [[2.0, 30.0]]
    assert times[0].ravel().tolist() == pytest.approx([1.6, 30.0, 2.5, 30.0])
    assert costs[0].ravel().tolist() == pytest.approx([2.0, 24.0, 2.0, 37.5])
    assert numbered(figure) == {
        "4 x v1 (1 V100 each)": (1.0, 40.0),
        "2 x v1 (1 V100 each)": (2.0, 30.0),
        "1 x v1 (1 V100)": (4.0, 20.0),
    }
    border = axes.lines[0]
    assert border.get_xydata().tolist() == [[1.0, 40.0], [2.0, 30.0], [4.0, 20.0]]


def test_the_goal_is_a_line():
    lines = {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0])
        for line in plot_front(a_plan(), deadline_s=10_800.0, budget_usd=35.0).axes[0].lines
    }
    assert lines["deadline"][0] == 3.0
    assert lines["budget"][1] == 35.0
    labels = {line.get_label() for line in plot_front(a_plan()).axes[0].lines}
    assert labels.isdisjoint({"deadline", "budget"})


def test_nothing_may_be_chosen():
    (axes,) = plot_front(a_plan(best=None)).axes
    assert len(points(axes)) == 1
    assert len(points(axes)["no other is both cheaper and faster"][0]) == 3


def test_the_chosen_one_may_be_off_the_front_or_all_of_it():
    assert list(numbered(plot_front(a_plan(best=a_fleet(3, 3.0, 35.0))))) == [
        "4 x v1 (1 V100 each)",
        "2 x v1 (1 V100 each)",
        "3 x v1 (1 V100 each)",
        "1 x v1 (1 V100)",
    ]
    figure = plot_front(a_plan(front=FRONT[1:2]))
    assert set(points(figure.axes[0])) == {"chosen"}
    assert list(numbered(figure)) == ["2 x v1 (1 V100 each)"]


def test_wide_ranges_are_logarithmic():
    (near,) = plot_front(a_plan()).axes
    assert (near.get_xscale(), near.get_yscale()) == ("linear", "linear")
    far = (a_fleet(4, 0.1, 40.0), FRONT[2])
    (axes,) = plot_front(a_plan(best=None, front=far)).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


def test_no_number_hides_another():
    front = tuple(a_fleet(60 - at, 1.0 + at, 100.0 - at) for at in range(60))
    figure = plot_front(a_plan(best=front[31], front=front))
    found = numbered(figure)
    assert 5 <= len(found) < 60
    assert "29 x v1 (1 V100 each)" in found  # the chosen one
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_it_can_be_written(tmp_path):
    plot_front(a_plan(), deadline_s=10_800.0).savefig(tmp_path / "front.png", dpi=40)
    assert (tmp_path / "front.png").read_bytes()[1:4] == b"PNG"


def test_it_shows_itself_in_a_notebook():
    assert plot_front(a_plan())._repr_png_()[1:4] == b"PNG"


def test_there_is_something_to_draw():
    with pytest.raises(CloudError, match="no fleets to draw"):
        plot_front(a_plan(best=None, front=()))


def test_matplotlib_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="plots"):
        plot_front(a_plan())
