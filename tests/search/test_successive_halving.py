import pytest

from tests.search._drive import ask, ends, follow, to_the_end, with_scores
from thrifty.search import History, Proposal, Stop, SuccessiveHalving


pytestmark = pytest.mark.usefixtures("device")


NINE = SuccessiveHalving(max_epochs=9, num_trials=9)


def test_the_textbook_ladder():
    history = to_the_end(SuccessiveHalving(max_epochs=81, num_trials=81))
    assert ends(history) == {1: 54, 3: 18, 9: 6, 27: 2, 81: 1}


@pytest.mark.parametrize(
    ("min_epochs", "max_epochs", "eta", "rungs"),
    [
        (1, 81, 3, (1, 3, 9, 27, 81)),
        (1, 100, 3, (1, 3, 9, 27, 100)),
        (2, 20, 4, (2, 20)),
        (5, 5, 2, (5,)),
        (1, 1, 2, (1,)),
    ],
)
def test_rungs_grow_by_eta_up_to_max_epochs(min_epochs, max_epochs, eta, rungs):
    kind = SuccessiveHalving(max_epochs=max_epochs, min_epochs=min_epochs, eta=eta, num_trials=1)
    assert kind.rungs() == rungs


def test_the_best_go_on_and_the_others_stop():
    decisions = ask(NINE, with_scores(*range(9)))
    assert [d.trial for d in decisions if isinstance(d, Proposal)] == [8, 7, 6]
    assert {d.trial for d in decisions if isinstance(d, Stop)} == set(range(6))


def test_nobody_moves_before_all_are_there():
    history = History()
    decisions = ask(NINE)
    follow(history, decisions[:8])
    history.record_decision(decisions[8])
    assert ask(NINE, history) == []


def test_a_failed_trial_counts_as_there_but_never_goes_on():
    history = History()
    follow(history, ask(NINE), failing=range(1, 9))
    assert ask(NINE, history) == [Proposal(target=3, trial=0)]


def test_failures_on_a_higher_rung():
    history = History()
    follow(history, ask(NINE))
    follow(history, ask(NINE, history), failing=(8,))
    assert ask(NINE, history) == [Proposal(target=9, trial=7), Stop(trial=6)]


def test_nobody_left():
    assert ends(to_the_end(NINE, failing=range(9))) == {0: 9}


def test_few_trials_still_train_one_fully():
    assert ends(to_the_end(SuccessiveHalving(max_epochs=27, num_trials=2))) == {1: 1, 27: 1}


def test_verdict_that_was_recorded_in_part_is_completed():
    history = with_scores(*range(9))
    verdict = ask(NINE, history)
    follow(history, verdict[:4])
    assert ask(NINE, history) == verdict[4:]
