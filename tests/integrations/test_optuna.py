from __future__ import annotations

import importlib
import sys

import optuna
import pytest

from tests.study.helpers import make_study
from thrifty.core import MissingExtraError, StoreError, StudyNotFoundError, UsageError
from thrifty.integrations import export_optuna, optuna_storage
from thrifty.search import SuccessiveHalving


pytestmark = pytest.mark.slow


@pytest.fixture
def study(tmp_path):
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=8, eta=2)
    return make_study(tmp_path, algorithm=algorithm).run(progress=False)


@pytest.fixture
def view(study):
    return optuna.load_study(study_name="s", storage=optuna_storage(study.storage.url))


def test_trials_look_like_optunas(study, view):
    assert view.direction == optuna.study.StudyDirection.MINIMIZE
    states = [t.state.name for t in view.trials]
    assert states.count("COMPLETE") == sum(t.state == "done" for t in study.trials)
    assert states.count("PRUNED") == sum(t.state == "stopped" for t in study.trials)
    for theirs, ours in zip(view.trials, study.trials, strict=True):
        assert tuple(theirs.intermediate_values.values()) == ours.curve
        assert theirs.params["width"] == ours.config["width"]
        assert theirs.params["lr"] == str(ours.config["lr"])
    done = [t for t in study.trials if t.state == "done"]
    assert view.best_trial.number == min(done, key=lambda t: t.value).number


def test_optunas_tools_work_on_it(view):
    names = ["lr", "width"]
    importances = optuna.importance.get_param_importances(view, params=names)
    assert set(importances) == set(names)
    assert len(view.trials_dataframe()) == 8


def test_a_view_cannot_be_written(study, view):
    storage = optuna_storage(study.storage.url)
    for write in (
        lambda: storage.create_new_trial(1),
        lambda: storage.create_new_study([]),
        lambda: storage.delete_study(1),
        lambda: storage.set_study_user_attr(1, "a", 1),
        lambda: storage.set_study_system_attr(1, "a", 1),
        lambda: storage.set_trial_param(1, "a", 1.0, None),
        lambda: storage.set_trial_state_values(1, None),
        lambda: storage.set_trial_intermediate_value(1, 1, 1.0),
        lambda: storage.set_trial_user_attr(1, "a", 1),
        lambda: storage.set_trial_system_attr(1, "a", 1),
    ):
        with pytest.raises(StoreError, match="read-only view"):
            write()


def test_what_is_not_there_is_a_key_error(study):
    storage = optuna_storage(study.storage.url)
    for ask in (storage.get_study_name_from_id, storage.get_trial):
        with pytest.raises(KeyError):
            ask(99 * 10**9)
    with pytest.raises(KeyError):
        storage.get_study_id_from_name("none")


def test_an_exported_copy_is_optunas_own(study, tmp_path):
    file = tmp_path / "copy.db"
    export_optuna(study.storage.url, "s", file=file)
    copy = optuna.load_study(study_name="s", storage=f"sqlite:///{file}")
    assert len(copy.trials) == 8
    with pytest.raises(UsageError, match="exists"):
        export_optuna(study.storage.url, "s", file=file)
    with pytest.raises(StudyNotFoundError):
        export_optuna(study.storage.url, "none", file=tmp_path / "other.db")


def test_without_optuna_the_extra_is_named(study, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("thrifty.integrations.optuna.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    anew = importlib.import_module("thrifty.integrations.optuna").optuna_storage
    with pytest.raises(MissingExtraError, match=r"\.\[optuna\]"):
        anew(study.storage.url)
