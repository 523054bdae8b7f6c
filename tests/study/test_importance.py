from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import optuna
import pytest

from tests.study.synthetic import NESTED, nested_value, trials_of
from thrifty.core import MissingExtraError, UsageError
from thrifty.space import Choice, Constant, Coordinates, Float, Int, Space, Step
from thrifty.study._identity import comparable
from thrifty.study._importance import (
    Importance,
    distribution,
    empty_study,
    fanova,
    importance,
    option_names,
)
from thrifty.study._results import TrialResult
from thrifty.study.plots._hyperparameter_plots import short_names


pytestmark = pytest.mark.slow


FLAT = Space(
    lr=Float(1e-5, 1, log=True), depth=Int(1, 9, step=2), act=Choice(["relu", "gelu", "tanh"])
)
LOSS = {"metric": "loss", "mode": "min"}


def by_rate(config, rng):
    return (math.log10(config["lr"]) + 2) ** 2 + 0.01 * rng.normal()


@pytest.mark.parametrize("method", ["fanova", "ped-anova"])
def test_what_matters_comes_first(method):
    shares = importance(trials_of(FLAT, by_rate), FLAT, method=method, **LOSS)
    assert next(iter(shares)) == "lr"
    assert shares["lr"] > 0.7
    assert sum(shares.values()) == pytest.approx(1.0)
    assert set(shares) == {"lr", "depth", "act"}


@pytest.mark.parametrize(("offset", "scale"), [(0, 1e-12), (0, 1e200), (1, 1e-8), (1e6, 1e-3)])
def test_the_unit_of_the_metric_does_not_matter(offset, scale):
    plain = importance(trials_of(FLAT, by_rate), FLAT, **LOSS)
    other = importance(
        trials_of(FLAT, lambda config, rng: offset + scale * by_rate(config, rng)), FLAT, **LOSS
    )
    assert other == pytest.approx(plain, abs=0.01)


def test_what_no_trial_has_explains_nothing():
    space = Space(act=Choice(["relu", "gelu"]), slope=Float(0, 1).when(act="gelu"), lr=Float(0, 1))
    trials = list(trials_of(space, lambda config, rng: rng.normal(), num=60))
    without = [trial for trial in trials if trial.config["act"] == "relu"]
    assert importance(without, space, **LOSS)["slope"] == 0.0


def test_one_value_among_the_trials_is_not_a_share_of_nothing():
    trials = [t for t in trials_of(FLAT, by_rate, num=90) if t.config["act"] == "relu"]
    shares = importance(trials, FLAT, **LOSS)
    assert shares.one_value == {"act"}
    assert (shares["act"], shares.text("act")) == (0.0, "one value")
    assert "one value" in shares._repr_html_()
    assert shares.text("lr").endswith("%")


def test_an_option_matters():
    def by_option(config, rng):
        return float(config["act"] == "gelu") + 0.01 * rng.normal()

    assert importance(trials_of(FLAT, by_option), FLAT, **LOSS)["act"] > 0.9


@pytest.mark.parametrize("method", ["fanova", "ped-anova"])
def test_nested_coordinates_count_for_their_hyperparameter(method):
    trials = trials_of(NESTED, nested_value, num=150)
    coordinates = importance(trials, NESTED, method=method, level="coordinate", **LOSS)
    assert set(coordinates) == {
        *("lr", "lr[0].value", "lr[1].value", "lr[2].value", "lr[2].milestones[0]"),
        *("act", "slope", "width"),
    }
    shares = importance(trials, NESTED, method=method, **LOSS)
    assert shares["lr"] > 0.3 > shares["width"]
    if method == "fanova":  # PED-ANOVA also counts that there was a slope at all
        assert list(shares)[:2] == ["lr", "act"]
    assert shares["lr"] == pytest.approx(
        sum(share for name, share in coordinates.items() if name.startswith("lr"))
    )
    assert "seed" not in shares  # a constant
    assert not shares.one_value


def test_a_coordinate_of_a_branch_that_nobody_took_has_no_share():
    trials = [t for t in trials_of(NESTED, nested_value, num=90) if t.config["act"] != "relu"]
    shares = importance(trials, NESTED, method="ped-anova", level="coordinate", **LOSS)
    assert shares["slope"] == 0.0


def test_the_same_seed_gives_the_same_shares():
    trials = trials_of(NESTED, nested_value)
    assert importance(trials, NESTED, seed=3, **LOSS) == importance(trials, NESTED, seed=3, **LOSS)


def test_fanova_is_optunas():
    rng = np.random.default_rng(0)
    points = rng.uniform(size=(60, 3))
    values = points[:, 0] * points[:, 1] + points[:, 2] ** 2
    study = empty_study(metrics=["loss"], modes=["min"])
    unit = dict.fromkeys("abc", optuna.distributions.FloatDistribution(0, 1))
    for point, value in zip(points, values, strict=True):
        params = dict(zip("abc", point, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=unit, value=value))
    theirs = optuna.importance.FanovaImportanceEvaluator(seed=5).evaluate(study)
    ours = fanova(points, values, seed=5)
    assert ours == pytest.approx([theirs[name] for name in "abc"], rel=1e-9)


def test_a_constant_forest_has_no_shares():
    assert not fanova(np.random.default_rng(0).uniform(size=(9, 2)), np.ones(9), seed=0).any()


# -- fidelities -----------------------------------------------------------------------


def test_mixed_fidelities_are_compared_at_a_common_epoch():
    def by_depth_at_first(trial):
        # Early values depend on depth, and those after three epochs on the learning rate.
        curve = (trial.config["depth"] * 10.0,) * 2 + (trial.value,) * (trial.epochs - 2)
        return replace(trial, curve=curve, value=curve[-1])

    drawn = trials_of(FLAT, by_rate, epochs=lambda number: 2 if number % 2 else 3 + number % 5)
    trials = [by_depth_at_first(trial) for trial in drawn]
    seen = comparable(trials, FLAT)
    assert seen.epoch == 6  # six trials have reached 7, twelve have reached 6
    assert len(seen) == 12
    assert seen.values == tuple(t.curve[5] for t in trials if t.epochs >= 6)
    assert next(iter(importance(trials, FLAT, **LOSS))) == "lr"


def test_ped_anova_looks_at_more_trials():
    trials = trials_of(FLAT, by_rate, epochs=lambda number: 9 if number < 10 else 3)
    assert importance(trials[:30], FLAT, method="ped-anova", **LOSS)
    assert comparable(trials, FLAT).epoch == 9
    assert comparable(trials, FLAT, at_least=20).epoch == 3


def test_few_trials_are_compared_where_all_have_been():
    seen = comparable(trials_of(FLAT, by_rate, num=5, epochs=lambda n: n + 2), FLAT)
    assert (seen.epoch, len(seen)) == (2, 5)
    assert comparable([], FLAT).epoch == 0


def test_repetitions_of_the_best_are_not_all_that_is_compared():
    space = Space(lr=Choice([1, 2, 3, 4]))
    trials = [
        TrialResult(number=n, config={"lr": lr}, state="done", epochs=len(c), value=c[-1], curve=c)
        for n, (lr, c) in enumerate(
            [(lr, (float(lr),)) for lr in (1, 2, 3, 4)] + [(4, (4.0, 5.0, 6.0))] * 9
        )
    ]
    assert comparable(trials, space).epoch == 1
    assert importance(trials, space, **LOSS) == {"lr": 1.0}


def test_failed_infinite_and_foreign_trials_are_left_out():
    good = trials_of(FLAT, by_rate, num=10)
    failed = replace(good[0], number=10, state="failed")
    infinite = replace(good[0], number=11, curve=(1.0, math.inf, math.nan, math.inf))
    foreign = replace(good[0], number=12, config={"lr": 5.0, "depth": 1, "act": "relu"})
    waiting = replace(good[0], number=13, curve=(), value=None, epochs=0)
    seen = comparable([*good, failed, infinite, foreign, waiting], FLAT)
    assert seen.numbers == tuple(range(10))


def test_one_that_exploded_is_not_all_there_is_to_explain():
    trials = trials_of(FLAT, by_rate)
    trials[7] = replace(trials[7], curve=(1e12,) * 4, value=1e12)
    assert importance(trials, FLAT, **LOSS)["lr"] > 0.7


def test_equally_good_trials_have_no_important_hyperparameter():
    shares = importance(trials_of(FLAT, lambda config, rng: 0.5), FLAT, **LOSS)
    assert shares == {"lr": 0.0, "depth": 0.0, "act": 0.0}


def test_shares_say_which_trials_and_which_epoch_they_are_of():
    drawn = trials_of(FLAT, by_rate, num=30, epochs=lambda number: 3 if number % 3 else 9)
    states = {0: "done", 1: "stopped", 2: "failed"}
    trials = [replace(trial, state=states[trial.number % 3]) for trial in drawn]
    shares = importance(trials, FLAT, **LOSS)
    assert (shares.epoch, shares.states, shares.num_left_out) == (9, {"done": 10}, 20)
    shares = importance(trials, FLAT, method="ped-anova", **LOSS)
    assert (shares.epoch, shares.num_trials) == (3, 20)
    assert (
        shares.basis == "loss after epoch 3 of 20 trials (10 done, 10 stopped); 10 others left out"
    )


def test_importance_shows_what_it_was_computed_from():
    shares = importance(trials_of(FLAT, by_rate, num=30), FLAT, **LOSS)
    assert repr(shares).startswith("<Importance {'lr': ")
    assert repr(shares).endswith(f" by fanova: {shares.basis}>")
    shown = shares._repr_html_()
    assert "What makes trials differ in loss" in shown
    assert f"fanova: {shares.basis}" in shown
    assert f"{shares['lr']:.1%}" in shown


def test_a_notebook_counts_the_hyperparameters_that_it_leaves_out():
    shares = Importance(
        {f"<h{n}>": 1 / 12 for n in range(12)},
        metric="loss",
        method="fanova",
        epoch=1,
        states={"done": 9},
        num_left_out=0,
    )
    shown = shares._repr_html_()
    assert "… and 2 more: dict(importance)" in shown
    assert shown.count("8.3%") == 10
    assert "<h0>" not in shown


# -- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "num_needed"), [("fanova", 8), ("ped-anova", 20)])
def test_too_few_trials_are_an_error_that_says_how_many(method, num_needed):
    trials = trials_of(FLAT, by_rate, num=num_needed)
    assert importance(trials, FLAT, method=method, **LOSS)
    with pytest.raises(UsageError, match=rf"needs {num_needed} trials.*there are {num_needed - 1}"):
        importance(trials[1:], FLAT, method=method, **LOSS)


def test_the_error_about_too_few_trials_counts_what_the_others_lack():
    trials = trials_of(FLAT, by_rate, num=9)
    trials[0] = replace(trials[0], state="failed")
    trials[1] = replace(trials[1], curve=(), value=None, epochs=0, state="running")
    trials[2] = replace(trials[2], config={"lr": 5.0})
    lacks = (
        r"there are 6 of 9 \(1 failed, 1 have not reported, "
        "1 have no finite loss or are not of this space"
    )
    with pytest.raises(UsageError, match=lacks):
        importance(trials, FLAT, **LOSS)


@pytest.mark.parametrize("option", [{"method": "anova"}, {"level": "node"}])
def test_unknown_options_are_named(option):
    (name,) = option
    with pytest.raises(UsageError, match=f"{name}='"):
        importance(trials_of(FLAT, by_rate), FLAT, **option, **LOSS)


def test_where_nothing_varies_nothing_is_important():
    with pytest.raises(UsageError, match="nothing varies"):
        importance(trials_of(Space(lr=0.1), lambda c, rng: rng.normal()), Space(lr=0.1), **LOSS)


@pytest.mark.parametrize(
    ("module", "method"), [("sklearn.ensemble", "fanova"), ("optuna", "ped-anova")]
)
def test_a_missing_extra_is_named(monkeypatch, module, method):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install"):
        importance(trials_of(FLAT, by_rate), FLAT, method=method, **LOSS)


# -- Optuna's terms -------------------------------------------------------------------


def test_every_domain_has_a_distribution():
    space = Space(
        f=Float(0, 1), s=Float(0, 1, step=0.3), g=Float(1e-3, 1, log=True), i=Int(1, 10, step=4)
    )
    found = {c.name: distribution(c) for c in Coordinates(space).coordinates}
    assert (found["s"].high, found["i"].high) == (pytest.approx(0.9), 9)
    assert found["g"].log


# -- names ----------------------------------------------------------------------------


def test_names_of_options_are_different():
    options = [1, 1.0, "1", "", None, (0.5,), Step(0.1, [Int(1, 3)]), Step(0.1, [Int(4, 5)])]
    names = option_names(Choice(options))
    assert len(set(names)) == len(options)
    assert names[3:6] == ("''", "None", "(0.5,)")
    assert option_names(Choice([Constant(0.1), Float(0.1, 0.3)])) == (
        *("Constant(0.1)", "0.1 to 0.3"),
    )


def test_short_names_are_different():
    short = short_names(["a" * 40 + str(n) + "a" * 40 for n in range(3)], limit=10)
    assert len(set(short)) == 3
    assert all(len(name) <= 14 for name in short)
