from __future__ import annotations

import math

import pytest

from tests.study.helpers import SOLO, Sized, make_study, trained
from thrifty.core import StudyMismatchError, TaskError, ThriftyError, UsageError
from thrifty.integrations import optuna_storage
from thrifty.search import SuccessiveHalving
from thrifty.store import Store
from thrifty.study import Storage, at_least


pytestmark = pytest.mark.slow


TWO = {"metric": ["mse", "size"], "mode": ["min", "min"]}
HALVING = SuccessiveHalving(max_epochs=6, num_trials=12, eta=2)


def run(folder, **options):
    options = {"task": Sized(), "algorithm": HALVING, **options}
    return make_study(folder, **options).run(progress=False, executor=SOLO)


def stands(trial) -> tuple[float, ...]:
    return trial.values["mse"], trial.values["size"]


def beats(one, other) -> bool:
    pairs = list(zip(stands(one), stands(other), strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def test_the_best_trials_are_those_that_no_other_one_beats(tmp_path):
    study = run(tmp_path, **TWO)
    front = [t for t in study.trials if not any(beats(other, t) for other in study.trials)]
    assert [t.number for t in study.best_trials] == [t.number for t in front]
    assert {t.values["size"] for t in front} == {2.0, 13.0}


def test_the_first_objective_is_the_value_that_rungs_compare(tmp_path):
    (tmp_path / "one").mkdir()
    one, two = run(tmp_path / "one"), run(tmp_path, **TWO)
    assert [(t.config, t.curve, t.value) for t in two.trials] == [
        (t.config, t.curve, t.value) for t in one.trials
    ]
    assert all(t.values == {"mse": t.value} for t in one.trials)
    assert (two.metric, two.mode) == ("mse", "min")


def test_one_best_trial_of_several_objectives_there_is_not(tmp_path):
    with pytest.raises(UsageError, match="use `best_trials`, its Pareto front"):
        assert run(tmp_path, **TWO).best_trial


def test_with_one_objective_all_that_tie_are_the_best(tmp_path):
    study = run(tmp_path, algorithm=None)
    best = study.best_trials
    assert {t.value for t in best} == {study.best_trial.value}
    assert study.best_trial.number == best[0].number


def test_there_is_a_column_for_each_objective(tmp_path):
    frame = run(tmp_path, **TWO).trials_dataframe()
    assert list(frame["values_mse"]) == list(frame["value"])
    assert set(frame["values_size"]) == {2.0, 13.0}
    assert "violation" not in frame.columns


def test_objectives_come_back_from_the_store(tmp_path):
    study = run(tmp_path, **TWO)
    again = make_study(tmp_path, task=Sized(), algorithm=HALVING, **TWO)
    assert [t.values for t in again.trials] == [t.values for t in study.trials]
    history = again._current_ledger().history
    assert [t.objectives for t in history] == [(-t.value, -t.values["size"]) for t in again.trials]
    with Store.open(study.storage.url) as store:
        records = store.studies.load(1).trials
    assert [r.objectives for r in records] == [t.values for t in study.trials]


def test_other_objectives_are_another_study(tmp_path):
    run(tmp_path, **TWO)
    with pytest.raises(StudyMismatchError, match="mode was"):
        run(tmp_path, metric=["mse", "size"], mode=["min", "max"])


def test_any_objective_that_is_not_finite_fails_the_trial(tmp_path):
    class Endless(Sized):
        def metrics(self, model, batch):
            return {**super().metrics(model, batch), "size": math.inf}

    study = run(tmp_path, task=Endless(), **TWO)
    assert {t.state for t in study.trials} == {"failed"}
    with pytest.raises(ThriftyError, match="size is inf after epoch 1"):
        assert study.best_trials


def test_a_second_objective_that_is_unknown_is_found_before_training(tmp_path):
    study = make_study(tmp_path, task=Sized(), metric=["mse", "sise"], mode=["min", "min"])
    with pytest.raises(TaskError, match="metric 'sise' is not among"):
        trained(study)


def test_the_plan_of_several_objectives_is_that_of_one(tmp_path):
    one, two = (make_study(tmp_path, algorithm=HALVING, **o) for o in ({}, TWO))
    assert str(two.plan()) == str(one.plan())


def test_optuna_sees_all_objectives(tmp_path):
    optuna = pytest.importorskip("optuna")
    study = run(tmp_path, **TWO)
    view = optuna.load_study(study_name="s", storage=optuna_storage(study.storage.url))
    assert [d.name for d in view.directions] == ["MINIMIZE", "MINIMIZE"]
    for theirs, ours in zip(view.trials, study.trials, strict=True):
        assert tuple(theirs.values) == stands(ours)


# -- constraints ---------------------------------------------------------------------------


def test_the_best_trial_is_feasible(tmp_path):
    free = run(tmp_path, name="free")
    study = run(tmp_path, constraints={"size": 5.0})
    assert free.best_trial.values["mse"] <= study.best_trial.value
    assert study.best_trial.violation == 0
    feasible = [t for t in study.trials if t.violation == 0]
    assert study.best_trial.value == min(t.value for t in feasible)
    assert {t.violation for t in study.trials} == {0, (13 - 5) / 5}
    assert all(t.value > 0 and t.value == t.curve[-1] for t in study.trials)


def test_a_feasible_trial_is_promoted_before_any_other(tmp_path):
    study = run(tmp_path, constraints={"size": 5.0})
    kept = [t for t in study.trials if t.epochs == 6]
    dropped = [t for t in study.trials if t.epochs == 1]
    num_feasible = sum(t.violation == 0 for t in study.trials)
    assert num_feasible >= len(kept)
    assert all(t.violation == 0 for t in kept)
    assert all(t.violation > 0 for t in dropped) or all(
        t.violation == 0 for t in study.trials if t.epochs > 1
    )


def test_none_is_feasible_and_the_nearest_is_named(tmp_path):
    study = run(tmp_path, constraints={"size": 1.0, "offset": at_least(-1e9)})
    assert {t.state for t in study.trials} <= {"done", "stopped"}
    for best in ("best_trial", "best_trials"):
        with pytest.raises(
            ThriftyError, match=r"nearest is trial \d+ \(size is 2, to be at most 1\)"
        ):
            getattr(study, best)
    with Store.open(study.storage.url) as store:
        assert store.studies.summary("s").best_trial is None


def test_a_constraint_metric_that_is_missing_is_found_before_training(tmp_path):
    study = make_study(tmp_path, constraints={"latency_ms": 5})
    with pytest.raises(TaskError, match="constrained metric 'latency_ms' is not among"):
        trained(study)


def test_other_constraints_are_another_study(tmp_path):
    run(tmp_path, constraints={"size": 5.0})
    with pytest.raises(StudyMismatchError, match="constraints was"):
        run(tmp_path, constraints={"size": 6.0})
    with pytest.raises(StudyMismatchError, match=r"constraints was .* and is None"):
        run(tmp_path)
    assert (
        trained(make_study(tmp_path, task=Sized(), algorithm=HALVING, constraints={"size": 5})) == 0
    )


def test_violations_are_in_the_table_and_in_optunas_eyes(tmp_path):
    optuna = pytest.importorskip("optuna")
    study = run(tmp_path, constraints={"size": 5.0})
    assert list(study.trials_dataframe()["violation"]) == [t.violation for t in study.trials]
    view = optuna.load_study(study_name="s", storage=optuna_storage(study.storage.url))
    for theirs, ours in zip(view.trials, study.trials, strict=True):
        assert theirs.system_attrs["constraints"] == [ours.violation]


def test_the_picture_shows_the_metric_and_the_best_that_is_feasible(tmp_path):
    study = run(tmp_path, constraints={"size": 5.0})
    (axes,) = study.plot_learning_curves().axes
    best = study.best_trial
    assert any(tuple(line.get_ydata()) == best.curve for line in axes.lines)
    assert f"trial {best.number}" in axes.get_legend().get_texts()[0].get_text()


def test_a_disk_budget_and_an_interruption_change_nothing(tmp_path):
    whole = run(tmp_path, constraints={"size": 5.0}, **TWO)
    url = f"sqlite:///{tmp_path}/tight.db"
    tight = run(
        tmp_path, constraints={"size": 5.0}, storage=Storage(url=url, disk_budget_bytes=4000), **TWO
    )
    assert [t.curve for t in tight.trials] == [t.curve for t in whole.trials]
