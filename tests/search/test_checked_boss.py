"""WideBOSS that drops its rounds if their order turns out reversed."""

import math
from dataclasses import dataclass
from itertools import combinations, count, pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.search._drive import SPACE, ask, to_the_end
from thrifty.core import AlgorithmError, derive_seed
from thrifty.search import (
    CheckedASHA,
    CheckedBOSS,
    GridSampler,
    History,
    KDESampler,
    Proposal,
    RandomSampler,
    WideBOSS,
)
from thrifty.search._checked_algorithms import MAX_TRIALS, MIN_TRIALS, REVERSED, rank_correlation
from thrifty.space import Choice, Space
from thrifty.testing import ALGORITHM_CHECKS, FakeStudy, _algorithms


RANDOM = CheckedBOSS(max_epochs=27, num_trials=81, sampler=RandomSampler())
LEARNING = CheckedBOSS(max_epochs=27, num_trials=81)


def crossing(number, epoch):
    """Score so that later trials are better until the sixth epoch, and worse from then on."""
    return number if epoch < 7 else -number


def partly_crossing(config, *, epochs, max_epochs):
    """Return scores of which only the best early ones are reversed: the check changes its mind."""
    early = derive_seed(0, "early", repr(config)) % 1000
    late = derive_seed(0, "late", repr(config)) % 200 - abs(early - 800)
    return [float(early if epoch < 7 else late) for epoch in range(1, epochs + 1)]


# -- an obvious twin -----------------------------------------------------------------------------


def slow_correlation(first, second):
    """Return Kendall's tau pair by pair."""
    num_same = num_other = 0
    for i, j in combinations(range(len(first)), 2):
        if first[i] != first[j] and second[i] != second[j]:
            is_same = (first[i] < first[j]) == (second[i] < second[j])
            num_same += is_same
            num_other += not is_same
    return (num_same - num_other) / max(num_same + num_other, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCheckedBOSS(WideBOSS):
    """``CheckedBOSS`` by its definition, for spaces whose trials share no epochs."""

    def ask(self, history, space, *, num, rng):
        rungs = self.brackets()[0].epochs
        trials = list(history)
        if not slow_crosses(trials, rungs):
            return WideBOSS.ask(self, history, space, num=num, rng=rng)
        affordable = (slow_budget(self) - sum(t.target for t in trials)) // self.max_epochs
        places = max(min(num, affordable), 0)
        out = [
            Proposal(target=self.max_epochs, trial=t.number, group=t.group)
            for t in trials
            if t.state == "waiting" and t.reached < rungs[2]
        ][:places]
        while len(out) < places and len(trials) < self.num_trials:
            sizes = [bracket.num_trials for bracket in self.brackets()]
            groups = [t.group for t in trials]
            group = next(g for g in count() if groups.count(g) < sizes[g])
            out.append(Proposal(target=self.max_epochs, config=space.sample(rng), group=group))
            trials.append(out[-1])
        waiting = [t for t in history if t.state == "waiting"]
        if out or history.num_running or not waiting:
            return out
        best = max(waiting, key=lambda t: (t.reached, t.scores[-1], -t.number))
        if best.reached == self.max_epochs:
            return []
        return [Proposal(target=self.max_epochs, trial=best.number, group=best.group)]


def slow_crosses(trials, rungs):
    if len(rungs) < 3:
        return False
    first, _, third = rungs[:3]
    scores = [t.scores for t in trials if t.reached >= third][:MAX_TRIALS]
    orders = [[each[epoch - 1] for each in scores] for epoch in (first, third)]
    return len(scores) >= MIN_TRIALS and slow_correlation(*orders) < REVERSED


def slow_budget(algorithm):
    """Return the epochs of a run of ``WideBOSS``."""
    history = to_the_end(WideBOSS(max_epochs=algorithm.max_epochs, num_trials=algorithm.num_trials))
    return sum(trial.target for trial in history)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("failure_rate", [0.0, 0.3])
@pytest.mark.parametrize("num_workers", [1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampler", [RandomSampler(), KDESampler()])
def test_it_decides_as_its_twin(monkeypatch, seed, num_workers, failure_rate, sampler):
    monkeypatch.setattr(_algorithms, "learning_curve", partly_crossing)
    options = {"max_epochs": 27, "num_trials": 120, "sampler": sampler}
    runs = [
        FakeStudy(algorithm, SPACE, num_workers=num_workers, failure_rate=failure_rate, seed=seed)
        for algorithm in (CheckedBOSS(**options), SlowCheckedBOSS(**options))
    ]
    for each in runs:
        each.run()
    assert runs[0].log == runs[1].log


@pytest.mark.slow
def test_the_check_of_the_twins_runs_changes_its_mind(monkeypatch):
    monkeypatch.setattr(_algorithms, "learning_curve", partly_crossing)
    changes = []
    for seed in range(6):
        answers = []

        def see(study, num, decisions, answers=answers):
            answers.append(study.algorithm.curves_cross(study.history))

        FakeStudy(RANDOM, SPACE, seed=seed, on_ask=see).run()
        changes += pairwise(answers)
    assert changes.count((False, True)) > 3
    assert changes.count((True, False)) > 2


# -- the suite of all algorithms, on curves that cross --------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(14)
@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "algorithm",
    [
        RANDOM,
        LEARNING,
        CheckedBOSS(max_epochs=9, eta=2, sampler=RandomSampler()),
        CheckedBOSS(max_epochs=9, eta=2, num_trials=40, sampler=GridSampler(levels=2)),
        CheckedASHA(max_epochs=27, num_trials=120),
    ],
    ids=repr,
)
def test_it_conforms_where_curves_cross(monkeypatch, algorithm, check):
    monkeypatch.setattr(_algorithms, "learning_curve", partly_crossing)
    check(algorithm)


# -- what it decides -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [RandomSampler(), KDESampler()])
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("num_trials", [None, 9, 60])
def test_it_is_wide_boss_where_early_scores_predict_late_ones(num, num_trials, sampler):
    options = {"max_epochs": 9, "num_trials": num_trials, "sampler": sampler}
    checked, given = (
        to_the_end(kind(**options), num=num, score=lambda k, e: k * 7 % 10 + e / 100)
        for kind in (CheckedBOSS, WideBOSS)
    )
    assert [*checked] == [*given]


def crossed(algorithm, *, num_late=MIN_TRIALS, target=9, more=0, score=crossing):
    """Return a history of ``num_late`` trials at ``target``, and ``more`` at the first epoch."""
    history = History(max_epochs=algorithm.max_epochs)
    for number in range(num_late + more):
        end = target if number < num_late else 1
        history.record_decision(Proposal(target=end, config={"lr": 1 / (number + 1), "kind": "a"}))
        history.record_scores(number, [score(number, epoch) for epoch in range(1, end + 1)])
    return history


def test_trials_that_wait_train_to_their_end_in_order():
    history = crossed(RANDOM, more=10)
    assert RANDOM.curves_cross(history)
    found = ask(RANDOM, history, num=3)
    assert found == [Proposal(target=27, trial=number) for number in (8, 9, 10)]


def test_then_new_trials_fill_the_brackets_and_are_random():
    history = crossed(LEARNING, more=2)
    found = ask(LEARNING, history, num=20)
    assert [each.trial for each in found[:2]] == [8, 9]
    # Of the budget of 243 epochs, 74 are asked for, so six whole trials are left.
    assert [(each.group, each.target) for each in found[2:]] == [(0, 27)] * 4
    rng = np.random.default_rng(0)
    assert [each.config for each in found[2:]] == [SPACE.sample(rng) for _ in range(4)]


@pytest.mark.parametrize(("num_late", "crosses"), [(MIN_TRIALS - 1, False), (MIN_TRIALS, True)])
def test_few_trials_are_no_evidence(num_late, crosses):
    assert RANDOM.curves_cross(crossed(RANDOM, num_late=num_late, more=19)) == crosses


def test_trials_that_failed_before_the_third_round_are_no_evidence():
    history = crossed(RANDOM, num_late=MIN_TRIALS - 1)
    history.record_decision(Proposal(target=9, config={"lr": 0.5, "kind": "a"}))
    history.record_failure(MIN_TRIALS - 1)
    assert not RANDOM.curves_cross(history)


def test_a_trial_that_fails_later_stays_evidence():
    history = crossed(RANDOM)
    history.record_decision(Proposal(target=27, trial=0))
    assert RANDOM.curves_cross(history)
    history.record_failure(0)
    assert RANDOM.curves_cross(history)


def test_ties_are_no_evidence():
    for score in (lambda _k, _e: 0.5, lambda k, e: k if e < 7 else 0.5):
        assert not RANDOM.curves_cross(crossed(RANDOM, num_late=20, score=score))


@pytest.mark.parametrize("kind", [CheckedASHA, CheckedBOSS])
def test_a_score_that_is_not_a_number_ties_with_others_of_its_kind(kind):
    # In trials 3 and 5, the first epoch has no number; both are among the best later.
    def score(number, epoch):
        return math.nan if number in {3, 5} and epoch == 1 else crossing(number, epoch)

    algorithm = kind(max_epochs=27, num_trials=81)
    history = crossed(algorithm, num_late=12, score=score)
    trial = history[3]
    assert trial.scores[0] == -math.inf
    drops = algorithm.num_dropped if kind is CheckedASHA else algorithm.curves_cross
    assert drops(history)


def test_two_rounds_are_not_checked():
    algorithm = CheckedBOSS(max_epochs=8, num_trials=30, sampler=RandomSampler())
    options = {"score": lambda k, e: k if e < 8 else -k}
    given = WideBOSS(max_epochs=8, num_trials=30, sampler=RandomSampler())
    assert [*to_the_end(algorithm, **options)] == [*to_the_end(given, **options)]


def test_only_the_first_and_the_third_round_are_compared():
    # The order of the second round is that of the fourth one, reversed.
    history = crossed(RANDOM, target=27, score=lambda k, e: -k if e == 27 else k)
    assert not RANDOM.curves_cross(history)


def test_the_check_can_change_its_mind():
    history = crossed(RANDOM)
    for number in range(MIN_TRIALS, 40):
        history.record_decision(Proposal(target=27, config={"lr": 0.5, "kind": "a"}))
        history.record_scores(number, [number] * 27)
    assert not RANDOM.curves_cross(history)


# -- budget and end ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_trials", [1, 20, 27, 150, None])
@pytest.mark.parametrize(("max_epochs", "eta"), [(27, 3), (20, 3), (9, 2)])
def test_the_budget_is_what_wide_boss_trains(num_trials, max_epochs, eta):
    options = {"max_epochs": max_epochs, "eta": eta, "num_trials": num_trials}
    history = to_the_end(WideBOSS(**options, sampler=RandomSampler()))
    assert CheckedBOSS(**options).budget() == sum(trial.reached for trial in history)


@pytest.mark.parametrize("num", [1, 8])
@pytest.mark.parametrize("sampler", [RandomSampler(), KDESampler()])
def test_it_trains_no_more_than_wide_boss_would(num, sampler):
    algorithm = CheckedBOSS(max_epochs=27, num_trials=300, sampler=sampler)
    history = to_the_end(algorithm, num=num, score=crossing)
    assert algorithm.curves_cross(history)
    assert 0 <= algorithm.budget() - sum(trial.target for trial in history) < 27
    assert sum(trial.reached == 27 for trial in history) >= 8


def test_a_grid_counts_the_trials_that_it_has():
    space = Space(lr=Choice([k / 100 for k in range(1, 201)]))

    def trained(num_trials):
        sampler = GridSampler(levels=200)
        algorithm = CheckedBOSS(max_epochs=27, num_trials=num_trials, sampler=sampler)
        history = to_the_end(algorithm, space=space, score=crossing)
        assert algorithm.curves_cross(history)
        return len(history), sum(trial.target for trial in history)

    assert trained(200) == trained(6_000)


def test_a_space_that_shares_epochs_counts_them_once():
    # Two configurations, so all but two trials share all of their epochs.
    space = Space(kind=Choice(["a", "b"]))
    algorithm = CheckedBOSS(max_epochs=9, num_trials=27, sampler=RandomSampler())
    history = to_the_end(algorithm, space=space, score=lambda k, e: k if e < 9 else -k)
    assert len(history) == 27
    assert max(trial.reached for trial in history) == 9


def test_the_study_ends_with_a_trial_trained_to_its_end():
    # Two trials fail on their way to the end, and then the budget is used up. Trial 10 waits at the
    # first epoch with the best score of all, and those at the third round go before it.
    algorithm = CheckedBOSS(max_epochs=27, num_trials=27, sampler=RandomSampler())
    history = crossed(algorithm, more=3)
    for number in (8, 9):
        history.record_decision(Proposal(target=27, trial=number))
        history.record_failure(number)
    while decisions := ask(algorithm, history):
        assert decisions[0].trial in range(8), "no epochs are left for others"
        number = history.record_decision(decisions[0])
        if number == 0:
            history.record_failure(number)
        else:
            history.record_scores(number, [crossing(number, epoch) for epoch in range(1, 28)])
    assert [trial.number for trial in history if trial.reached == 27] == [1]


def test_enqueued_configurations_come_first():
    history = crossed(LEARNING)
    mine = {"lr": 0.125, "kind": "b"}
    history.record_enqueued(mine)
    found = ask(LEARNING, history, num=2)
    assert found[0] == Proposal(target=27, config=mine)
    assert found[1].config != mine


def test_brackets_stay_as_wide_as_they_are():
    algorithm = CheckedBOSS(max_epochs=27, num_trials=100, sampler=KDESampler())
    history = to_the_end(algorithm, num=4, score=crossing)
    brackets = algorithm.brackets()
    for group, bracket in enumerate(brackets):
        assert len(history.in_group(group)) <= bracket.num_trials
    assert len(history) == sum(len(history.in_group(group)) for group in range(len(brackets)))


def test_longer_studies_are_other_ones():
    assert not CheckedBOSS.can_grow
    why = CheckedBOSS(max_epochs=27).why_not_longer(9)
    assert why.startswith("CheckedBOSS may have decided otherwise")


@pytest.mark.parametrize("options", [{"eta": 1}, {"num_trials": 0}, {"max_epochs": 0}])
def test_options_are_checked(options):
    (name,) = options
    with pytest.raises(AlgorithmError, match=name):
        CheckedBOSS(**{"max_epochs": 27, **options})


# -- the correlation -----------------------------------------------------------------------------


SCORES = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0, math.inf])


@given(st.lists(st.tuples(SCORES, SCORES), max_size=12))
@settings(max_examples=200)
def test_rank_correlation_is_that_of_all_pairs(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = rank_correlation(first, second)
    assert found == pytest.approx(slow_correlation(first, second))
    assert found == pytest.approx(rank_correlation(second, first))
    assert found == pytest.approx(-rank_correlation(first, [-b for b in second]))
    assert -1 <= found <= 1
