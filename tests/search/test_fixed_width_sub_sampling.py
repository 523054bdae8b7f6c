import pytest

from bench.search.literal_sub_sampling import LiteralSubSampling
from tests.search._drive import ask, ends, follow
from thrifty.core import AlgorithmError
from thrifty.search import FixedWidthSubSampling, History, Proposal


FIXED = FixedWidthSubSampling(max_epochs=27, num_trials=27)


def rising(number, epoch):
    """Score by curves that never cross; the best trial is in the middle."""
    return -abs(number - 13) - 0.5 / epoch


def rounds(algorithm, *, score=rising, failing=()):
    """Return the decisions of every round, and the history."""
    history, out = History(), []
    while decisions := ask(algorithm, history, num=99, seed=len(history)):
        out.append(follow(history, decisions, score=score, failing=failing))
    return out, history


def widths(algorithm, **options):
    return [len(decisions) for decisions in rounds(algorithm, **options)[0]]


def test_fixed_widths():
    played, history = rounds(FIXED)
    assert [len(decisions) for decisions in played] == [27, 9, 3, 1]
    assert [{d.target for d in decisions} for decisions in played] == [{1}, {3}, {9}, {27}]
    assert ends(history) == {1: 18, 3: 6, 9: 2, 27: 1}
    assert history[13].reached == 27


def test_the_first_promotion_is_by_score():
    # The authors' own code compares nothing in rung 0, and promotes the lowest numbers.
    played, _ = rounds(FIXED)
    assert sorted(d.trial for d in played[1]) == list(range(9, 18))


def test_literal_rounds_with_frozen_rising_curves_are_wide_or_narrow():
    assert widths(LiteralSubSampling(max_epochs=27, num_trials=27))[:4] == [27, 1, 26, 1]


def test_literal_rounds_with_little_exploration_are_greedy():
    # The leader won after one epoch and its later blocks are better: no trial ever beats it.
    algorithm = LiteralSubSampling(max_epochs=27, num_trials=27, threshold=1)
    played, _ = rounds(algorithm)
    assert [len(decisions) for decisions in played] == [27, 1, 1, 1]
    assert [{d.target for d in decisions} for decisions in played] == [{1}, {3}, {9}, {27}]


def test_all_who_are_good_go_on_in_literal_rounds():
    # With noise, the leader's second epoch is worse than the others' first.
    curves = {0: [0.9, 0.1, 0.9], 1: [0.5], 2: [0.3], 3: [0.05]}
    algorithm = LiteralSubSampling(max_epochs=27, num_trials=4, threshold=1)
    history = History()
    follow(history, ask(algorithm, history), score=lambda k, e: curves[k][0])
    assert follow(history, ask(algorithm, history), score=lambda k, e: curves[k][e - 1]) == [
        Proposal(target=3, trial=0)
    ]
    assert {d.trial for d in ask(algorithm, history)} == {1, 2}


def test_a_trial_left_behind_comes_back():
    # 9 is the tenth of 27 and stays at one epoch; then all but the best turn out to be far worse at
    # three.
    def score(number, epoch):
        return 100.0 - number - (500.0 if 0 < number < 9 and epoch >= 3 else 0.0)

    played, history = rounds(FIXED, score=score)
    assert 9 not in {d.trial for d in played[1]}
    assert {d.trial for d in played[2]} == {0, 9, 10}
    assert {d.target for d in played[2]} == {9}
    assert history[9].reached == 9


def test_differences_are_taken_at_the_same_epoch():
    # Scores jump with the epoch, so a comparison across epochs would put the longest trial first.
    def score(number, epoch):
        return 100.0 * epoch - number * epoch

    played, _ = rounds(FIXED, score=score)
    assert [sorted(d.trial for d in decisions) for decisions in played[1:]] == [
        [*range(9)],
        # At one epoch 9 and 10 lag by 9 and 10, at three epochs 1 and 2 by 3 and 6.
        [0, 1, 2],
        [0],
    ]


def test_nobody_is_stopped():
    _, history = rounds(FIXED)
    assert {trial.state for trial in history} == {"waiting"}


def test_a_round_waits_for_all():
    history = History()
    for decision in ask(FIXED, history):
        history.record_decision(decision)
    for number in range(26):
        history.record_scores(number, [rising(number, 1)])
    assert ask(FIXED, history) == []
    history.record_failure(26)
    assert len(ask(FIXED, history)) == 9


def test_half_a_round_on_record_is_completed():
    history = History()
    follow(history, ask(FIXED, history), score=rising)
    whole = ask(FIXED, history)
    follow(history, whole[:4], score=rising)
    assert ask(FIXED, history) == whole[4:]


def test_failed_trials_lose_and_the_next_best_leads():
    _, history = rounds(FIXED, failing=(13,))
    assert history[13].reached == 0
    assert history[12].reached == 27


@pytest.mark.parametrize("kind", [FixedWidthSubSampling, LiteralSubSampling])
def test_the_leader_that_fails_at_last_is_followed_by_another(kind):
    algorithm = kind(max_epochs=27, num_trials=9)
    history, failed = History(), None
    while decisions := ask(algorithm, history):
        for decision in decisions:
            number = history.record_decision(decision)
            if decision.target == 27 and failed in (None, number):
                failed = number
                history.record_failure(number)
            else:
                history.record_scores(
                    number, [rising(number, e + 1) for e in range(decision.target)]
                )
    assert failed is not None
    assert ends(history)[27] == 1


def test_scores_that_are_not_numbers_on_the_way_are_the_worst():
    def score(number, epoch):
        return float("nan") if epoch == 2 and number == 13 else rising(number, epoch)

    for kind in (FixedWidthSubSampling, LiteralSubSampling):
        _, history = rounds(kind(max_epochs=27, num_trials=27), score=score)
        assert max(t.reached for t in history) == 27


def test_fewer_trials_than_a_round_has_places():
    assert widths(FixedWidthSubSampling(max_epochs=27, num_trials=2)) == [2, 1, 1, 1]
    assert widths(FixedWidthSubSampling(max_epochs=1, num_trials=2)) == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_trials": 0}, "num_trials=0"),
        ({"eta": 1}, "use 2 or more"),
        ({"sampler": 3}, "give a sampler"),
    ],
)
def test_is_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        FixedWidthSubSampling(**{"max_epochs": 9, "num_trials": 9, **options})
