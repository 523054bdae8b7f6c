"""What the log says about trials that fail, and the way on if all of them have failed."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing

import pytest

from tests.study.helpers import SOLO, make_study
from thrifty.core import StudyMismatchError, ThriftyError
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space
from thrifty.store import Store
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


class Failing(LineTask):
    """Task that raises an error for each option but the first."""

    def model(self, hp):
        if hp.option:
            raise ValueError(f"option {hp.option} is too large")
        return super().model(hp)


class Broken(LineTask):
    def model(self, hp):
        raise ValueError("no model today")


def study_of(folder, *, task=None, first=0, num=6, name="s"):
    space = Space(lr=0.1, option=Choice(list(range(first, first + num))))
    return make_study(
        folder, task=task or Failing(), space=space, algorithm=GridSearch(max_epochs=2), name=name
    )


def said(caplog, word: str) -> list[str]:
    lines = [line for message in caplog.messages for line in message.splitlines()]
    return [line for line in lines if word in line]


@pytest.fixture(autouse=True)
def warnings_only(caplog):
    caplog.set_level(logging.WARNING, logger="thrifty")


@pytest.mark.parametrize("executor", [SOLO, Local(pack="concatenated", pack_size=8)])
def test_an_error_of_many_trials_is_said_at_once_and_counted_at_the_end(tmp_path, caplog, executor):
    study_of(tmp_path).run(progress=False, executor=executor)
    first, *_, last = said(caplog, "is too large")
    assert first == (
        "trial 1 failed: ValueError: option 1 is too large (traceback: study.trials[1].error)"
    )
    assert last == "trials 1, 2, 3 and 2 more failed: ValueError: option 1 is too large"
    assert len(said(caplog, "is too large")) == 2
    assert said(caplog, "has the traceback") == ["study.trials[1].error has the traceback"]


class NotFinite(LineTask):
    def metrics(self, model, batch):
        return {"mse": float("nan") if self.option else 1.0}

    def adapt(self, model, hp):
        self.option = hp.option


def test_a_metric_that_is_not_finite_is_said_at_once_and_once(tmp_path, caplog):
    seen = []

    class Look:
        def on_event(self, event):
            seen.append(len(said(caplog, "mse is nan after epoch 2")))

    study = study_of(tmp_path, task=NotFinite(), num=2)
    study.run(progress=False, executor=SOLO, observers=[Look()])
    (line,) = said(caplog, "mse is nan")
    assert line == "trial 1 failed: mse is nan after epoch 2"
    assert 1 in seen, "before the run has ended"
    caplog.clear()
    assert study_of(tmp_path, task=NotFinite(), num=2).trials
    assert said(caplog, "not finite") == [], "reading the study does not say it again"


def test_an_error_of_one_trial_is_said_once(tmp_path, caplog):
    study_of(tmp_path, num=2).run(progress=False, executor=SOLO)
    assert len(said(caplog, "failed")) == 1


class FailingFirst(LineTask):
    """Task whose first model of a configuration cannot be made, as a passing fault may have it."""

    left = 1

    def model(self, hp):
        if type(self).left:
            type(self).left -= 1
            raise OSError("the file server is away")
        return super().model(hp)


def test_a_dry_run_that_fails_alone_is_said_at_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(FailingFirst, "left", 1)
    study = study_of(tmp_path, task=FailingFirst(), num=2)
    study.run(progress=False, executor=SOLO)
    assert [trial.state for trial in study.trials] == ["done", "done"]
    (line,) = said(caplog, "dry run")
    assert "failed with OSError: the file server is away, although no trial did" in line


def test_a_later_run_does_not_repeat_the_failures_of_an_earlier_one(tmp_path, caplog):
    study = study_of(tmp_path)
    study.run(progress=False, executor=SOLO)
    caplog.clear()
    study.enqueue_trial({"option": 0})
    study.run(progress=False, executor=SOLO)
    assert said(caplog, "failed") == []


def test_a_study_whose_trials_all_failed_says_so_and_what_to_do(tmp_path, caplog):
    study = study_of(tmp_path, first=1)
    study.run(progress=False, executor=SOLO)
    assert said(caplog, "study 's' has no results, because all its trials failed")
    assert said(caplog, "thrifty delete s --storage sqlite:///")
    assert len(said(caplog, "is too large")) == 2
    caplog.clear()
    study.run(progress=False, executor=SOLO)
    assert said(caplog, "all its trials failed"), "a study that is done says it again"


def test_the_best_of_a_study_whose_trials_all_failed_is_an_error_with_a_traceback(tmp_path):
    study = study_of(tmp_path, first=1).run(progress=False, executor=SOLO)
    with pytest.raises(ThriftyError, match=r"trials 0, 1, 2 and 3 more failed") as caught:
        _ = study.best_trial
    assert "in model" in str(caught.value)


def test_a_study_in_memory_is_not_to_be_deleted(tmp_path, caplog):
    study = make_study(tmp_path, task=Broken(), storage="sqlite://")
    study.run(progress=False, executor=SOLO)
    assert said(caplog, "all its trials failed")
    assert not said(caplog, "thrifty delete")


def test_a_corrected_task_takes_the_place_of_a_study_whose_trials_all_failed(tmp_path, caplog):
    study_of(tmp_path, task=Broken()).run(progress=False, executor=SOLO)
    assert study_of(tmp_path).plan().epochs_to_train > 0
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        assert store.studies.summary("s").num_trials["failed"] == 6, "a plan deletes nothing"
    caplog.clear()
    assert study_of(tmp_path).run(progress=False, executor=SOLO).best_trial.number == 0
    assert len(said(caplog, "takes its place; to undo that: thrifty restore s --storage")) == 1
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.trash.put(store.studies.get("s"), who="me")
        store.trash.restore(min(store.trash.list(), key=lambda each: each.id))
    with pytest.raises(ThriftyError, match="trials 0, 1, 2 and 3 more failed"):
        _ = study_of(tmp_path, task=Broken()).best_trial


def test_a_study_with_a_trial_that_has_not_failed_gives_no_way(tmp_path):
    study = study_of(tmp_path, task=Broken())
    study.run(progress=False, executor=SOLO)
    with closing(sqlite3.connect(tmp_path / "t.db")) as database, database:
        database.execute("UPDATE trials SET state = 'stopped' WHERE number = 0")
    with pytest.raises(StudyMismatchError, match="which has no results, delete it first: "):
        study_of(tmp_path).run(progress=False)


def test_a_study_with_results_is_not_said_to_have_none(tmp_path):
    study_of(tmp_path).run(progress=False, executor=SOLO)
    with pytest.raises(StudyMismatchError, match="To replace the stored study, delete it first"):
        study_of(tmp_path, task=Broken()).run(progress=False)


def test_a_deleted_study_is_tried_again_without_a_change(tmp_path):
    """A cause outside of the task, such as a missing file, needs no other name."""
    study_of(tmp_path).run(progress=False, executor=SOLO)
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.trash.put(store.studies.get("s"), who="me")
    again = study_of(tmp_path).run(progress=False, executor=SOLO)
    assert [trial.state for trial in again.trials] == ["done", *["failed"] * 5]
    assert again.savings.unique_epochs == 2
