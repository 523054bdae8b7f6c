"""One row per algorithm: every check that the library ships."""

import pytest

from bench.search.literal_sub_sampling import LiteralSubSampling
from thrifty.search import (
    ASHA,
    BOSS,
    Auto,
    CheckedASHA,
    CheckedBOSS,
    CMAESSampler,
    Enqueued,
    FixedWidthSubSampling,
    FreezeThaw,
    GridSampler,
    GridSearch,
    Hyperband,
    MedianStopping,
    NSGAIISampler,
    PopulationBasedTraining,
    QuantizedSampler,
    RandomSampler,
    RandomSearch,
    StoppingASHA,
    SubSampling,
    SuccessiveHalving,
    TPESampler,
    WideBOSS,
)
from thrifty.testing import ALGORITHM_CHECKS, FakeStudy, check_best_is_finished


pytestmark = pytest.mark.slow


ALGORITHMS = [
    GridSearch(max_epochs=4, levels=2),
    RandomSearch(max_epochs=4, num_trials=6),
    SuccessiveHalving(max_epochs=27, num_trials=27),
    SuccessiveHalving(max_epochs=20, num_trials=10, min_epochs=2, sampler=QuantizedSampler()),
    Hyperband(max_epochs=27),
    Hyperband(max_epochs=10, eta=2, num_trials=50, sampler=GridSampler(levels=2)),
    ASHA(max_epochs=27, num_trials=40),
    ASHA(max_epochs=9, num_trials=2, eta=4, min_epochs=2),
    CheckedASHA(max_epochs=27, num_trials=40),
    CheckedASHA(max_epochs=9, num_trials=30, eta=2, sampler=GridSampler(levels=2)),
    ASHA(max_epochs=9, num_trials=30, sampler=TPESampler(num_startup=5)),
    SuccessiveHalving(max_epochs=9, num_trials=18, sampler=CMAESSampler(num_startup=5)),
    RandomSearch(max_epochs=4, num_trials=24, sampler=NSGAIISampler(population=5, share=2)),
    FixedWidthSubSampling(max_epochs=27, num_trials=27),
    FixedWidthSubSampling(max_epochs=20, num_trials=9),
    LiteralSubSampling(max_epochs=27, num_trials=27),
    LiteralSubSampling(max_epochs=20, num_trials=9, threshold="log"),
    SubSampling(max_epochs=27, num_trials=40),
    SubSampling(max_epochs=9, num_trials=2, eta=4, min_epochs=2, threshold=1),
    BOSS(max_epochs=27, sampler=RandomSampler()),
    BOSS(max_epochs=9, eta=2, num_trials=30, sampler=GridSampler(levels=2)),
    BOSS(max_epochs=27, threshold=1, num_trials=50, sampler=RandomSampler()),
    WideBOSS(max_epochs=27, sampler=RandomSampler()),
    WideBOSS(max_epochs=9, eta=2, num_trials=30, sampler=GridSampler(levels=2)),
    CheckedBOSS(max_epochs=27, sampler=RandomSampler()),
    CheckedBOSS(max_epochs=9, eta=2, num_trials=30, sampler=GridSampler(levels=2)),
    FreezeThaw(max_epochs=27, num_trials=27),
    FreezeThaw(max_epochs=9, num_trials=2, eta=4, min_epochs=2, budget_epochs=60),
    FreezeThaw(max_epochs=10, num_trials=14, full_share=0.5, sampler=GridSampler(levels=2)),
    Auto(max_epochs=27, num_trials=27),
    Auto(max_epochs=27, num_trials=40, workers=8),
    StoppingASHA(max_epochs=27, num_trials=40),
    StoppingASHA(max_epochs=10, num_trials=3, eta=2, min_epochs=2, sampler=GridSampler(levels=2)),
    MedianStopping(max_epochs=12, num_trials=12, grace_epochs=3, interval=2, min_trials=3),
    PopulationBasedTraining(max_epochs=14, population=8, interval=3, explore=("lr", "width")),
    PopulationBasedTraining(max_epochs=8, population=2, interval=2, quantile=0.5, explore=("lr",)),
]


@pytest.mark.sample(40)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
def test_an_algorithm_conforms(algorithm, check):
    check(algorithm)


def test_where_nothing_is_enqueued_nothing_is_trained():
    study = FakeStudy(Enqueued(max_epochs=4))
    study.run()
    assert not study.log


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_best_trial_is_trained_to_the_end(algorithm):
    check_best_is_finished(algorithm)
