from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.contour import ContourSet

from tests.study.helpers import SOLO, Sized, make_study
from tests.study.synthetic import NESTED, nested_value, trials_of
from thrifty.core import UsageError
from thrifty.space import Choice, Float, Int, Space
from thrifty.study import plots
from thrifty.study._forecast import unique_epochs


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


LOSS = {"metric": "loss", "mode": "min"}
FLAT = Space(lr=Float(1e-4, 1, log=True), width=Int(8, 64), act=Choice(["relu", "a_$x$_" * 9]))


def by_rate(config, rng):
    return (math.log10(config["lr"]) + 2) ** 2 + 0.1 * rng.normal()


@pytest.fixture
def trials():
    return trials_of(FLAT, by_rate, num=20)


def draw(figure):
    """Draw a figure, so that matplotlib's warnings (which are errors) show."""
    figure.canvas.draw()
    return figure


def points_of(axes, label=None):
    """Count the points that are shown as markers, in all or by label."""
    lines = [line for line in axes.get_lines() if label in (None, line.get_label())]
    return sum(len(line.get_xdata()) for line in lines if line.get_marker() in (".", "o"))


def inside(axes):
    """Count the points within the limits."""
    (low, high), count = axes.get_ylim(), 0
    for line in axes.get_lines():
        if line.get_marker() == ".":
            count += sum(low <= y <= high for y in line.get_ydata())
    return count


# -- history --------------------------------------------------------------------------


def test_history_shows_the_best_so_far(trials):
    trials[3] = replace(trials[3], state="failed")
    trials[4] = replace(trials[4], value=None)
    axes = draw(plots.history(trials, **LOSS)).axes[0]
    assert points_of(axes, "trials") == 18
    (best,) = (line for line in axes.get_lines() if line.get_label() == "best so far")
    assert (np.diff(best.get_ydata()) <= 0).all()
    shown = [t for t in trials if t.value is not None and t.state != "failed"]
    first = min(shown, key=lambda t: t.value)
    assert best.get_ydata()[-1] == first.value
    assert f"trial {first.number}: " in axes.get_legend().get_texts()[-1].get_text()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("trials", "loss")


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 9])
def test_ticks_are_at_whole_epochs(epochs):
    few = trials_of(NESTED, nested_value, num=4, epochs=lambda _: epochs)
    (axes,) = draw(plots.learning_curves(few, metric="loss", mode="min")).axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_history_of_a_maximum_over_epochs(trials):
    spent = list(range(3, 63, 3))
    axes = draw(plots.history(trials, metric="score", mode="max", unique_epochs=spent)).axes[0]
    (best,) = (line for line in axes.get_lines() if line.get_label() == "best so far")
    assert (np.diff(best.get_ydata()) >= 0).all()
    assert list(best.get_xdata()) == spent
    assert "epochs" in axes.get_xlabel()


def test_history_takes_the_best_among_feasible_trials(trials):
    best = min(trials, key=lambda t: t.value)
    trials[best.number] = replace(best, violation=0.5)
    axes = draw(plots.history(trials, **LOSS)).axes[0]
    assert points_of(axes, "breaks a constraint") == 1
    (line,) = (line for line in axes.get_lines() if line.get_label() == "best so far")
    assert line.get_ydata()[-1] > best.value


def test_history_says_what_is_outside(trials):
    trials[5] = replace(trials[5], value=1e9)
    axes = draw(plots.history(trials, **LOSS)).axes[0]
    assert inside(axes) == 19
    assert axes.get_title(loc="left").startswith("1 outside")


def test_unique_epochs_are_those_of_the_savings(tmp_path):
    study = make_study(tmp_path).run(progress=False)
    counts = unique_epochs(study._current_ledger())
    assert len(counts) == len(study.trials)
    assert counts[0] == 6
    assert counts == sorted(counts)
    assert counts[-1] == study.savings.unique_epochs


# -- importance -----------------------------------------------------------------------


def test_importance_has_a_bar_for_each():
    shares = {"lr": 0.7, "cost_$": 0.3, "x" * 99: 0.0}
    axes = draw(plots.importance(shares, metric="loss")).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.0, 0.3, 0.7]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[1:] == [r"cost_\$", "lr"]
    assert len(labels[0]) == 40
    assert [text.get_text() for text in axes.texts] == ["0.0%", "30.0%", "70.0%"]


def test_no_importance_is_a_picture_too():
    assert draw(plots.importance({"lr": 0.0}, metric="loss")).axes[0].get_xlim()[1] > 0


# -- slices ---------------------------------------------------------------------------


def test_a_slice_for_each_coordinate(trials):
    trials[3] = replace(trials[3], state="failed")
    rate, width, act = draw(plots.slice_plot(trials, FLAT, **LOSS)).axes
    assert [axes.get_xscale() for axes in (rate, width, act)] == ["log", "linear", "linear"]
    assert [points_of(axes) for axes in (rate, width, act)] == [19] * 3
    assert rate.get_ylabel() == "loss after 4 epochs"
    assert [axes.get_xlabel() for axes in (rate, width, act)] == ["lr", "width", "act"]
    names = [label.get_text() for label in act.get_xticklabels()]
    assert names[0] == "relu"
    assert len(names[1].replace("\\", "")) == 18
    assert names[1].count("$") == names[1].count(r"\$")


def test_a_slice_has_the_trials_that_have_the_coordinate():
    trials = trials_of(NESTED, nested_value, num=40)
    (axes,) = draw(plots.slice_plot(trials, NESTED, names=["slope"], **LOSS)).axes
    assert points_of(axes) == sum(trial.config["act"] == "relu" for trial in trials)


def test_slices_are_taken_at_a_common_epoch(trials):
    trials = [replace(t, epochs=2, curve=t.curve[:2]) if t.number < 10 else t for t in trials]
    figure = draw(plots.slice_plot(trials, FLAT, **LOSS))
    assert figure.axes[0].get_ylabel() == "loss after 4 epochs"
    assert points_of(figure.axes[0]) == 10


@pytest.mark.parametrize("kind", ["slice_plot", "contour"])
def test_pictures_say_which_trials_they_compare_and_when(trials, kind):
    figure = draw(getattr(plots, kind)(trials, FLAT, **LOSS))
    said = " ".join(figure.get_suptitle().split())
    assert said == "20 trials; the star is the best after 4 epochs"
    trials = [replace(t, epochs=2, curve=t.curve[:2]) if t.number < 10 else t for t in trials]
    trials[19] = replace(trials[19], state="failed")
    figure = draw(getattr(plots, kind)(trials, FLAT, **LOSS))
    said = " ".join(figure.get_suptitle().split())
    assert said == (
        "9 trials; the star is the best after 4 epochs; without 11 others (1 failed, 10 not "
        "trained for 4 epochs)"
    )


def test_parallel_coordinates_say_which_trials_they_compare(trials):
    trials = [replace(t, epochs=2, curve=t.curve[:2]) if t.number < 10 else t for t in trials]
    figure = draw(plots.parallel_coordinates(trials, FLAT, **LOSS))
    said = " ".join(figure.get_suptitle().split())
    assert said == (
        "10 trials; the thick line is the best after 4 epochs; without 10 others (10 not trained "
        "for 4 epochs)"
    )


def test_bars_of_hyperparameters_with_one_value():
    figure = draw(plots.importance({"lr": 1.0, "act": 0.0}, metric="loss", one_value=["act"]))
    assert {text.get_text() for text in figure.axes[0].texts} == {"100.0%", "one value"}


def test_the_star_is_the_best_feasible_trial(trials):
    best = min(trials, key=lambda t: t.value)
    for expected in (best.value, sorted(t.value for t in trials)[1]):
        axes = draw(plots.slice_plot(trials, FLAT, **LOSS)).axes[0]
        (star,) = (line for line in axes.get_lines() if line.get_marker() == "*")
        assert star.get_ydata()[0] == expected
        trials[best.number] = replace(best, violation=1.0)


def test_far_worse_trials_are_outside_of_a_slice(trials):
    trials[0] = replace(trials[0], curve=(1e9,) * 4)
    figure = draw(plots.slice_plot(trials, FLAT, **LOSS))
    assert inside(figure.axes[0]) == 19
    assert "1 outside" in figure.get_suptitle()


# -- parallel coordinates -------------------------------------------------------------


def test_a_line_for_each_trial_over_an_axis_for_each_coordinate(trials):
    figure = draw(plots.parallel_coordinates(trials, FLAT, **LOSS))
    axes, bar = figure.axes
    (lines,) = (c for c in axes.collections if isinstance(c, LineCollection))
    segments = np.array(lines.get_segments())
    assert segments.shape == (20, 3, 2)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["lr", "width", "act"]
    assert bar.get_ylabel() == "loss after 4 epochs"
    best = min(trials, key=lambda t: t.value)  # is drawn last
    assert segments[-1, 0, 1] == pytest.approx(1 + math.log10(best.config["lr"]) / 4)
    texts = [text.get_text() for text in axes.texts]
    assert {"0.0001", "0.01", "1", "relu"} <= set(texts)


def test_lines_pass_below_what_is_not_there():
    trials = trials_of(NESTED, nested_value, num=40)
    axes = draw(plots.parallel_coordinates(trials, NESTED, names=["act", "slope"], **LOSS)).axes[0]
    (lines,) = (c for c in axes.collections if isinstance(c, LineCollection))
    below = sum(segment[1, 1] < 0 for segment in lines.get_segments())
    assert below == sum(trial.config["act"] != "relu" for trial in trials) > 0
    assert "not there" in [text.get_text() for text in axes.texts]


def test_all_kinds_of_axes_can_be_drawn():
    space = Space(
        short=Float(0.1, 0.5, log=True),
        wide=Float(1e-9, 1, log=True),
        ints=Int(1, 512, log=True),
        few=Int(1, 3),
        many=Choice(list(range(40))),
        steps=Float(0, 1, step=0.25),
    )
    trials = trials_of(space, lambda config, rng: config["steps"], num=30)
    for kind in (plots.parallel_coordinates, plots.slice_plot):
        assert draw(kind(trials, space, **LOSS)).axes
    axes = plots.slice_plot(trials, space, names=["many"], **LOSS).axes[0]
    assert len(axes.get_xticks()) <= 12


# -- contour --------------------------------------------------------------------------


def test_a_landscape_over_two_numbers(trials):
    figure = draw(plots.contour(trials, FLAT, **LOSS))
    axes, bar = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("lr", "width")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert any(isinstance(c, ContourSet) for c in axes.collections)
    assert axes.collections[-1].get_offsets().shape == (20, 2)
    assert bar.get_ylabel() == "loss after 4 epochs"


def test_options_are_points_not_a_landscape(trials):
    axes = draw(plots.contour(trials, FLAT, names=["act", "lr"], **LOSS)).axes[0]
    assert not any(isinstance(c, ContourSet) for c in axes.collections)
    assert axes.get_yscale() == "log"
    assert axes.get_xticklabels()[0].get_text() == "relu"


def test_a_contour_takes_the_first_two_that_can_be_shown():
    trials = trials_of(NESTED, nested_value, num=40)
    # Of the trials that have both, all have the first option.
    names = ["lr[0].value", "lr", "width"]
    axes = draw(plots.contour(trials, NESTED, names=names, **LOSS)).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("lr[0].value", "width")
    with pytest.raises(UsageError, match="name two others"):
        plots.contour(trials, NESTED, names=names[:2], **LOSS)


def test_a_level_landscape_can_be_drawn():
    trials = trials_of(FLAT, lambda config, rng: 0.5, num=9)
    assert draw(plots.contour(trials, FLAT, **LOSS)).axes


@pytest.mark.parametrize("kind", ["slice_plot", "parallel_coordinates", "contour"])
def test_what_cannot_be_drawn_is_an_error(trials, kind):
    with pytest.raises(UsageError, match="run the study first"):
        getattr(plots, kind)([], FLAT, **LOSS)
    with pytest.raises(UsageError, match=r"'rate' is not a coordinate .* lr, width, act"):
        getattr(plots, kind)(trials, FLAT, names=["rate"], **LOSS)


# -- Pareto front ---------------------------------------------------------------------


def with_values(trials, names):
    rng = np.random.default_rng(0)
    return [
        replace(
            t,
            values={
                name: float(v) for name, v in zip(names, rng.uniform(size=len(names)), strict=True)
            },
        )
        for t in trials
    ]


def test_the_front_is_joined_and_the_others_are_there(trials):
    trials = with_values(trials, ["accuracy", "cost_$"])
    trials[0] = replace(trials[0], state="failed")
    trials[1] = replace(trials[1], values={"accuracy": math.nan, "cost_$": 1.0})
    trials[2] = replace(trials[2], violation=0.1)
    trials[3] = replace(trials[3], state="stopped")
    options = {"metrics": ["accuracy", "cost_$"], "modes": ["max", "min"], "front": [5, 6, 7]}
    figure = draw(plots.pareto_front(trials, **options))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "accuracy (higher is better)"
    assert axes.get_ylabel() == r"cost_\$ (lower is better)"
    assert {
        line.get_label(): len(line.get_xdata())
        for line in axes.get_lines()
        if line.get_marker() == "o"
    } == {
        "breaks a constraint": 1,
        "stopped earlier": 1,
        "trained to the end": 13,
        "Pareto front": 3,
    }
    assert [line.get_drawstyle() for line in axes.get_lines()][-1] == "steps-pre"
    assert len(figure.legends[0].get_texts()) == 4


def test_three_objectives_are_shown_in_pairs(trials):
    names = ["a", "b", "c"]
    figure = draw(
        plots.pareto_front(
            with_values(trials, names), metrics=names, modes=["min"] * 3, front=[1, 2]
        )
    )
    assert [(a.get_xlabel()[0], a.get_ylabel()[0]) for a in figure.axes] == [
        *(("a", "b"), ("a", "c"), ("b", "c"))
    ]
    assert all(points_of(axes) == 20 for axes in figure.axes)
    assert {line.get_drawstyle() for a in figure.axes for line in a.get_lines()} == {"default"}


def test_a_front_zooms_to_what_is_not_far_worse(trials):
    trials = with_values(trials, ["a", "b"])
    trials[0] = replace(trials[0], values={"a": 1e9, "b": 0.5})
    options = {"metrics": ["a", "b"], "modes": ["min", "min"], "front": []}
    axes = draw(plots.pareto_front(trials, **options)).axes[0]
    assert axes.get_xlim()[1] < 2


def test_one_objective_has_no_front(trials):
    with pytest.raises(UsageError, match="has no Pareto front"):
        plots.pareto_front(trials, metrics=["loss"], modes=["min"], front=[])


# -- all ------------------------------------------------------------------------------


def test_pictures_of_nothing(trials):
    assert draw(plots.history([], **LOSS)).axes
    options = {"metrics": ["a", "b"], "modes": ["min", "min"], "front": []}
    assert draw(plots.pareto_front([], **options)).axes


def test_no_picture_touches_pyplot(trials):
    before = "matplotlib.pyplot" in sys.modules
    plots.contour(trials, FLAT, **LOSS)
    plots.parallel_coordinates(trials, FLAT, **LOSS)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_study_draws_itself(tmp_path):
    study = make_study(tmp_path).run(progress=False)
    for kind in ("history", "importance", "parallel", "slice", "contour"):
        assert draw(getattr(study, f"plot_{kind}")()).axes
    assert list(study.importance()) == list(study.importance(level="hyperparameter"))
    assert study.plot_contour(["width", "lr"]).axes[0].get_xlabel() == "width"


def test_a_study_of_two_objectives_draws_its_front(tmp_path):
    goals = {"metric": ["mse", "size"], "mode": ["min", "min"]}
    study = make_study(tmp_path, task=Sized(), **goals).run(progress=False, executor=SOLO)
    (axes,) = draw(study.plot_pareto()).axes
    assert points_of(axes, "Pareto front") == len(study.best_trials)
