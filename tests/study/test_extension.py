"""A study may get more trials under its own name."""

from __future__ import annotations

import pytest

import thrifty as th
from thrifty.core import StudyMismatchError
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow

GROWING = {
    "random": lambda num: th.RandomSearch(max_epochs=3, num_trials=num),
    "median": lambda num: th.MedianStopping(max_epochs=3, num_trials=num),
    "asha": lambda num: th.ASHA(max_epochs=3, num_trials=num),
    "sub-sampling": lambda num: th.AsyncSubSampling(max_epochs=3, num_trials=num),
    "freeze-thaw": lambda num: th.FreezeThaw(max_epochs=3, num_trials=num),
}


def study_of(folder, algorithm, *, name="line"):
    return th.Study(
        LineTask(),
        th.Space(lr=th.Float(0.01, 0.3)),
        algorithm=algorithm,
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
    )


@pytest.mark.parametrize("kind", GROWING)
def test_a_study_that_is_done_gets_more_trials(tmp_path, kind):
    first = study_of(tmp_path, GROWING[kind](4)).run(progress=False)
    before = [(trial.config, trial.value) for trial in first.trials]
    more = study_of(tmp_path, GROWING[kind](9))
    assert len(more.trials) == 4
    more.run(progress=False)
    assert len(more.trials) == 9
    assert [trial.config for trial in more.trials][:4] == [config for config, _ in before]
    assert more.run(progress=False).savings == more.savings


def test_random_search_that_grows_is_the_larger_one(tmp_path):
    for num in (2, 5, 9):
        study = study_of(tmp_path, GROWING["random"](num)).run(progress=False)
    at_once = study_of(tmp_path, GROWING["random"](9), name="at once").run(progress=False)
    assert len(study.trials) == len(at_once.trials) == 9


def test_a_study_that_was_stopped_grows_too(tmp_path):
    study_of(tmp_path, GROWING["random"](4)).run(progress=False, stop=th.StopWhen(epochs=5))
    assert len(study_of(tmp_path, GROWING["random"](6)).run(progress=False).trials) == 6


@pytest.mark.parametrize(
    "algorithm",
    [
        th.RandomSearch(max_epochs=3, num_trials=3),
        th.RandomSearch(max_epochs=4, num_trials=9),
        th.RandomSearch(max_epochs=3, num_trials=9, sampler=th.TPESampler()),
        th.MedianStopping(max_epochs=3, num_trials=9),
        th.GridSearch(max_epochs=3),
    ],
)
def test_any_other_change_is_another_study(tmp_path, algorithm):
    study_of(tmp_path, GROWING["random"](4)).run(progress=False)
    with pytest.raises(StudyMismatchError, match="algorithm was 'RandomSearch"):
        study_of(tmp_path, algorithm).run(progress=False)


def test_where_rungs_depend_on_the_number_of_trials_it_cannot_grow(tmp_path):
    study_of(tmp_path, th.SuccessiveHalving(max_epochs=3, num_trials=3)).run(progress=False)
    with pytest.raises(StudyMismatchError, match="algorithm was 'SuccessiveHalving"):
        study_of(tmp_path, th.SuccessiveHalving(max_epochs=3, num_trials=9)).run(progress=False)
