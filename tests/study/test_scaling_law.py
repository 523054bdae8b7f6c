"""Scaling laws: known parameters are found, intervals cover, and bad input is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize

import thrifty as th
from tests.study.helpers import make_study, trained
from thrifty.core import UsageError
from thrifty.study import TrialResult
from thrifty.study._scaling_law import HUBER, _Law, fit_scaling_law, fitted, huber_loss
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


HORIZONS = [5 * unit for unit in range(1, 11)]


def results(value: Callable[..., float], *, horizons=HORIZONS, sizes=(1,), sd=0.0, seed=0):
    """Return trials whose metric is ``value(horizon, size)`` with noise of a relative ``sd``."""
    rng = np.random.default_rng(seed)
    places = [(horizon, size) for size in sizes for horizon in horizons]
    return [
        TrialResult(
            number=number,
            config={"lr": 0.1, "size": size},
            state="done",
            epochs=horizon,
            value=float(value(horizon, size) * np.exp(sd * rng.normal())),
            curve=(),
        )
        for number, (horizon, size) in enumerate(places)
    ]


def fit(trials, **options):
    return fit_scaling_law(trials, metric="loss", mode="min", **{"num_bootstraps": 20, **options})


def chinchilla(horizon, size):
    return 1.7 + 3.0 / horizon**0.5


def test_known_parameters_are_found():
    law = fit(results(chinchilla))
    assert law.parameters == pytest.approx({"E": 1.7, "B": 3.0, "b": 0.5}, rel=1e-3)
    found = law.predict(200)
    assert found.value == pytest.approx(chinchilla(200, 1), rel=1e-4)
    assert str(law).splitlines()[0] == "loss = E + B / D^b, with D in epochs"
    assert "E = 1.7" in law._repr_html_()


def test_horizon_and_size_are_told_apart():
    law = fit(results(lambda d, n: 1.5 + 8 / n**0.4 + 3 / d**0.6, sizes=[10, 30, 100]), size="size")
    expected = {"E": 1.5, "B": 3.0, "b": 0.6, "A": 8.0, "a": 0.4}
    assert law.parameters == pytest.approx(expected, rel=1e-2)
    assert law.predict(100, size=300).value == pytest.approx(1.5 + 8 / 300**0.4 + 3 / 100**0.6)
    same = fit(results(chinchilla, sizes=[1, 2, 4]), size=lambda config: config["size"])
    assert same.predict(100, size=2).value == pytest.approx(chinchilla(100, 1), rel=1e-3)


def test_a_bend_is_found():
    def broken(d, n):
        return 1.0 + 4 * d**-0.2 * (1 + (d / 100) ** (1 / 0.3)) ** (-0.4 * 0.3)

    law = fit(results(broken, horizons=[2**i for i in range(14)]), form="broken")
    expected = {"E": 1.0, "B": 4.0, "b": 0.2, "c": 0.4, "d": 100.0, "f": 0.3}
    assert law.parameters == pytest.approx(expected, rel=0.02)
    assert law.predict(2**15).value == pytest.approx(broken(2**15, 1), rel=1e-3)


@pytest.mark.thorough
def test_intervals_cover_the_truth_about_as_often_as_they_say():
    num, hits, next_hits = 12, 0, 0
    for seed in range(num):
        found = fit(results(chinchilla, sd=0.003, seed=seed), num_bootstraps=40, level=0.9)
        there = found.predict(100)
        rng = np.random.default_rng(1000 + seed)
        one_more = chinchilla(100, 1) * np.exp(0.003 * rng.normal())
        hits += there.interval[0] <= chinchilla(100, 1) <= there.interval[1]
        next_hits += there.prediction_interval[0] <= one_more <= there.prediction_interval[1]
    # With a coverage of 90 %, 7 or fewer of 12 would happen once in 200 times.
    assert hits >= 8
    assert next_hits >= 8


def test_the_fit_is_that_of_a_slow_search():
    rng = np.random.default_rng(4)
    x = np.log(np.array([[float(horizon), 1.0] for horizon in HORIZONS]))
    x = x - x.mean(axis=0)
    y = np.array([chinchilla(horizon, 1) for horizon in HORIZONS]) * np.exp(
        0.003 * rng.normal(size=10)
    )

    def loss(theta):
        curve = np.exp(theta[0]) + np.exp(theta[1] - theta[2] * x[:, 0])
        size = np.abs(np.log(curve) - np.log(y))
        return sum(0.5 * r**2 if r <= HUBER else HUBER * (r - 0.5 * HUBER) for r in size)

    starts = [
        (e, b, c) for e in (-1.0, 0.0, 0.5) for b in (-1.0, 0.0, 1.0) for c in (0.2, 0.5, 1.0)
    ]
    tight = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}
    slow = min(minimize(loss, s, method="Nelder-Mead", options=tight).fun for s in starts)
    law = _Law(form="chinchilla")
    best = fitted(law, x, y)
    assert loss(best) == pytest.approx(huber_loss(law.log_value(best, x) - np.log(y)))
    assert loss(best) <= slow * 1.001


@pytest.mark.parametrize("law", [_Law(form="chinchilla", sized=True), _Law(form="broken")])
def test_the_gradient_is_that_of_the_value(law):
    rng = np.random.default_rng(0)
    x, theta = rng.normal(size=(7, 2)), rng.uniform(0.2, 1.0, size=law.num_parameters)
    step = 1e-6
    for index, column in enumerate(law.gradient(theta, x).T):
        moved = theta + step * np.eye(len(theta))[index]
        numeric = (law.log_value(moved, x) - law.log_value(theta, x)) / step
        assert column == pytest.approx(numeric, abs=1e-5)


def test_only_ends_of_horizons_count_and_the_best_of_each():
    trials = results(chinchilla)
    worse = results(lambda d, n: 2 * chinchilla(d, n))
    paused = [
        TrialResult(number=99, config={"lr": 0.1}, state="paused", epochs=60, value=0.1, curve=())
    ]
    renamed = [
        TrialResult(
            number=t.number + 10,
            config=t.config,
            state="done",
            epochs=t.epochs,
            value=t.value,
            curve=(),
        )
        for t in worse
    ]
    law = fit([*renamed, *trials, *paused])
    assert law.trials == tuple(range(10))
    assert len(fit([*trials, *renamed], best_only=False).values) == 20
    assert fit([*trials, *renamed], where=lambda t: t.number >= 10).trials == tuple(range(10, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizons": [5, 10, 15, 20]}, "needs at least 5 trials.*got 4 trials at 4"),
        ({"horizons": [5, 10], "sizes": range(1, 9), "size": "size"}, "got 16 trials at 2"),
        ({"sizes": [1, 2], "size": "size"}, "3 sizes, got 2"),
        ({"form": "broken", "horizons": [5, 10, 15]}, "needs at least 8"),
        ({"form": "line"}, "'chinchilla', 'broken'"),
        ({"form": "broken", "size": "size"}, "has no size"),
        ({"mode": "max"}, "minimise"),
        ({"level": 1.0}, "level=1.0"),
        ({"num_bootstraps": 3}, "at least 20"),
        ({"size": "depth"}, "has the size None"),
        ({"value": lambda d, n: -1.0}, "above 0"),
    ],
)
def test_what_cannot_be_fitted(options, message):
    given = {key: options.pop(key) for key in ("horizons", "sizes", "value") if key in options}
    trials = results(given.pop("value", chinchilla), **given)
    with pytest.raises(UsageError, match=message):
        fit_scaling_law(trials, metric="loss", **{"mode": "min", **options})


@pytest.mark.parametrize(
    ("horizon", "size", "message"),
    [(0, None, "above 0"), (5, 3.0, "leave size out"), (5, -1, "above 0")],
)
def test_what_cannot_be_predicted(horizon, size, message):
    law = fit(results(chinchilla))
    with pytest.raises(UsageError, match=message):
        law.predict(horizon, size=size)
    with pytest.raises(UsageError, match="give predict"):
        fit(results(chinchilla, sizes=[1, 2, 3]), size="size").predict(5)


def test_a_ladder_has_a_law_and_its_picture(tmp_path):
    study = make_study(
        tmp_path,
        space=th.Ladder(horizons=[1, 2, 3, 4, 6], rates=[0.01, 0.02], cooldown=1),
        algorithm=th.GridSearch(max_epochs=6),
    )
    trained(study)
    law = study.fit_scaling_law(num_bootstraps=20)
    assert law.horizons == (1, 2, 3, 4, 6)
    assert law == study.fit_scaling_law(num_bootstraps=20)
    figure = study.plot_scaling_law(law)
    assert figure.axes[0].get_xscale() == "log"
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["law, 95% intervals"]


class Stepped(LineTask):
    """A task whose epochs have two steps."""

    steps_per_epoch = 2


def test_a_law_counts_in_the_unit_of_the_study(tmp_path):
    study, other = (
        make_study(
            tmp_path,
            task=Stepped(),
            space=th.Ladder(horizons=[unit(n) for n in (1, 2, 3, 4, 6)], rates=[0.01], cooldown=1),
            algorithm=th.GridSearch(max_epochs=unit(6)),
            name=name,
        )
        for name, unit in (("steps", lambda n: th.steps(2 * n)), ("epochs", int))
    )
    trained(study)
    law = study.fit_scaling_law(num_bootstraps=20)
    assert law.horizons == (2, 4, 6, 8, 12)
    assert str(law).splitlines()[0].endswith("with D in steps")
    assert "(2 to 12 steps)" in str(law)
    assert law.predict(th.steps(24)) == law.predict(th.epochs(12)) == law.predict(24)
    assert study.plot_scaling_law(law).axes[0].get_xlabel() == "steps at the end of training"
    trained(other)
    in_epochs = other.fit_scaling_law(num_bootstraps=20)
    assert in_epochs.horizons == (1, 2, 3, 4, 6)
    assert in_epochs.predict(12).value == pytest.approx(law.predict(24).value, rel=1e-6)
    with pytest.raises(UsageError, match=r"counts epochs; give thrifty.epochs"):
        in_epochs.predict(th.steps(24))
