"""Freeze-thaw: budgets, free prefixes, failures, the hedge, fallbacks."""

import math

import numpy as np
import pytest

from thrifty.search import (
    ASHA,
    FreezeThaw,
    GridSampler,
    History,
    KDESampler,
    Proposal,
    _curve_view,
    _freeze_thaw,
)
from thrifty.search._curve_model import CannotFit, CurveModel
from thrifty.search._curve_view import StageForest
from thrifty.space import Choice, Constant, Float, Int, Space, Step
from thrifty.testing import FakeStudy

from ._drive import ask, follow, to_the_end


SPACE = Space(lr=Float(0.01, 1.0, log=True), width=Int(1, 10**6))
SCHEDULES = Space(lr=Choice([Constant(0.1), *(Step(0.1, [e]) for e in range(1, 9))]))


def freeze_thaw(**options):
    return FreezeThaw(**{"max_epochs": 9, "num_trials": 20, "full_share": 0.0, **options})


def spent(history, epochs=9):
    return StageForest.of(history, epochs=epochs).num_epochs


@pytest.mark.parametrize(
    ("max_epochs", "rungs"),
    [(1, (1,)), (2, (2,)), (4, (1, 4)), (27, (1, 3, 9, 27)), (100, (1, 3, 9, 27, 100))],
)
def test_rungs_grow_and_end_with_the_training(max_epochs, rungs):
    assert FreezeThaw(max_epochs=max_epochs, num_trials=1).rungs() == rungs


@pytest.mark.parametrize("max_epochs", range(1, 300, 7))
def test_rungs_ascend(max_epochs):
    rungs = FreezeThaw(max_epochs=max_epochs, num_trials=1).rungs()
    assert list(rungs) == sorted(set(rungs))
    assert rungs[-1] == max_epochs


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("budget", [9, 30, 77])
def test_budget_is_used_and_not_exceeded_by_a_whole_trial(num, budget):
    history = to_the_end(freeze_thaw(budget_epochs=budget, num_trials=99), space=SPACE, num=num)
    assert budget - 9 <= spent(history) < budget + 9


@pytest.mark.parametrize("fails", [True, False])
def test_budget_holds_where_no_trial_ends_well(fails):
    """Each leader fails at its end, or its score falls: then the next one would lead."""
    algorithm = FreezeThaw(max_epochs=27, num_trials=60)
    history = History()
    while decisions := ask(algorithm, history, space=SPACE, seed=history.num_decisions):
        number = history.record_decision(decisions[0])
        target = decisions[0].target
        if fails and target == 27:
            history.record_failure(number)
        else:
            history.record_scores(number, [0.1 * e - 0.01 * e * e for e in range(target)])
    assert spent(history, 27) < algorithm.budget() + 27


def test_shared_epochs_are_counted_once():
    algorithm = freeze_thaw(budget_epochs=40, num_trials=9)
    history = to_the_end(algorithm, space=SCHEDULES, score=lambda n, e: e / 10)
    assert sum(trial.reached for trial in history) > spent(history)
    assert spent(history) < 40 + 9


def test_draws_no_more_than_num_trials_and_then_trains_them():
    history = to_the_end(freeze_thaw(num_trials=3, budget_epochs=99), space=SPACE)
    assert [trial.reached for trial in history] == [9, 9, 9]


def test_best_trial_is_trained_to_its_end():
    history = to_the_end(freeze_thaw(), space=SPACE, score=lambda n, e: e - (n - 4) ** 2)
    assert history[4].reached == 9


def test_first_trials_are_new_ones():
    history = History()
    decisions = ask(freeze_thaw(), history, space=SPACE, num=5)
    assert [decision.target for decision in decisions] == [1] * 5
    assert all(decision.trial is None for decision in decisions)


def test_enqueued_configurations_come_first():
    history = History()
    config = {"lr": 0.5, "width": 7}
    history.record_enqueued(config)
    first, *others = ask(freeze_thaw(), history, space=SPACE, num=3)
    assert first.config == config
    assert len(others) == 2


def started(space, configs, *, epochs=1, score=lambda config, epoch: 0.5):
    """Return a history of trials of these configurations that wait at an epoch."""
    history = History()
    for config in configs:
        number = history.record_decision(Proposal(target=epochs, config=config))
        history.record_scores(number, [score(config, e) for e in range(1, epochs + 1)])
    return history


def test_free_prefix_is_preferred_among_equals():
    """A sibling of the trained trial starts where it branches off; an equal one at the start."""
    configs = [{"lr": Constant(rate), "width": 1} for rate in (0.1, 0.2, 0.3, 0.4)]
    options = [Step(0.1, [8]), Step(0.2, [8]), *(c["lr"] for c in configs)]
    space = Space(lr=Choice(options), width=1)
    history = started(space, configs, score=lambda config, e: 0.5 - config["lr"].value / 10)
    long = history.record_decision(Proposal(target=9, trial=0))
    history.record_scores(long, [0.49 + 0.01 * e for e in range(9)])
    algorithm = freeze_thaw(sampler=GridSampler(), num_trials=99)
    found = [
        decision.config["lr"]
        for seed in range(10)
        for decision in ask(algorithm, history, space=space, seed=seed)
        if decision.config is not None
    ]
    assert found.count(Step(0.1, [8])) > found.count(Step(0.2, [8]))


def test_longer_free_prefix_is_preferred_among_equals(monkeypatch):
    """Both are as likely to end best; the one that branches off later leaves less to train."""
    monkeypatch.setattr(_freeze_thaw, "MODELLED_SHARE", 1.0)
    monkeypatch.setattr(CurveModel, "exceeds", lambda self, places, threshold: 0.0 * places.times)
    configs = [{"lr": Constant(rate)} for rate in (0.1, 0.2, 0.3, 0.4)]
    options = [Step(0.1, [3]), Step(0.1, [9]), *(c["lr"] for c in configs)]
    space = Space(lr=Choice(options))
    history = started(space, configs, epochs=10, score=lambda c, e: e - c["lr"].value / 10)
    algorithm = freeze_thaw(max_epochs=27, sampler=GridSampler(), num_trials=99)
    decisions = ask(algorithm, history, space=space, num=2)
    assert [d.config["lr"] for d in decisions] == [Step(0.1, [9]), Step(0.1, [3])]
    assert [d.target for d in decisions] == [27, 9]


def test_sibling_is_trained_to_where_something_is_new():
    space = Space(lr=Choice([Constant(0.1), Step(0.1, [8])]))
    history = started(space, [{"lr": Constant(0.1)}], epochs=9)
    (decision,) = ask(freeze_thaw(sampler=GridSampler()), history, space=space)
    assert (decision.config, decision.target) == ({"lr": Step(0.1, [8])}, 9)


def test_no_configuration_is_tried_twice_not_even_a_failed_one():
    space = Space(kind=Choice(["a", "b", "c", "d"]), width=Choice([1, 2]))
    history = to_the_end(freeze_thaw(num_trials=50), space=space, failing={1, 3})
    configs = [tuple(trial.config.values()) for trial in history]
    assert len(configs) == len(set(configs)) <= 8
    assert [history[n].state for n in (1, 3)] == ["failed", "failed"]


def test_grid_is_tried_whole_though_its_first_points_were_enqueued():
    space = Space(lr=Choice([0.01 * number for number in range(40)]))
    history = History()
    for number in range(20):
        history.record_enqueued({"lr": 0.01 * number})
    algorithm = freeze_thaw(num_trials=40, sampler=GridSampler(), budget_epochs=9_999)
    while decisions := ask(algorithm, history, space=space, seed=history.num_decisions):
        number = history.record_decision(decisions[0])
        score = history[number].config["lr"]
        history.record_scores(number, [score + e for e in range(decisions[0].target)])
    assert len(history) == 40


def test_trials_go_on_although_the_model_does_not_see_them(monkeypatch):
    monkeypatch.setattr(_freeze_thaw, "NUM_ACTIVE", 4)
    algorithm = freeze_thaw(num_trials=30, budget_epochs=9_999)
    history = to_the_end(algorithm, space=SPACE)
    assert [trial.reached for trial in history] == [9] * 30


def test_curves_of_different_values_are_different_rows():
    """Hashes of -1 and -2 are equal."""
    space = Space(x=Choice([-1, -2, 1, 2]))
    history = started(space, [{"x": x} for x in (-1, -2, 1, 2)], epochs=3)
    view = _curve_view.CurveView(space, StageForest.of(history, epochs=9), (1, 3, 9))
    candidates = [_curve_view.Candidate(t.config, t.number, t.scores, 3) for t in history]
    for number, trial in enumerate(history):
        history.record_decision(Proposal(target=9, trial=trial.number))
        history.record_scores(trial.number, [0.1 * number] * 9)
    view.model(list(history), history, [])
    paths = view.places(candidates, [9] * 4).paths
    assert len(np.unique(paths[:, -1])) == 4


def test_siblings_start_though_all_trials_with_scores_have_failed():
    rates = [0.1 * number for number in range(1, 11)]
    steps = {rate: [Step(rate, [9, 12 + late]) for late in range(3)] for rate in rates}
    constants = [{"lr": Constant(rate)} for rate in rates]
    options = [*(each["lr"] for each in constants), *(s for each in steps.values() for s in each)]
    history = started(Space(lr=Choice(options)), constants, score=lambda c, e: c["lr"].value)
    for number in range(10):
        history.record_decision(Proposal(target=3, trial=number))
        history.record_failure(number)
    for rate in rates[:2]:
        number = history.record_decision(Proposal(target=9, config={"lr": steps[rate][0]}))
        history.record_failure(number)
    algorithm = freeze_thaw(max_epochs=27, num_trials=40, sampler=GridSampler())
    assert len(ask(algorithm, history, space=Space(lr=Choice(options)), num=2)) == 2


def test_ends_if_every_trial_fails():
    history = to_the_end(freeze_thaw(), space=SPACE, failing=set(range(99)))
    assert len(history) == 20


def test_infinite_scores_amid_a_curve_are_the_worst():
    history = started(SPACE, [{"lr": 0.1, "width": w} for w in range(1, 9)], epochs=2)
    number = history.record_decision(Proposal(target=2, config={"lr": 0.9, "width": 1}))
    history.record_scores(number, [math.nan, 0.4])
    assert ask(freeze_thaw(), history, space=SPACE)


def test_share_of_trials_is_trained_to_the_end_whatever_its_curve():
    history = to_the_end(
        freeze_thaw(full_share=0.25, num_trials=40, budget_epochs=300), space=SPACE
    )
    first = [trial for trial in history if trial.number % 4 == 1]
    assert all(trial.reached == 9 for trial in first)
    assert len(first) >= 4


def test_equal_curves_are_still_decided():
    history = started(SPACE, [{"lr": 0.1, "width": w} for w in range(1, 9)])
    assert ask(freeze_thaw(), history, space=SPACE)


def test_without_a_model_the_best_scores_go_on_as_with_asha(monkeypatch):
    def fail(*args, **options):
        raise CannotFit

    monkeypatch.setattr(_curve_view, "CurveModel", fail)
    configs = [{"lr": 0.1, "width": w} for w in range(1, 9)]
    history = started(SPACE, configs, score=lambda config, e: config["width"])
    decisions = ask(freeze_thaw(num_trials=8, budget_epochs=99), history, space=SPACE, num=2)
    assert [decision.trial for decision in decisions] == [7, 6]
    assert decisions == ask(ASHA(max_epochs=9, num_trials=8), history, space=SPACE, num=2)


def test_trials_in_training_are_not_asked_again():
    history = started(SPACE, [{"lr": 0.1 * w, "width": w} for w in range(1, 9)])
    taken = set()
    for seed in range(6):
        (decision,) = ask(
            freeze_thaw(num_trials=8, budget_epochs=99), history, space=SPACE, seed=seed
        )
        assert decision.trial not in taken
        taken.add(history.record_decision(decision))


def test_workers_get_different_trials():
    history = started(SPACE, [{"lr": 0.1 * w, "width": w} for w in range(1, 9)])
    decisions = ask(freeze_thaw(budget_epochs=99), history, space=SPACE, num=12)
    numbers = [d.trial for d in decisions if d.trial is not None]
    assert len(decisions) == 12
    assert len(numbers) == len(set(numbers))


def test_order_of_equal_trials_does_not_matter():
    """Renumbering trials renumbers decisions: the model sees curves, not numbers."""
    rates = np.geomspace(0.01, 1.0, 9).tolist()
    configs = [{"lr": rate, "width": 5} for rate in rates]

    def score(config, epoch):
        return -abs(math.log(config["lr"] / 0.2)) + 0.1 * epoch

    one = started(SPACE, configs, epochs=3, score=score)
    other = started(SPACE, configs[::-1], epochs=3, score=score)
    algorithm = freeze_thaw(num_trials=9, budget_epochs=99)
    for seed in range(5):
        (first,) = ask(algorithm, one, space=SPACE, seed=seed)
        (second,) = ask(algorithm, other, space=SPACE, seed=seed)
        assert first.trial == 8 - second.trial


def test_better_trials_go_on_more_often():
    rates = np.geomspace(0.01, 1.0, 12).tolist()

    def score(number, epoch):
        return -abs(math.log(rates[number % 12] / 0.2)) * (1 - 0.05 * epoch)

    history = History()
    for rate in rates:
        follow(history, [Proposal(target=2, config={"lr": rate, "width": 5})], score=score)
    found = [
        ask(freeze_thaw(num_trials=12), history, space=SPACE, seed=seed)[0].trial
        for seed in range(20)
    ]
    assert np.mean([abs(math.log(rates[number] / 0.2)) < 1.0 for number in found]) > 0.7


def test_sampler_that_learns_is_asked_for_what_starts():
    study = FakeStudy(freeze_thaw(sampler=KDESampler(), num_trials=12))
    study.run()
    assert 1 < len(study.history) <= 12


def test_earlier_studies_are_learnt_from():
    earlier = started(SPACE, [{"lr": 0.1 * w, "width": w} for w in range(1, 9)], epochs=9)
    history = History(prior=list(earlier))
    follow(history, ask(freeze_thaw(), history, space=SPACE, num=8))
    assert ask(freeze_thaw(), history, space=SPACE)


def test_configurations_outside_of_the_space_do_no_harm():
    history = started(SPACE, [{"lr": 7.0, "width": w} for w in range(1, 9)], epochs=2)
    assert ask(freeze_thaw(), history, space=SPACE)


def test_trial_before_its_decay_is_not_read_as_a_bad_one():
    """Trials with a late decay end better, but at epoch 3 only the others have decayed."""
    rates = [0.1, 0.2, 0.3, 0.4]
    early, late = ([{"lr": Step(rate, [epoch])} for rate in rates] for epoch in (2, 6))
    options = [config["lr"] for config in [*early, *late]]
    space = Space(lr=Choice(options))

    def score(config, epoch):
        ((decays,),) = [config["lr"].milestones]
        return 0.1 * min(epoch, decays) + 0.3 * (epoch > decays) + config["lr"].value / 100

    history = started(space, [*early[:3], *late[:3]], epochs=3, score=score)
    for number in range(6):
        config = history[number].config
        history.record_decision(Proposal(target=9, trial=number))
        history.record_scores(number, [score(config, e) for e in range(1, 10)])
    for config in (early[3], late[3]):
        number = history.record_decision(Proposal(target=3, config=config))
        history.record_scores(number, [score(config, e) for e in range(1, 4)])
    assert history[6].scores[-1] > history[7].scores[-1]
    algorithm = freeze_thaw(num_trials=8, budget_epochs=99)
    assert ask(ASHA(max_epochs=9, num_trials=8, eta=1 + 1), history, space=space) == []
    (decision,) = ask(algorithm, history, space=space)
    assert decision.trial == 7
