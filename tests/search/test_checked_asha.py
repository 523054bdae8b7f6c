"""ASHA that drops rungs whose order turns out reversed."""

import numpy as np
import pytest

from thrifty.core import AlgorithmError
from thrifty.search import ASHA, CheckedASHA, GridSampler, History
from thrifty.search._checked_algorithms import MAX_TRIALS, MIN_TRIALS
from thrifty.search._curve_view import StageForest
from thrifty.space import Choice, Float, Space, Step


SPACE = Space(end=Float(0.0, 1.0))
RNG = np.random.default_rng(0)


def straight(config, epochs):
    """Return scores of curves that keep their order."""
    return [config["end"] + epoch for epoch in range(1, epochs + 1)]


def crossing(config, epochs):
    """Return scores of curves whose order is reversed from the seventh epoch on."""
    return [config["end"] * (1 if epoch < 7 else -1) for epoch in range(1, epochs + 1)]


def run(algorithm, curve, *, num=4, check=None, space=SPACE):
    """Drive an algorithm with ``num`` workers; return the history and the number of epochs."""
    history = History(max_epochs=algorithm.max_epochs)
    epochs = 0
    while True:
        rng = np.random.default_rng(history.num_decisions)
        decisions = algorithm.ask(history, space, num=num, rng=rng)
        if not decisions:
            return history, epochs
        for number in [history.record_decision(each) for each in decisions]:
            trial = history[number]
            epochs += trial.target - trial.reached
            history.record_scores(number, curve(trial.config, trial.target))
        if check is not None:
            check(history)


@pytest.mark.parametrize(("max_epochs", "num_trials"), [(27, 120), (27, 4), (27, 20), (100, 10)])
def test_it_is_asha_where_early_scores_predict_late_ones(max_epochs, num_trials):
    options = {"max_epochs": max_epochs, "num_trials": num_trials}
    checked, num_checked = run(CheckedASHA(**options), straight)
    given, num_given = run(ASHA(**options), straight)
    assert [*checked] == [*given]
    assert num_checked == num_given


def test_rungs_whose_order_is_reversed_are_dropped():
    algorithm = CheckedASHA(max_epochs=27, num_trials=200)
    history, _ = run(algorithm, crossing)
    assert algorithm.num_dropped(history) >= 2
    best = min(trial.config["end"] for trial in history if trial.reached == 27)
    asha, _ = run(ASHA(max_epochs=27, num_trials=200), crossing)
    assert best + 0.2 < min(trial.config["end"] for trial in asha if trial.reached == 27)


def test_a_dropped_rung_is_passed_in_the_order_of_the_trials():
    algorithm = CheckedASHA(max_epochs=27, num_trials=200)
    passed = []

    def check(history):
        if not passed and algorithm.num_dropped(history):
            passed.append(algorithm.ask(history, SPACE, num=500, rng=RNG))

    run(algorithm, crossing, check=check)
    numbers = [each.trial for each in passed[0] if each.trial is not None and each.target == 9]
    assert len(numbers) > 10
    assert numbers == sorted(numbers)


def test_few_trials_are_no_evidence():
    algorithm = CheckedASHA(max_epochs=27, num_trials=200)
    seen = []

    def check(history):
        num = sum(trial.reached >= 9 for trial in history)
        seen.append((num, algorithm.num_dropped(history)))

    run(algorithm, crossing, check=check)
    assert {dropped for num, dropped in seen if num < MIN_TRIALS} == {0}
    assert any(dropped for _, dropped in seen)


def test_it_trains_no_more_than_asha_would():
    algorithm = CheckedASHA(max_epochs=27, num_trials=200)
    _, epochs = run(algorithm, crossing)
    assert algorithm.budget() == 200 + 66 * 2 + 22 * 6 + 7 * 18
    assert epochs <= algorithm.budget() + 2 * 27


def decays(config, epochs):
    """Return scores that tell a schedule's rate from others, and later its decays."""
    return [float(np.log(rate)) for rate in config["lr"].values(0, epochs, epochs=27)]


@pytest.mark.parametrize("num", [1, 8])
def test_epochs_that_sharing_saves_are_spent_on_more_promotions(num):
    schedules = [
        Step(rate, [first, first + second])
        for rate in (0.1, 0.2)
        for first in (5, 8, 11)
        for second in (5, 6, 8, 9, 10, 12)
    ]
    space = Space(lr=Choice(schedules))
    options = {"max_epochs": 27, "num_trials": 100, "sampler": GridSampler(levels=36)}

    def trained(algorithm):
        history, _ = run(algorithm, decays, num=num, space=space)
        num_epochs = StageForest.of(history, epochs=27).num_epochs
        return num_epochs, sum(trial.reached == 27 for trial in history)

    budget = CheckedASHA(**options).budget(36)
    early, num_early = trained(ASHA(**options))
    late, num_late = trained(CheckedASHA(**options))
    assert early < 0.6 * budget
    assert budget <= late <= budget + 3 * 27
    assert num_late > num_early


def test_a_grid_counts_the_trials_that_it_has():
    space = Space(end=Choice([k / 200 for k in range(200)]))

    def trained(num_trials):
        sampler = GridSampler(levels=200)
        algorithm = CheckedASHA(max_epochs=27, num_trials=num_trials, sampler=sampler)
        history, epochs = run(algorithm, crossing, space=space)
        assert algorithm.num_dropped(history)
        return epochs

    assert trained(200) == trained(100_000)


def test_the_study_ends_with_a_trial_trained_to_its_end():
    history, _ = run(CheckedASHA(max_epochs=27, num_trials=5), crossing)
    assert max(trial.reached for trial in history) == 27


def test_only_the_first_trials_are_compared():
    algorithm = CheckedASHA(max_epochs=9, num_trials=3_000)
    history, _ = run(algorithm, straight, num=32)
    assert sum(trial.reached == 9 for trial in history) > 2 * MAX_TRIALS
    assert algorithm.num_dropped(history) == 0


def test_longer_studies_keep_their_rungs():
    assert not CheckedASHA(max_epochs=81, num_trials=9).why_not_longer(27)
    why = CheckedASHA(max_epochs=30, num_trials=9).why_not_longer(20)
    assert "has compared trials at rungs" in why


@pytest.mark.parametrize("options", [{"eta": 1}, {"num_trials": 0}, {"min_epochs": 28}])
def test_options_are_checked(options):
    (name,) = options
    with pytest.raises(AlgorithmError, match=name):
        CheckedASHA(**{"max_epochs": 27, "num_trials": 9, **options})
