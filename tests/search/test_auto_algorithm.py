"""Auto: each rule, the algorithms that it makes, and its checks."""

import pytest

from thrifty.core import AlgorithmError
from thrifty.search import (
    Auto,
    CheckedASHA,
    CheckedBOSS,
    GridSampler,
    GridSearch,
    KDESampler,
    RandomSearch,
    WideBOSS,
)
from thrifty.space import Choice, Cosine, EpochSize, Float, Int, Ladder, Space, Step, epochs, steps
from thrifty.testing import FakeStudy


WIDE = Space(lr=Float(0.01, 0.1), width=Int(1, 512))
AUTO = Auto(max_epochs=27, num_trials=40)


def test_one_worker_gets_checked_boss():
    found = AUTO.chosen(WIDE, workers=1)
    assert found.algorithm == CheckedBOSS(max_epochs=27, num_trials=40)
    assert found.name == "CheckedBOSS"
    assert found.reason == "one worker trains one round after the other, and checks if curves cross"


@pytest.mark.parametrize("name", ["WideBOSS", "BOSS"])
def test_a_choice_of_an_older_version_is_still_wide_boss(name):
    # ``CheckedBOSS`` is derived from it, so the type is compared, too.
    found = AUTO.built(name, WIDE)
    assert type(found) is WideBOSS
    assert found == WideBOSS(max_epochs=27, num_trials=40)


def test_several_workers_get_asha():
    assert AUTO.chosen(WIDE, workers=8) == AUTO.chosen(WIDE, workers=2)._replace(
        reason="8 workers never wait for each other"
    )
    assert AUTO.chosen(WIDE, workers=8).algorithm == CheckedASHA(max_epochs=27, num_trials=40)


def test_several_workers_learn_from_many_trials():
    found = Auto(max_epochs=27, num_trials=300).chosen(WIDE, workers=8)
    assert found.algorithm == CheckedASHA(max_epochs=27, num_trials=300, sampler=KDESampler())
    assert found.reason.endswith("and a sampler learns from 300 trials")


def test_a_grid_that_shares_most_of_its_training_is_trained_whole():
    space = Space(lr=Choice([0.1, *(Step(0.1, [end]) for end in range(24, 27))]))
    found = AUTO.chosen(space, workers=8)
    assert found.algorithm == GridSearch(max_epochs=27, levels=4)
    assert found.reason == "all 4 configurations take 33 epochs, rungs about 30"


def test_a_grid_that_shares_nothing_is_halved():
    space = Space(width=Int(1, 12))
    found = AUTO.chosen(space)
    sampler = GridSampler(levels=12)
    assert found.algorithm == CheckedASHA(max_epochs=27, num_trials=40, sampler=sampler)
    study = FakeStudy(found.algorithm, space, num_workers=2)
    study.run()
    assert sorted(trial.config["width"] for trial in study.history) == [*range(1, 13)]


def test_a_grid_with_more_configurations_than_trials_is_no_grid():
    assert AUTO.chosen(Space(width=Int(1, 41)), workers=1).name == "CheckedBOSS"


def test_a_huge_finite_space_is_not_listed():
    space = Space(**{f"x{i}": Int(1, 1000) for i in range(9)})
    assert AUTO.chosen(space, workers=2).name == "CheckedASHA"


def test_several_metrics_are_not_compared_at_rungs():
    found = AUTO.chosen(WIDE, num_objectives=2)
    assert found.algorithm == RandomSearch(max_epochs=27, num_trials=40)
    assert found.reason.startswith("rungs would compare trials by the first metric only")


def test_a_ladder_is_a_grid_or_random():
    ladder = Ladder(horizons=[5, 9], rates=[0.1, 0.2])
    assert Auto(max_epochs=9, num_trials=9).chosen(ladder).name == "GridSearch"
    assert Auto(max_epochs=9, num_trials=3).chosen(ladder).name == "RandomSearch"


def test_two_epochs_have_no_rungs():
    found = Auto(max_epochs=2, num_trials=9).chosen(WIDE, workers=8)
    assert found.algorithm == RandomSearch(max_epochs=2, num_trials=9)


def test_its_own_workers_count():
    auto = Auto(max_epochs=27, num_trials=40, workers=8)
    assert auto.chosen(WIDE, workers=1).name == "CheckedASHA"


def test_amounts_become_epochs_before_it_chooses():
    auto = Auto(max_epochs=steps(2_700), num_trials=40)
    assert auto.in_epochs(EpochSize(steps=100)) == AUTO
    assert Auto(max_epochs=epochs(27), num_trials=40).amounts()


@pytest.mark.parametrize("space", [WIDE, Space(lr=Choice([0.1, Cosine(0.1)]))])
@pytest.mark.parametrize("workers", [1, 8])
def test_every_choice_can_be_built_from_its_name(space, workers):
    found = AUTO.chosen(space, workers=workers)
    assert AUTO.built(found.name, space) == found.algorithm


def test_a_recorded_choice_can_be_built_for_a_space_that_has_changed():
    assert AUTO.built("GridSearch", WIDE) == GridSearch(max_epochs=27, levels=1)


def test_an_unknown_choice_is_an_error():
    with pytest.raises(AlgorithmError, match="'Magic', which this version of thrifty does not"):
        AUTO.built("Magic", WIDE)


@pytest.mark.parametrize("options", [{"max_epochs": 0}, {"num_trials": 0}, {"workers": 0}])
def test_options_are_checked(options):
    (name,) = options
    with pytest.raises(AlgorithmError, match=rf"Auto\({name}=0\): {name} must be a whole number"):
        Auto(**{"max_epochs": 9, "num_trials": 9, **options})
