"""Each algorithm option that is out of bounds raises an error, and the message says why."""

import pytest

from thrifty.core import AlgorithmError
from thrifty.search import (
    ASHA,
    Enqueued,
    FreezeThaw,
    GridSampler,
    GridSearch,
    Hyperband,
    MedianStopping,
    PopulationBasedTraining,
    QuantizedSampler,
    RandomSampler,
    RandomSearch,
    SuccessiveHalving,
)


PBT = {"max_epochs": 9, "population": 4, "interval": 3, "explore": ("lr",)}
MEDIAN = {"max_epochs": 9, "num_trials": 4}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GridSampler, {"levels": 0}, r"GridSampler\(levels=0\).*1 or more"),
        (QuantizedSampler, {"levels": 0}, r"QuantizedSampler\(levels=0\)"),
        (GridSearch, {"max_epochs": 0}, r"max_epochs=0"),
        (GridSearch, {"max_epochs": 9, "levels": 2.5}, "whole number"),
        (Enqueued, {"max_epochs": 0}, "max_epochs=0"),
        (Enqueued, {"max_epochs": 9, "epochs": 0}, "epochs=0"),
        (Enqueued, {"max_epochs": 9, "epochs": 10}, "no more than max_epochs"),
        (RandomSearch, {"max_epochs": True, "num_trials": 1}, "whole number"),
        (RandomSearch, {"max_epochs": 9, "num_trials": 0}, "num_trials=0"),
        (RandomSearch, {"max_epochs": 9, "num_trials": 1, "sampler": 3}, "give a sampler"),
        (SuccessiveHalving, {"max_epochs": 9, "num_trials": 0}, "num_trials=0"),
        (SuccessiveHalving, {"max_epochs": 9, "num_trials": 9, "eta": 1}, "use 2 or more"),
        (SuccessiveHalving, {"max_epochs": 9, "num_trials": 9, "eta": 1.5}, "whole number"),
        (SuccessiveHalving, {"max_epochs": 9, "num_trials": 9, "min_epochs": 10}, "lower it"),
        (Hyperband, {"max_epochs": 0}, "max_epochs=0"),
        (Hyperband, {"max_epochs": 9, "num_trials": 0}, "num_trials=0"),
        (ASHA, {"max_epochs": 9, "num_trials": 0}, "num_trials=0"),
        (ASHA, {"max_epochs": 9, "num_trials": 9, "eta": 1}, "use 2 or more"),
        (FreezeThaw, {"max_epochs": 9, "num_trials": 9, "eta": 1}, "use 2 or more"),
        (FreezeThaw, {"max_epochs": 9, "num_trials": 9, "full_share": 1.5}, "from 0 to 1"),
        (FreezeThaw, {"max_epochs": 9, "num_trials": 9, "budget_epochs": 0}, "1 or more"),
        (FreezeThaw, {"max_epochs": 9, "num_trials": 9, "budget_epochs": 8}, "raise budget_epochs"),
        (FreezeThaw, {"max_epochs": 9, "num_trials": 9, "sampler": None}, "give a sampler"),
        (MedianStopping, {**MEDIAN, "min_trials": 0}, "min_trials=0"),
        (MedianStopping, {**MEDIAN, "interval": 0}, "interval=0"),
        (MedianStopping, {**MEDIAN, "grace_epochs": 10}, "lower grace_epochs"),
        (PopulationBasedTraining, {**PBT, "population": 1}, "use 2 or more"),
        (PopulationBasedTraining, {**PBT, "interval": 9}, "lower interval"),
        (PopulationBasedTraining, {**PBT, "explore": ()}, 'such as explore=\\("lr",\\)'),
        (PopulationBasedTraining, {**PBT, "explore": "lr"}, "give the names"),
        (PopulationBasedTraining, {**PBT, "perturb": ()}, "positive factors"),
        (PopulationBasedTraining, {**PBT, "perturb": (1.0,)}, "other than 1"),
        (PopulationBasedTraining, {**PBT, "quantile": 0.6}, "at most 0.5"),
        (PopulationBasedTraining, {**PBT, "resample": 1.5}, "probability"),
    ],
)
def test_is_refused(kind, options, message):
    with pytest.raises(AlgorithmError, match=message):
        kind(**options)


def test_sampler_class_is_refused_with_the_mend():
    with pytest.raises(AlgorithmError, match=r"such as RandomSampler\(\)"):
        RandomSearch(max_epochs=1, num_trials=1, sampler=RandomSampler)


def test_options_are_values():
    assert Hyperband(max_epochs=9) == Hyperband(max_epochs=9, eta=3)
    assert hash(ASHA(max_epochs=9, num_trials=3)) == hash(ASHA(max_epochs=9, num_trials=3))
