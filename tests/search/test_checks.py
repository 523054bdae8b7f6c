"""The checks of the conformance suite find the faults of an algorithm."""

from dataclasses import replace

import pytest

from thrifty.search import Algorithm, Proposal, Stop
from thrifty.testing import (
    check_algorithm,
    check_any_sign,
    check_best_is_finished,
    check_decisions,
    check_ends,
    check_pure,
    check_same_seed,
)


pytestmark = pytest.mark.slow


class TwoTrials(Algorithm):
    """Algorithm that asks for two trials; subclasses introduce faults."""

    max_epochs = 3
    num_asked = 0

    def ask(self, history, space, *, num, rng):
        self.num_asked += 1
        fresh = Proposal(target=3, config=space.sample(rng))
        return self.answer(history, fresh)

    def answer(self, history, fresh):
        return [fresh] * (2 - len(history))


class NeverEnds(TwoTrials):
    def answer(self, history, fresh):
        return [fresh]


class TooFar(TwoTrials):
    def answer(self, history, fresh):
        return [replace(fresh, target=4)]


class StopsTwice(TwoTrials):
    def answer(self, history, fresh):
        return [Stop(trial=0)] * 2 if len(history) else [fresh]


class StopsWhoRuns(TwoTrials):
    def answer(self, history, fresh):
        return [Stop(trial=0)] if history.num_running else super().answer(history, fresh)


class Counts(TwoTrials):
    def answer(self, history, fresh):
        return [fresh] * (9 - self.num_asked)


class KnowsTheObject(TwoTrials):
    def answer(self, history, fresh):
        return [replace(fresh, group=id(history))] * (2 - len(history))


class Stops(TwoTrials):
    def answer(self, history, fresh):
        return super().answer(history, replace(fresh, target=1))


class OneAfterAnother(TwoTrials):
    def answer(self, history, fresh):
        if history.num_running or len(history) == 2:
            return []
        return [fresh] if not len(history) or history.leaderboard(3)[0][0] > 0 else []


class NotItsParent(OneAfterAnother):
    def answer(self, history, fresh):
        fresh = replace(fresh, parent=(0, 1)) if len(history) else fresh
        return super().answer(history, fresh)


class Invents(TwoTrials):
    def answer(self, history, fresh):
        return super().answer(history, replace(fresh, config={"speed": 1}))


@pytest.mark.parametrize(
    ("check", "algorithm", "message"),
    [
        (check_ends, NeverEnds(), "still goes on"),
        (check_decisions, TooFar(), "reached 0 of 3"),
        (check_decisions, StopsTwice(), "two decisions about one trial"),
        (check_decisions, StopsWhoRuns(), "a trial that is running"),
        (check_pure, Counts(), "asked twice"),
        (check_pure, KnowsTheObject(), "rebuilt"),
        (check_same_seed, Counts(), None),
        (check_decisions, Invents(), "not in the space"),
        (check_decisions, NotItsParent(), "differs from its parent at epoch 0"),
        (check_any_sign, OneAfterAnother(), "lower by the same amount"),
        (check_best_is_finished, Stops(), "the best trial stopped at"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_check_finds_the_fault_of_an_algorithm(check, algorithm, message):
    with pytest.raises(AssertionError, match=message):
        check(algorithm)


@pytest.mark.parametrize("check", [check_algorithm, check_any_sign])
def test_is_content(check):
    check(TwoTrials())
