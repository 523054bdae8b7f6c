import pytest

from tests.counting import lines_run
from tests.search._drive import ask, by_number, ends, follow, to_the_end, with_scores
from thrifty.search import ASHA, History, Proposal


pytestmark = pytest.mark.slow


NINE = ASHA(max_epochs=9, num_trials=9)


def test_at_most_num():
    assert len(ask(NINE, num=4)) == 4
    assert len(ask(NINE, num=99)) == 9


def test_promotes_as_soon_as_a_third_is_complete():
    assert all(d.trial is None for d in ask(NINE, with_scores(1.0, 2.0)))
    assert ask(NINE, with_scores(1.0, 2.0, 0.5)) == [Proposal(target=3, trial=1)]


def test_highest_rung_first():
    history = with_scores(*range(9), 0)
    follow(history, [Proposal(target=3, trial=n) for n in (6, 7, 8)])
    assert ask(NINE, history) == [Proposal(target=9, trial=8)]


def test_paused_trials_resume_once_they_are_good_enough():
    history = with_scores(5.0, 3.0, 1.0)
    follow(history, ask(NINE, history))
    for _ in range(3):
        follow(history, ask(NINE, history), score=lambda *_: 0.0)
    assert ask(NINE, history) == [Proposal(target=3, trial=1)]


def test_never_waits_while_there_are_trials_to_draw():
    history = History()
    for _ in range(9):
        (decision,) = ask(NINE, history)
        history.record_decision(decision)
    assert ask(NINE, history) == []


def test_good_trials_that_come_late_are_all_promoted():
    # Each trial is better than all before it: more are promoted than synchronously.
    history = to_the_end(ASHA(max_epochs=9, num_trials=27))
    assert ends(history)[9] >= 3
    assert history[26].reached == 9


def test_failed_trials_are_never_promoted():
    history = to_the_end(NINE, failing=(8,))
    assert history[8].state == "failed"
    assert max(trial.reached for trial in history) == 9


def test_the_best_of_few_is_trained_fully():
    assert ends(to_the_end(ASHA(max_epochs=27, num_trials=2))) == {1: 1, 27: 1}
    assert ends(to_the_end(ASHA(max_epochs=27, num_trials=2), failing=(0, 1))) == {0: 2}


@pytest.fixture(scope="module")
def long_history():
    history = History()
    for number in range(100_000):
        history.record_decision(Proposal(target=1, config={}))
        history.record_scores(number, [by_number(number * 7919 % 100_000, 1)])
    return history


def test_asking_is_fast_however_long_the_history(long_history):
    algorithm = ASHA(max_epochs=81, num_trials=200_000)

    def ask_often():
        for _ in range(20):
            follow(long_history, ask(algorithm, long_history, num=4))

    # The limit is as low as for a hundredth of the history.
    assert lines_run(ask_often) / 20 < 2_000
