import numpy as np
import pytest

from tests.search._drive import ask, ends, follow, to_the_end, with_scores
from thrifty.search import History, MedianStopping, Proposal, Stop


def kind(**options):
    return MedianStopping(**{"max_epochs": 10, "num_trials": 5, "min_trials": 2, **options})


def history_of(*curves):
    history = History()
    for curve in curves:
        number = history.record_decision(Proposal(target=len(curve), config={}))
        history.record_scores(number, curve)
    return history


def test_all_trials_start_at_once():
    asked = ask(kind(grace_epochs=3))
    assert [(p.trial, p.target) for p in asked] == [(None, 3)] * 5


def test_trials_are_judged_every_interval_after_the_grace():
    assert kind(grace_epochs=4, interval=3).checkpoints() == (4, 7, 10)
    assert kind(grace_epochs=10).checkpoints() == (10,)


def test_below_the_median_of_the_others_is_stopped():
    verdicts = ask(kind(), with_scores(1.0, 2.0, 3.0, 4.0, 5.0))
    assert [d.trial for d in verdicts if isinstance(d, Stop)] == [1, 0]


def test_best_score_counts_against_average_scores():
    # The last trial is worse now than all others, but was better before than their average.
    curves = [[0.2, 0.6], [0.2, 0.6], [0.2, 0.6], [0.2, 0.6], [0.5, 0.1]]
    assert Stop(trial=4) not in ask(kind(grace_epochs=2), history_of(*curves))


def test_equal_trials_go_on():
    assert {d.target for d in ask(kind(), with_scores(*[1.0] * 5))} == {2}


def test_too_few_others_to_judge():
    verdicts = ask(kind(num_trials=3, min_trials=3), with_scores(1.0, 2.0, 3.0))
    assert all(isinstance(d, Proposal) for d in verdicts)


def test_failed_trials_are_no_yardstick():
    history = with_scores(1.0, 2.0)
    for _ in range(3):
        history.record_failure(history.record_decision(Proposal(target=1, config={})))
    assert all(isinstance(d, Proposal) for d in ask(kind(), history))


def test_runs_to_the_end_and_never_past_it():
    history = to_the_end(kind(grace_epochs=4, interval=3))
    assert set(ends(history)) <= {4, 7, 10}
    assert history[4].reached == 10


@pytest.mark.filterwarnings("error")
def test_scores_that_are_not_finite_are_worse_than_any():
    verdicts = ask(kind(grace_epochs=2), history_of(*[[-np.inf, 1.0]] * 3, [0.0, 0.0], [0.0, 0.1]))
    assert not any(isinstance(d, Stop) for d in verdicts)


def test_those_who_wait_are_judged_while_others_run():
    history = with_scores(1.0, 2.0, 3.0, 4.0)
    history.record_decision(Proposal(target=1, config={}))
    follow(history, ask(kind(), history))
    assert [trial.reached for trial in history] == [1, 1, 2, 2, 0]
