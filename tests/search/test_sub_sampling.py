import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.counting import lines_run
from tests.depth import draws
from tests.search._drive import SPACE, ask, follow, to_the_end, with_scores
from tests.search._slow_sub_sampling import slow_ahead, slow_decisions
from thrifty.core import AlgorithmError
from thrifty.search import History, Proposal, Stop, SubSampling
from thrifty.testing import FakeStudy


pytestmark = pytest.mark.slow


GREEDY = SubSampling(max_epochs=27, num_trials=9, threshold=1)


class Slow(SubSampling):
    """The definition, trial by trial."""

    def ask(self, history, space, *, num, rng):
        trials, rungs = list(history), self.rungs()
        out = slow_decisions(trials, rungs=rungs, algorithm=self)[:num]
        for _ in range(min(num - len(out), self.num_trials - len(history))):
            (config,) = self.sampler.sample(history, space, num=1, rng=rng)
            out.append(Proposal(target=rungs[0], config=config))
        if not out and not history.num_running:
            out = slow_ahead(trials, rungs=rungs)
        return out


def trained(*scores_of):
    """Return a history of trials with these scores, one for each epoch."""
    history = History()
    for scores in scores_of:
        number = history.record_decision(Proposal(target=len(scores), config={"lr": 0.1}))
        history.record_scores(number, scores)
    return history


def numbers(decisions):
    return [decision.trial for decision in decisions]


def test_starts_with_new_trials():
    assert [d.target for d in ask(GREEDY, num=4)] == [1, 1, 1, 1]
    assert len(ask(GREEDY, num=99)) == 9


def test_the_order_of_places():
    # The leader is 4, and 3 is good; the others are not. Then come the leader and new trials.
    history = trained([0.1], [0.3], [0.2], [0.6], [0.5, 0.6, 0.7], [0.0], [0.0])
    assert numbers(ask(GREEDY, history, num=9)) == [3, 1, 4, None, None]
    assert [d.target for d in ask(GREEDY, history, num=9)] == [3, 3, 9, 1, 1]


def test_forced_trials_come_first_the_least_trained_before_others():
    algorithm = SubSampling(max_epochs=27, num_trials=9, threshold=3.5)
    history = trained([0.1], [0.2, 0.3, 0.9], [0.3], [0.5] * 9)
    assert numbers(ask(algorithm, history, num=4)) == [2, 0, 1, 3]


def test_the_threshold_is_neither_floored_nor_rounded():
    # Six epochs in all: sqrt(log(6)) = 1.34.
    algorithm = SubSampling(max_epochs=27, num_trials=3)
    assert numbers(ask(algorithm, trained([0.1], [0.2], [0.5, 0.6, 0.7, 0.8]))) == [1]
    assert numbers(ask(algorithm, trained([0.1, 0.1], [0.2] * 4, [0.1]), num=1)) == [2]


def test_the_quota_of_a_rung_counts_whoever_was_asked_to_reach_it():
    history = trained([0.1], [0.3], [0.2], [0.4], [0.5, 0.6, 0.7], [0.0], [0.0])
    assert numbers(ask(GREEDY, history, num=2)) == [3, 1]  # ceil(7 / 3) places, one taken
    history.record_decision(Proposal(target=3, trial=3))
    assert numbers(ask(GREEDY, history, num=2)) == [1, 4]
    history.record_decision(Proposal(target=3, trial=1))
    history.record_failure(1)
    assert numbers(ask(GREEDY, history, num=2)) == [4, None]


def test_the_quota_grows_with_the_trials_so_far():
    history = trained([0.1], [0.3], [0.2], [0.4], [0.5, 0.6, 0.7])
    assert numbers(ask(GREEDY, history, num=2)) == [3, 4]  # ceil(5 / 3) places, one taken
    assert numbers(ask(GREEDY, trained([0.1], [0.5, 0.6, 0.7]), num=2)) == [1, None]


def test_good_trials_go_on_beyond_the_quota():
    history = trained(*[[0.6]] * 5, [0.5, 0.6, 0.7])
    assert numbers(ask(GREEDY, history, num=5)) == [0, 1, 2, 3, 4]


def test_trials_in_training_are_compared_by_what_they_have_reported():
    history = trained([0.9], [0.5, 0.6, 0.7])
    history.record_decision(Proposal(target=9, trial=1))
    history.record_decision(Proposal(target=3, trial=0))
    # 1 still leads, and 0 is running: only new trials are left.
    assert numbers(ask(GREEDY, history, num=3)) == [None, None, None]


def test_comparison_is_at_equal_epochs():
    # 1 is better after one epoch than the leader was then, though far below the leader's score now.
    history = trained([0.4], [0.6], [0.5, 5.0, 50.0])
    assert numbers(ask(GREEDY, history)) == [1]


def test_ties_go_to_the_lower_number():
    assert numbers(ask(GREEDY, with_scores(0.5, 0.5, 0.5))) == [0]
    history = trained([0.5], [0.5], [0.4, 0.4, 0.4])
    assert numbers(ask(GREEDY, history, num=2)) == [0, 1]


def test_failed_trials_are_never_good_but_observed():
    history = to_the_end(GREEDY, failing=(8,))
    assert history[8].state == "failed"
    assert max(trial.reached for trial in history) == 27
    assert ask(GREEDY, history) == []


def test_scores_that_are_not_numbers_are_the_worst():
    history = trained([float("nan"), 0.1, 0.9], [0.1], [0.5] * 9, *[[0.0]] * 4)
    # 0 is ahead, but its mean is not.
    assert numbers(ask(GREEDY, history, num=3)) == [1, 2, None]
    worse = trained([float("nan"), float("nan"), 9.0], [0.2, 0.2, 0.1], [0.5] * 9)
    algorithm = SubSampling(max_epochs=27, num_trials=3, threshold=1)
    # No trial is good, and the only place is the leader's.
    assert numbers(ask(algorithm, worse)) == [2]


@pytest.mark.parametrize("threshold", ["sqrt-log", "log", 1])
def test_nobody_idles_while_there_are_trials_to_propose(threshold):
    algorithm = SubSampling(max_epochs=27, num_trials=60, threshold=threshold)
    num_asked = 0

    def on_ask(study, num, decisions):
        nonlocal num_asked
        num_asked += 1
        assert len(decisions) == num or len(study.history) + len(decisions) >= 60

    FakeStudy(algorithm, num_workers=8, failure_rate=0.1, on_ask=on_ask).run()
    assert num_asked > 60


def test_the_best_is_trained_to_the_end_also_where_the_rule_overlooks_it():
    # 0 overtakes the leader, but its mean is too low for it to be good.
    history = trained([0.0, 0.1, 0.9], [0.3] * 27, [0.2])
    algorithm = SubSampling(max_epochs=27, num_trials=3, threshold=1)
    assert ask(algorithm, history) == [Proposal(target=9, trial=0)]
    history = trained([0.0, 0.1, 0.2], [0.3] * 27, [0.2])
    assert ask(algorithm, history) == []


SCORES = {
    "ties": [0.1, 0.2, 0.3, 0.7],
    "not numbers": [math.nan, -math.inf, math.inf, 0.1, 0.2, 0.3],
    "rounded differences": [1e16, 1.0, 1.5, 2.0, 0.0],
    "huge": [1e308, -1e308, 0.0],
}
OPTIONS = [
    {"max_epochs": 27, "num_trials": 40},
    {"max_epochs": 27, "num_trials": 12, "threshold": 1},
    {"max_epochs": 20, "num_trials": 30, "threshold": "log", "eta": 2, "min_epochs": 2},
    {"max_epochs": 9, "num_trials": 6, "threshold": 4.5},
]


@settings(max_examples=draws(37, 150), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(SCORES)), st.sampled_from(OPTIONS))
def test_decides_as_defined_in_any_history(seed, kind, options):
    rng, history = np.random.default_rng(seed), History()
    fast, slow, curves = SubSampling(**options), Slow(**options), {}
    for _ in range(120):
        num = int(rng.integers(1, 9))
        decisions = ask(fast, history, num=num)
        assert decisions == ask(slow, history, num=num)
        # An interruption comes when part of an answer is recorded.
        for decision in decisions[: rng.integers(num + 1)]:
            history.record_decision(decision)
        meddle(history, rng, fast)
        running = [t for t in history if t.state == "running"]
        for trial in running[: rng.integers(len(running) + 1)] if rng.random() < 0.7 else running:
            curve = curves.setdefault(trial.number, [])
            curve += rng.choice(SCORES[kind], trial.target - len(curve)).tolist()
            if rng.random() < 0.05:
                history.record_failure(trial.number)
            else:
                history.record_scores(trial.number, curve)


def meddle(history, rng, algorithm):
    """Stop a trial now and then, or train one to an epoch between the rungs."""
    waiting = [t for t in history if t.state == "waiting" and t.reached < algorithm.max_epochs]
    if waiting and rng.random() < 0.1:
        trial = waiting[rng.integers(len(waiting))]
        target = int(rng.integers(trial.reached, algorithm.max_epochs)) + 1
        stops = rng.random() < 0.3
        history.record_decision(
            Stop(trial=trial.number) if stops else Proposal(target=target, trial=trial.number)
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_workers", [1, 8])
def test_studies_go_as_defined(options, num_workers):
    logs = []
    for algorithm in (SubSampling(**options), Slow(**options)):
        study = FakeStudy(algorithm, num_workers=num_workers, failure_rate=0.1)
        study.run()
        logs.append(repr(study.log))  # in a repr, NaN equals itself
    assert logs[0] == logs[1]


def test_asking_does_not_take_long():
    history, rng = History(), np.random.default_rng(0)
    for number in range(2000):
        epochs = (1, 3, 9, 27)[number % 100 // 67 + number % 9 // 8 + number % 27 // 26]
        history.record_decision(Proposal(target=epochs, config={}))
        history.record_scores(number, rng.random(epochs).tolist())
    algorithm = SubSampling(max_epochs=81, num_trials=4000)
    # The first call reads everything; later calls read only what is new.
    assert lines_run(lambda: algorithm.ask(history, SPACE, num=8, rng=rng)) < 200 * 2000
    history.record_decision(Proposal(target=1, config={}))
    history.record_scores(2000, [0.5])
    assert lines_run(lambda: algorithm.ask(history, SPACE, num=8, rng=rng)) < 2_000


def test_follows_its_own_advice():
    history = History()
    follow(history, ask(GREEDY, history, num=9))
    # There is one leader, which goes on first; the others have to be good or to find a place.
    assert numbers(follow(history, ask(GREEDY, history))) == [8]
    assert numbers(ask(GREEDY, history)) == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1}, "a positive number of epochs"),
        ({"threshold": "loglog"}, "'sqrt-log', 'log' or a positive number"),
        ({"threshold": 0}, "threshold=0"),
        ({"threshold": True}, "threshold=True"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"num_trials": 0}, "num_trials=0"),
        ({"min_epochs": 10}, "lower it"),
        ({"sampler": 3}, "give a sampler"),
    ],
)
def test_is_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        SubSampling(**{"max_epochs": 9, "num_trials": 9, **options})
