from __future__ import annotations

import logging
import math

import pytest

from tests.study.helpers import Sized, make_study, trained
from thrifty.core import EpochDone, UsageError
from thrifty.run import Local
from thrifty.search import GridSearch, RandomSearch
from thrifty.space import Choice, Space
from thrifty.store import Store
from thrifty.study import StopWhen
from thrifty.testing import VirtualClock


pytestmark = pytest.mark.slow


def state(study) -> str:
    with Store.open(study.storage.url) as store:
        return store.studies.get(study.name).state


def test_it_stops_after_so_many_epochs_and_goes_on_later(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    whole = make_study(tmp_path / "a")
    num_epochs = trained(whole)
    study = make_study(tmp_path)
    assert trained(study, stop=StopWhen(epochs=7)) == 7
    assert "'s' was stopped: 7 epochs were trained; run it again" in caplog.text
    assert state(study) == "stopped"
    assert trained(make_study(tmp_path)) == num_epochs - 7
    assert state(study) == "done"
    assert [t.curve for t in make_study(tmp_path).trials] == [t.curve for t in whole.trials]


def test_one_epoch_is_said_in_the_singular(tmp_path, caplog):
    trained(make_study(tmp_path), stop=StopWhen(epochs=1))
    assert "'s' was stopped: 1 epoch was trained; run it again" in caplog.text


def test_epochs_are_those_of_all_runs(tmp_path):
    for epochs, trained_now in ((5, 5), (9, 4), (9, 0)):
        study = make_study(tmp_path)
        assert trained(study, stop=StopWhen(epochs=epochs)) == trained_now


@pytest.mark.sample(1)
@pytest.mark.parametrize("pack", ["auto", "concatenated"])
def test_a_pack_trains_hardly_more(tmp_path, pack):
    """Only as many trials begin as the limit has epochs for, so the others are not half done."""
    rates = Choice([0.1 / k for k in range(1, 25)])
    study = make_study(tmp_path, space=Space(lr=rates), algorithm=GridSearch(max_epochs=6))
    executor = Local(pack=pack, pack_size=16, threads=1)
    study.run(progress=False, stop=StopWhen(epochs=40), executor=executor)
    assert 40 <= study._current_ledger().epochs.num_trained <= 40 + 5 + 16
    assert sum(trial.epochs == 6 for trial in study.trials) >= 5
    study.run(progress=False, executor=executor)
    assert study.savings.unique_epochs == 24 * 6


def test_what_another_study_trained_is_not_this_ones(tmp_path):
    trained(make_study(tmp_path, name="other"), stop=StopWhen(epochs=20))
    study = make_study(tmp_path)
    assert trained(study, stop=StopWhen(epochs=6)) == 6
    assert study._current_ledger().epochs.num_trained == 6
    assert make_study(tmp_path)._current_ledger().epochs.num_trained == 6


class Minute:
    """Clock on which each epoch takes a minute."""

    def __init__(self, clock) -> None:
        self._clock = clock

    def on_event(self, event) -> None:
        if isinstance(event, EpochDone):
            self._clock.advance(60.0)


def test_seconds_are_those_of_one_run(tmp_path):
    clock = VirtualClock(1000.0)
    for _ in range(2):
        study = make_study(tmp_path)
        study._clock = clock
        assert trained(study, stop=StopWhen(seconds=200), observers=[Minute(clock)]) == 4
        assert state(study) == "stopped"


def test_it_stops_where_a_trial_is_good_enough(tmp_path):
    algorithm = RandomSearch(max_epochs=6, num_trials=10)
    whole = make_study(tmp_path, name="whole", algorithm=algorithm).run(progress=False)
    values = [t.value for t in whole.trials]
    target = sorted(values)[len(values) // 2]
    study = make_study(tmp_path, algorithm=algorithm, storage=f"sqlite:///{tmp_path}/u.db")
    assert trained(study, stop=StopWhen(target=target)) > 0
    assert state(study) == "stopped"
    assert study.best_trial.value <= target
    assert trained(study, stop=StopWhen(target=target)) == 0
    assert trained(study) > 0


def test_a_target_that_only_infeasible_trials_reach_is_not_reached(tmp_path):
    options = {"task": Sized(), "metric": "size", "mode": "max", "constraints": {"size": 5}}
    study = make_study(tmp_path, **options)
    trained(study, stop=StopWhen(target=13))
    assert state(study) == "done"
    assert study.best_trial.value == 2
    other = make_study(tmp_path, **options, storage=f"sqlite:///{tmp_path}/u.db")
    trained(other, stop=StopWhen(target=2))
    assert state(other) == "stopped"


def test_a_study_that_is_done_stays_done(tmp_path):
    trained(make_study(tmp_path))
    assert trained(make_study(tmp_path), stop=StopWhen(epochs=1)) == 0
    assert state(make_study(tmp_path)) == "done"


def test_the_first_condition_that_holds_is_enough(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    assert trained(make_study(tmp_path), stop=StopWhen(epochs=3, seconds=1e6, target=-1.0)) == 3


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({}, r"has no condition, all of .* are None; give at least one of them"),
        ({"epochs": 0}, r"epochs=0\): epochs must be a whole number, 1 or more"),
        ({"epochs": 1.5}, "a whole number"),
        ({"epochs": True}, "a whole number"),
        ({"seconds": -1}, "a number above 0"),
        ({"seconds": math.inf}, "a number above 0"),
        ({"target": math.nan}, "a finite number"),
        ({"target": "good"}, "a finite number"),
    ],
)
def test_conditions_that_make_no_sense(conditions, message):
    with pytest.raises(UsageError, match=message):
        StopWhen(**conditions)
