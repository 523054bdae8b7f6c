from typing import ClassVar

import numpy as np
import pytest

from thrifty.search import ASHA, MedianStopping, RandomSearch, SuccessiveHalving
from thrifty.space import Choice, Float, Space, Step
from thrifty.study import _forecast
from thrifty.study._forecast import forecast
from thrifty.study._goals import Goals
from thrifty.study.simulation import _synthetic_results
from thrifty.study.simulation._synthetic_results import MadeUpRun


pytestmark = pytest.mark.slow


SPACE = Space(lr=Float(0.01, 1.0), decay=Choice([0.0, Step(0.1, [2])]))
GOALS = Goals.of("score", "max")


class Asked(ASHA):
    """ASHA that records for how many decisions it is asked."""

    nums: ClassVar[list[int]] = []

    def ask(self, history, space, *, num, rng):
        self.nums.append(num)
        return super().ask(history, space, num=num, rng=rng)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(Asked, "nums", [])
    return Asked.nums


def plan(algorithm, space=SPACE, *, goals=GOALS):
    return forecast(algorithm, space, goals=goals, seed=0)


def test_an_adaptive_algorithm_is_asked_for_a_hundredth_of_the_trials_at_a_time(asked):
    plan(Asked(max_epochs=9, num_trials=2000))
    assert max(asked) == 20
    # One at a time there would be more than 2,000 in each simulation.
    assert len(asked) < 700 * _forecast.NUM_SIMULATIONS


def test_small_studies_are_asked_for_one_trial_at_a_time(asked):
    plan(Asked(max_epochs=9, num_trials=150))
    assert set(asked) == {1}


def test_simulations_draw_their_own_first_configurations_and_share_the_rest(monkeypatch):
    monkeypatch.setattr(_synthetic_results, "NUM_OWN_DRAWS", 3)
    draws, found = _synthetic_results._RepeatedDraws(SPACE), []
    for seed in (1, 2):
        draws.begin(first=seed == 1)
        rng = np.random.default_rng(seed)
        found.append([draws.sample(rng) for _ in range(5)])
    assert all(one != other for one, other in zip(found[0][:3], found[1][:3], strict=True))
    assert found[0][3:] == found[1][3:]


def test_repeated_draws_change_nothing_where_nothing_depends_on_results(monkeypatch):
    before = plan(RandomSearch(max_epochs=9, num_trials=40))
    monkeypatch.setattr(_synthetic_results, "NUM_OWN_DRAWS", 3)
    assert plan(RandomSearch(max_epochs=9, num_trials=40)) == before
    assert before.exact


def test_the_range_shows_that_results_matter():
    space = Space(lr=Choice([0.1, 0.2, *(Step(0.1, [e]) for e in range(1, 9))]))
    found = plan(SuccessiveHalving(max_epochs=9, num_trials=27), space)
    low, high = found.unique_range
    assert low < found.unique_epochs < high


def test_the_forest_of_a_forecast_is_still_to_be_trained():
    forest = plan(MedianStopping(max_epochs=4, num_trials=6)).forest
    assert {stage.state for stage in forest} == {"pending"}
    assert all(stage.metrics is None for stage in forest)


def test_forecasts_of_median_stopping_are_estimates():
    """Made-up results must not rise so fast that only the first checks stop trials."""
    space = Space(lr=Float(0.01, 1.0))
    found = plan(MedianStopping(max_epochs=9, num_trials=30), space)
    low, high = found.unique_range
    assert not found.exact
    assert low < found.unique_epochs < high


def test_further_objectives_are_made_up_too():
    two = plan(ASHA(max_epochs=9, num_trials=9), goals=Goals.of(["a", "b"], ["max", "min"]))
    assert two.unique_epochs == plan(ASHA(max_epochs=9, num_trials=9)).unique_epochs


@pytest.fixture
def played(monkeypatch):
    """Record the simulations that run; each decision of a study counts as very many."""
    monkeypatch.setattr(_forecast, "MANY_DECISIONS", 1)
    rounds, play = [], MadeUpRun.play

    def counted(self, history):
        rounds.append(len(rounds))
        play(self, history)

    monkeypatch.setattr(MadeUpRun, "play", counted)
    return rounds


def test_a_large_study_is_played_until_its_means_are_known(played):
    plan(RandomSearch(max_epochs=9, num_trials=40))
    assert len(played) == _forecast.MIN_SIMULATIONS


def test_a_large_study_is_played_on_while_its_means_are_not_known(played, monkeypatch):
    monkeypatch.setattr(_forecast, "_are_known", lambda *samples: False)
    plan(RandomSearch(max_epochs=9, num_trials=40))
    assert len(played) == _forecast.NUM_SIMULATIONS


@pytest.mark.parametrize(
    ("sample", "known"),
    [
        ([100, 100, 100], False),  # too few
        ([100, 100, 100, 100], True),
        ([98, 102, 98, 102], False),  # 1.15 % of the mean
        ([98, 102, 98, 102, 98, 102], True),  # 0.89 %
    ],
)
def test_a_mean_is_known_to_its_standard_error(sample, known):
    assert _forecast._are_known(sample) is known
    assert not _forecast._are_known(sample, [1, 9, 1, 9, 1, 9])
