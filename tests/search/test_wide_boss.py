from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.search._drive import ask, ends, follow, to_the_end
from thrifty.core import AlgorithmError
from thrifty.search import GridSampler, History, KDESampler, RandomSampler, Sampler, WideBOSS
from thrifty.space import Choice, Space
from thrifty.testing import check_algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner(Sampler):
    """Sampler that reports how many results it has seen instead of learning from them."""

    adapts: ClassVar[bool] = True

    def sample(self, history, space, *, num, rng):
        return [
            {"kind": "a", "lr": 0.01 + sum(t.reached > 0 for t in history) / 1000}
            for _ in range(num)
        ]


RANDOM = WideBOSS(max_epochs=9, sampler=RandomSampler())
LEARNING = WideBOSS(max_epochs=9, sampler=Learner())


def seen(decision):
    return round((decision.config["lr"] - 0.01) * 1000)


def test_learns_unless_told_otherwise():
    assert WideBOSS(max_epochs=9).sampler == KDESampler()
    assert len(ask(WideBOSS(max_epochs=9), num=2)) == 9, "a bracket's trials come from one model"


def test_all_is_proposed_at_once_if_nothing_is_learnt():
    assert Counter(p.group for p in ask(RANDOM)) == {0: 9, 1: 9, 2: 9}


def test_widths_inside_the_brackets():
    history = to_the_end(RANDOM)
    assert [ends(history, group=g) for g in range(3)] == [{1: 6, 3: 2, 9: 1}] * 3


def test_brackets_come_one_after_the_other_and_are_learnt_from():
    history = History()
    groups, known = [], []
    while decisions := follow(history, ask(LEARNING, history)):
        for decision in decisions:
            groups.append(decision.group)
            if decision.trial is None:
                known.append(seen(decision))
    assert groups == sorted(groups)
    assert known == [0] * 9 + [9] * 9 + [18] * 9, "the model is fitted once for each bracket"
    check_algorithm(LEARNING)


def test_whoever_would_idle_begins_with_the_next_bracket():
    history = History()
    for decision in ask(LEARNING, history, num=9):
        history.record_decision(decision)
    for number in range(8):
        history.record_scores(number, [number])
    # Trial 8 still trains, so its round is not over.
    asked = ask(LEARNING, history, num=2)
    assert [d.group for d in asked] == [1] * 9
    assert [d.target for d in asked] == [1] * 9
    history.record_decision(asked[0])
    history.record_scores(8, [8])
    assert [d.trial for d in ask(LEARNING, history, num=2)] == [8, 7, 6]


def test_a_trial_left_behind_is_recalled_within_its_bracket():
    # 9 and 10 stay at one epoch; then all but the best turn out to be far worse at three.
    algorithm = WideBOSS(max_epochs=27, num_trials=27, sampler=RandomSampler())
    history = to_the_end(algorithm, score=lambda k, e: -k - (100 if 0 < k < 9 and e >= 3 else 0))
    assert history[9].reached == history[10].reached == 9


def test_small_grid_ends_in_the_first_bracket():
    space = Space(lr=Choice([0.1, 0.2, 0.3]))
    history = to_the_end(WideBOSS(max_epochs=9, sampler=GridSampler()), space=space)
    assert ends(history) == {1: 2, 9: 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"num_trials": 0}, "num_trials=0"),
        ({"sampler": 3}, "give a sampler"),
    ],
)
def test_is_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        WideBOSS(**{"max_epochs": 9, **options})
