"""Enqueued trials run first, once, and are never lost."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import alone
from tests.depth import draws
from tests.study.helpers import SOLO, SPACE, StopAfter, make_study, records, trained
from tests.study.processes import At, die, exit_code, started
from thrifty.core import SpaceError, StudyMismatchError
from thrifty.search import (
    ASHA,
    BOSS,
    CheckedBOSS,
    GridSearch,
    Hyperband,
    MedianStopping,
    PopulationBasedTraining,
    RandomSearch,
    SuccessiveHalving,
    WideBOSS,
)
from thrifty.space import Choice, Constant, Float, Space, Step
from thrifty.store import Store
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


FIRST = {"lr": Step(0.1, [2, 4]), "width": 4, "dropout": 0.2}
SECOND = {"lr": Constant(0.1), "width": 0}
HALVING = SuccessiveHalving(max_epochs=6, num_trials=8, eta=2)
ALGORITHMS = [
    GridSearch(max_epochs=6),
    RandomSearch(max_epochs=6, num_trials=6),
    HALVING,
    Hyperband(max_epochs=6, eta=2),
    ASHA(max_epochs=6, num_trials=8, eta=2),
    MedianStopping(max_epochs=6, num_trials=6),
]


def make(folder, *, enqueue=(FIRST, SECOND), **options):
    study = make_study(folder, **{"algorithm": HALVING, **options})
    for config in enqueue:
        study.enqueue_trial(config)
    return study


def configs(study) -> list:
    return [trial.config for trial in study.trials]


@pytest.mark.sample(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_they_are_tried_first_by_every_algorithm(tmp_path, algorithm):
    study = make(tmp_path, algorithm=algorithm).run(progress=False, executor=SOLO)
    assert configs(study)[:2] == [FIRST, SECOND]
    for trial in study.trials[:2]:
        metrics = alone.train(LineTask(), trial.config, epochs=trial.epochs, run_epochs=6, seed=0)
        assert trial.curve == tuple(m["mse"] for m in metrics)


def test_what_is_left_out_is_drawn_and_the_same_each_time(tmp_path):
    partial = [{"width": 4}, {"width": 4}, {}]
    one = make(tmp_path, enqueue=partial, name="one").run(progress=False)
    two = make(tmp_path, enqueue=partial, name="two").run(progress=False)
    assert configs(one)[:3] == configs(two)[:3]
    assert configs(one)[0] != configs(one)[1]
    assert [c["width"] for c in configs(one)[:2]] == [4, 4]
    other = make(tmp_path, enqueue=partial, seed=7).run(progress=False)
    assert configs(other)[:3] != configs(one)[:3]


def test_what_is_not_in_the_space_is_refused(tmp_path):
    study = make_study(tmp_path)
    for wrong in ({"speed": 1}, {"width": 5}, {"lr": Step(0.1, [5])}):
        with pytest.raises(SpaceError):
            study.enqueue_trial(wrong)
    assert trained(study) == trained(make_study(tmp_path, storage=f"sqlite:///{tmp_path}/u.db"))


def test_duplicates_of_what_was_trained_cost_nothing(tmp_path):
    study = make_study(tmp_path, algorithm=GridSearch(max_epochs=6))
    trained(study)
    num_trials = len(study.trials)
    for config in configs(study)[::3]:
        study.enqueue_trial(config)
    assert trained(study) == 0
    assert len(study.trials) > num_trials
    for trial in study.trials[num_trials:]:
        assert trial.curve == next(t.curve for t in study.trials if t.config == trial.config)


def test_a_script_may_be_run_again(tmp_path):
    make(tmp_path).run(progress=False, observers=[StopAfter(5)])
    study = make(tmp_path).run(progress=False)
    again = make(tmp_path).run(progress=False)
    assert configs(again) == configs(study)
    with Store.open(study.storage.url) as store:
        assert store.studies.enqueued(1) == [FIRST, SECOND]


def test_a_population_begins_with_them(tmp_path):
    algorithm = PopulationBasedTraining(
        max_epochs=6, population=4, interval=2, explore=("lr",), quantile=0.5
    )
    space = Space(lr=Float(0.01, 0.2, log=True), width=Choice([0, 3]))
    wanted = [{"lr": 0.1, "width": 3}, {"lr": 0.123, "width": 0}]
    study = make(tmp_path, enqueue=wanted, algorithm=algorithm, space=space)
    assert configs(study.run(progress=False))[:2] == wanted


def test_between_runs_they_come_next(tmp_path):
    algorithm = ASHA(max_epochs=6, num_trials=9, eta=2)
    study = make(tmp_path, enqueue=[FIRST], algorithm=algorithm)
    study.run(progress=False, observers=[StopAfter(2)], executor=SOLO)
    before = len(study.trials)
    make(tmp_path, enqueue=[FIRST, SECOND], algorithm=algorithm)  # by another process
    study.run(progress=False, executor=SOLO)
    assert before < 9
    assert configs(study)[0] == FIRST
    assert configs(study)[before] == SECOND


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "algorithm",
    [
        ASHA(max_epochs=6, num_trials=5, eta=2),
        BOSS(max_epochs=6),
        WideBOSS(max_epochs=6),
        CheckedBOSS(max_epochs=6),
        GridSearch(max_epochs=6),
        Hyperband(max_epochs=6),
        MedianStopping(max_epochs=6, num_trials=3),
        PopulationBasedTraining(max_epochs=6, population=4, interval=2, explore=("lr",)),
        RandomSearch(max_epochs=6, num_trials=2),
        HALVING,
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_study_that_is_done_trains_what_is_enqueued_later(tmp_path, algorithm):
    space = Space(lr=Float(0.01, 0.2, log=True), width=Choice([0, 3]))
    later = [{"lr": 0.0625, "width": 3}, {"lr": 0.03125, "width": 0}]
    study = make_study(tmp_path, algorithm=algorithm, space=space)
    trained(study)
    num = len(study.trials)
    for config in later:
        study.enqueue_trial(config)
        trained(study)
        assert study.trials[-1].config == config
        assert (study.trials[-1].state, study.trials[-1].epochs) == ("done", 6)
    assert len(study.trials) == num + 2
    assert trained(make_study(tmp_path, algorithm=algorithm, space=space)) == 0


def test_they_are_in_the_log_before_the_run_and_in_order(tmp_path):
    trained(make_study(tmp_path, name="other"))
    study = make(tmp_path).run(progress=False, observers=[StopAfter(3)])
    make(tmp_path, enqueue=[FIRST, SECOND, {"lr": Step(0.1, [2])}])
    with Store.open(study.storage.url) as store:
        info = store.studies.get("s")
        queue = store.studies.enqueued(info.id)
        kinds = [entry.kind for entry in store.studies.load(info.id).log]
    assert queue[:2] == [FIRST, SECOND]
    assert len(queue) == 3
    assert kinds[:2] == ["enqueued", "enqueued"]
    assert kinds[-1] == "enqueued"


def test_another_study_of_the_same_name_takes_none(tmp_path):
    trained(make_study(tmp_path))
    study = make_study(tmp_path, algorithm=HALVING)
    with pytest.raises(StudyMismatchError):
        study.enqueue_trial(FIRST)


def test_a_study_in_memory_keeps_them_until_it_runs():
    study = make("", storage="sqlite://").run(progress=False)
    assert configs(study)[:2] == [FIRST, SECOND]


@pytest.mark.parametrize("algorithm", ALGORITHMS[:3], ids=lambda a: type(a).__name__)
def test_the_plan_counts_them(tmp_path, algorithm):
    space = Space(lr=Choice([0.1, Step(0.1, [2])]), momentum=Float(0, 1))
    wanted = [{"lr": 0.1, "momentum": 0.123}, {"lr": Step(0.1, [2]), "momentum": 0.123}]
    options = {"algorithm": algorithm, "space": space, "enqueue": wanted}
    study = make(tmp_path, **options)
    forecast = study.plan()
    num_epochs = trained(study)
    assert forecast.num_trials == len(study.trials)
    low, high = forecast.unique_range
    assert low <= num_epochs <= high
    again = make(tmp_path, **options).plan()
    assert again.num_trials == forecast.num_trials
    assert again.unique_epochs == num_epochs
    if isinstance(algorithm, GridSearch):
        without = make(tmp_path, **{**options, "enqueue": ()}, name="t").plan()
        assert forecast.unique_epochs == without.unique_epochs + 6 + 4


def run(folder, observers=()) -> None:
    make(folder).run(progress=False, observers=observers, executor=SOLO)


def victim(folder, count) -> None:
    run(folder, [At(count, die)])


def killed(folder, count) -> None:
    child = started(victim, folder, count)
    assert exit_code(child) == -signal.SIGKILL


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(draws(2, 3)))
def test_a_kill_loses_none_and_tries_none_twice(tmp_path, seed):
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole")
    rng = np.random.default_rng(seed)
    killed(tmp_path, 1 if seed == 0 else int(rng.integers(2, 40)))
    killed(tmp_path, int(rng.integers(1, 10)))
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        assert store.studies.enqueued(store.studies.get("s").id) == [FIRST, SECOND]
    # Only what is in the database is known now.
    make(tmp_path, enqueue=()).run(progress=False, executor=SOLO)
    assert records(make_study(tmp_path)) == records(make_study(tmp_path / "whole"))


GRID = {"algorithm": GridSearch(max_epochs=6, levels=2), "space": Space(lr=Float(0.01, 0.1))}


def go_on(folder) -> None:
    make(folder, enqueue=[{"lr": 0.05}], **GRID).run(progress=False, observers=[At(3, die)])


def test_a_study_that_takes_more_after_its_end_can_be_killed_too(tmp_path):
    assert trained(make_study(tmp_path, **GRID)) == 12
    child = started(go_on, tmp_path)
    assert exit_code(child) == -signal.SIGKILL
    study = make_study(tmp_path, **GRID)
    assert trained(study) > 0
    assert [(t.config["lr"], t.state) for t in study.trials][2:] == [(0.05, "done")]


@given(st.integers(0, 1000), st.lists(st.integers(0, 8), max_size=4), st.integers(1, 12))
@settings(max_examples=draws(4, 8), deadline=None)
def test_wherever_it_is_interrupted_the_trials_are_the_same(tmp_path_factory, seed, picks, stop):
    grid = list(SPACE.grid())
    wanted = [grid[pick] for pick in picks]
    found = []
    for observers in ((), [StopAfter(stop)]):
        folder = tmp_path_factory.mktemp("s")
        make(folder, enqueue=wanted, seed=seed).run(
            progress=False, observers=observers, executor=SOLO
        )
        study = make(folder, enqueue=wanted, seed=seed).run(progress=False, executor=SOLO)
        found.append([(t.config, t.curve, t.state) for t in study.trials])
    assert found[0] == found[1]
