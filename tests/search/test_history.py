import math

import pytest

from tests.search._drive import with_scores
from thrifty.core import AlgorithmError
from thrifty.search import History, Proposal, Stop


pytestmark = pytest.mark.usefixtures("device")


INF = float("inf")


def test_leaderboard_is_best_first_and_ties_go_to_the_earlier():
    assert list(with_scores(0.1, 0.3, 0.3, 0.2).leaderboard(1)) == [
        (0.3, 1),
        (0.3, 2),
        (0.2, 3),
        (0.1, 0),
    ]


def test_leaderboards_of_groups_are_apart():
    history = with_scores(0.5)
    number = history.record_decision(Proposal(target=1, config={}, group=1))
    history.record_scores(number, [0.9])
    assert list(history.leaderboard(1)) == [(0.5, 0)]
    assert list(history.leaderboard(1, group=1)) == [(0.9, 1)]
    assert list(history.in_group(1)) == [1]


def test_failed_trials_are_last_and_not_alive():
    history = with_scores(0.1, 0.2)
    history.record_failure(history.record_decision(Proposal(target=1, config={})))
    board = history.leaderboard(1)
    assert board[-1] == (-INF, 2)
    assert (len(board), board.num_alive) == (3, 2)


def test_leaderboard_slices_and_ranks():
    board = with_scores(0.1, 0.3, 0.2).leaderboard(1)
    assert board[:2] == [(0.3, 1), (0.2, 2)]
    assert [board.rank(entry) for entry in board] == [0, 1, 2]


def test_unknown_rung_is_empty():
    history = History()
    assert len(history.leaderboard(3)) == len(history.waiting(3)) == 0


def test_who_is_decided_upon_waits_no_more():
    history = with_scores(0.1, 0.3, 0.2)
    history.record_decision(Proposal(target=3, trial=1))
    history.record_decision(Stop(trial=0))
    assert list(history.waiting(1)) == [(0.2, 2)]
    assert len(history.leaderboard(1)) == 3
    assert [trial.state for trial in history] == ["stopped", "running", "waiting"]


def test_a_history_counts_trials_and_decisions():
    history = with_scores(0.1, 0.2)
    history.record_decision(Proposal(target=2, trial=0))
    assert (len(history), history.num_running, history.num_decisions) == (2, 1, 3)
    history.record_failure(0)
    assert history.num_running == 0
    assert history[0].reached == 1


def test_no_decision_about_a_trial_that_runs():
    history = History()
    history.record_decision(Proposal(target=2, config={}))
    with pytest.raises(AlgorithmError, match="trial 0, which is running"):
        history.record_decision(Proposal(target=3, trial=0))
    with pytest.raises(AlgorithmError, match="trial 0, which is running"):
        history.record_decision(Stop(trial=0))


def test_no_decision_about_a_trial_that_is_not_there():
    with pytest.raises(AlgorithmError, match="trial 7, which is unknown"):
        History().record_decision(Stop(trial=7))


def test_targets_grow():
    with pytest.raises(AlgorithmError, match="no more than the 2 epochs"):
        with_scores(0.1, target=2).record_decision(Proposal(target=2, trial=0))


def test_a_rejected_decision_leaves_no_trace():
    history = with_scores(0.1, target=2)
    with pytest.raises(AlgorithmError):
        history.record_decision(Proposal(target=1, trial=0))
    assert (history.num_decisions, history[0].state) == (1, "waiting")


def test_what_is_not_a_number_is_worse_than_any():
    history = History()
    for scores in ([math.nan, 1.0], [1.0, math.nan]):
        number = history.record_decision(Proposal(target=2, config={}))
        history.record_scores(number, scores)
    assert history[0].scores == (-math.inf, 1.0)
    assert [trial.state for trial in history] == ["waiting", "failed"]
    assert list(history.leaderboard(2)) == [(1.0, 0), (-math.inf, 1)]


def test_what_is_enqueued_stays_until_it_is_proposed():
    history = History()
    history.record_enqueued({"lr": 0.1})
    history.record_enqueued({"lr": 0.2})
    history.record_decision(Proposal(target=1, config={"lr": 0.3}))
    assert history.enqueued == ({"lr": 0.1}, {"lr": 0.2})
    history.record_decision(Proposal(target=1, config={"lr": 0.1}))
    assert history.enqueued == ({"lr": 0.2},)


def test_only_draws_are_counted_as_drawn():
    history = History()
    history.record_enqueued({"lr": 0.1})
    for proposal in (
        Proposal(target=1, config={"lr": 0.1}),  # enqueued
        Proposal(target=1, config={"lr": 0.1}),
        Proposal(target=1, config={"lr": 0.2}),
    ):
        history.record_scores(history.record_decision(proposal), [0.5])
    history.record_decision(Proposal(target=2, config={"lr": 0.3}, parent=(0, 1)))
    history.record_decision(Proposal(target=2, trial=1))
    assert (len(history), history.num_drawn) == (4, 2)


def test_earlier_trials_are_no_trials_of_this_study():
    prior = list(with_scores(0.5))
    history = History(prior=prior)
    assert history.prior == tuple(prior)
    assert (len(history), history.num_drawn, len(history.leaderboard(1))) == (0, 0, 0)


def test_objectives_and_violation_are_those_at_the_target():
    history = with_scores(0.1)
    assert (history[0].objectives, history[0].violation) == ((0.1,), 0.0)
    number = history.record_decision(Proposal(target=1, config={}))
    history.record_scores(number, [0.2], objectives=(0.2, 3.0), violation=0.5)
    assert (history[number].objectives, history[number].violation) == ((0.2, 3.0), 0.5)


def test_the_next_of_what_is_enqueued():
    history = History()
    for lr in (0.1, 0.2, 0.3):
        history.record_enqueued({"lr": lr})
    history.record_decision(Proposal(target=1, config={"lr": 0.1}))
    assert history.num_enqueued == 2
    assert history.next_enqueued(1) == [{"lr": 0.2}]
    assert history.next_enqueued(9) == [{"lr": 0.2}, {"lr": 0.3}]


def test_each_change_of_a_trial_is_a_move():
    history = with_scores(0.1, 0.3)
    history.record_decision(Proposal(target=3, trial=1))
    history.record_failure(1)
    history.record_decision(Stop(trial=0))
    assert list(history.moves) == [0, 0, 1, 1, 1, 1, 0]


def test_a_trial_is_the_same_object_until_it_changes():
    history = with_scores(0.1)
    before = history[0]
    assert history[0] is before
    history.record_decision(Stop(trial=0))
    assert (before.state, history[0].state) == ("waiting", "stopped")


def test_a_group_runs_while_one_of_its_trials_does():
    history = History()
    assert not history.is_running("b")
    number = history.record_decision(Proposal(target=1, config={}, group="b"))
    assert history.is_running("b")
    history.record_scores(number, [0.5])
    assert not history.is_running("b")
