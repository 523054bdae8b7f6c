"""What ``thrifty status`` says of a study that has something left to train."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import thrifty as th
from tests.study.processes import die, exit_code, started
from thrifty.cli import _app
from thrifty.store import Store
from thrifty.store._steering_requests import ask_longer
from thrifty.testing import LineTask
from thrifty.web import create_app


pytestmark = pytest.mark.slow

STORAGE = "sqlite:///t.db"
GOES_ON = "  to go on    thrifty resume line --storage sqlite:///t.db"
SOLO = th.Local(pack="solo", threads=1)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def study_of(*, max_epochs=4, name="line", file=True, space=None, task=None):
    study = th.Study(
        LineTask() if task is None else task,
        space or th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
        algorithm=th.GridSearch(max_epochs=max_epochs),
        metric="mse",
        mode="min",
        storage=STORAGE,
        name=name,
    )
    study.file = Path("line_study.py") if file else None
    return study


def said(*words):
    found = CliRunner().invoke(_app, [*words, "--storage", STORAGE], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def document():
    (study,) = json.loads(said("status", "line", "--json"))["studies"]
    return study


def test_an_extended_study_says_what_remains_and_how_to_go_on():
    study = study_of().run(progress=False, executor=SOLO)
    assert "remaining" not in said("status")
    assert "to go on" not in said("status")
    study.extend(max_epochs=7)
    shown = said("status")
    assert "line  stopped (run it again to go on)\n" in shown
    assert (
        "  remaining   at most 6 epochs: 2 trials have not reached 7 epochs, raised from 4\n"
    ) in shown
    assert GOES_ON in shown
    found = document()["remaining"]
    assert found["max_epochs"] == {"epochs": 7}
    assert (found["num_trials"], found["most"]) == (2, {"epochs": 6})
    study.run(progress=False, executor=SOLO)
    assert "line  done\n" in said("status")
    assert document()["remaining"]["num_trials"] == 0


def test_what_is_queued_for_a_study_that_is_done():
    study = study_of().run(progress=False, executor=SOLO)
    with Store.open(STORAGE) as store:
        ask_longer(store, "line", max_epochs=9)
    # a configuration that a trial of the grid has, too
    study.enqueue_trial({"lr": 0.1})
    shown = said("status")
    assert "line  done\n" in shown
    assert "  queued      1 configuration to try\n" in shown
    assert "  queued      train each trial for 9 epochs\n" in shown
    assert GOES_ON in shown
    found = document()["remaining"]
    assert (found["num_enqueued"], found["requested_max_epochs"]) == (1, 9)
    study.run(progress=False, executor=SOLO)
    assert "queued" not in said("status")
    assert [trial.epochs for trial in study.trials] == [9, 9, 9]


def test_what_a_session_made_has_no_command():
    study = study_of(file=False, task=LineTask()).run(progress=False, executor=SOLO)
    study.enqueue_trial({"lr": 0.1})
    assert "  to go on    run the study again\n" in said("status")


class Interrupted(LineTask):
    """Task whose user presses Ctrl-C once or twice, in a run that is ``arming``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def metrics(self, model, batch):
        if Path("armed").exists() and not Path("fired").exists():
            Path("fired").touch()
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return super().metrics(model, batch)


class OnceRecorded:
    """Observer that acts once the database has the trials of the study."""

    def __init__(self, action):
        self._action = action

    def on_event(self, event):
        with Store.open(STORAGE) as store:
            is_recorded = bool(store.studies.summary("line").num_trials)
        if is_recorded:
            self._action()


def arming():
    return OnceRecorded(Path("armed").touch)


@pytest.mark.parametrize("times", [1, 2])
def test_after_ctrl_c_nothing_is_running(times, caplog):
    study = study_of(max_epochs=300, task=Interrupted(times))
    if times == 1:
        study.run(progress=False, executor=SOLO, observers=[arming()])
        assert "thrifty resume line --storage sqlite:///t.db" in caplog.text
    else:
        with pytest.raises(KeyboardInterrupt):
            study.run(progress=False, executor=SOLO, observers=[arming()])
    shown = said("status")
    assert "line  stopped (run it again to go on)\n" in shown
    assert GOES_ON in shown
    assert_nothing_runs(study)
    study.run(progress=False, executor=SOLO)
    assert {trial.state for trial in study.trials} == {"done"}


def assert_nothing_runs(study):
    """Check that no surface calls a trial running."""
    assert {trial.state for trial in study.trials} == {"paused"}
    assert {each["state"] for each in json.loads(said("export", "line", "--format", "json"))} == {
        "paused"
    }
    with TestClient(create_app(STORAGE), base_url="http://localhost") as client:
        (row,) = client.get("/api/studies").json()["studies"]
        assert row["state"] in ("stopped", "interrupted")
        assert client.get("/api/studies/1").json()["resume"] == "thrifty resume line"
        trials = client.get("/api/studies/1/trials").json()["trials"]
        assert {each["state"] for each in trials} == {"paused"}
        filtered = {
            state: client.get("/api/studies/1/trials", params={"state": state}).json()["total"]
            for state in ("running", "paused")
        }
        assert filtered == {"running": 0, "paused": len(trials)}


def _train(folder):
    os.chdir(folder)
    study_of(max_epochs=300).run(progress=False, executor=SOLO, observers=[OnceRecorded(die)])


def test_after_a_kill_nothing_is_running():
    process = started(_train, str(Path.cwd()))
    assert exit_code(process) == -signal.SIGKILL
    shown = said("status")
    assert "line  interrupted (its process is gone; run it again to go on)\n" in shown
    assert GOES_ON in shown
    assert_nothing_runs(study_of(max_epochs=300))


def test_every_place_shows_the_same_training_time():
    first = study_of().run(progress=False, executor=SOLO)
    wider = th.Space(lr=th.Choice([0.1, th.Step(0.1, [2]), 0.2]))
    second = study_of(name="second", space=wider).run(progress=False, executor=SOLO)
    with (
        Store.open(STORAGE) as store,
        TestClient(create_app(STORAGE), base_url="http://localhost") as client,
    ):
        cards = {each["name"]: each for each in client.get("/api/studies").json()["studies"]}
        for study in (first, second):
            summary, card = store.studies.summary(study.name), cards[study.name]
            found = study.savings
            trained = found.unique_epochs - found.known_epochs
            assert summary.seconds == pytest.approx(card["seconds"])
            assert summary.seconds == pytest.approx(found.seconds_trained)
            assert summary.trained_epochs == card["epochs"]["trained"] == trained
        assert summary.plan_epochs == 10
    savings = second.savings
    assert savings.known_epochs == 6
    assert savings.seconds_known == pytest.approx(first.savings.seconds)
    assert re.search(r"training [\d.]+ s.*, [\d.]+ s of it by other studies", str(savings))
    assert " of it by other studies" not in str(first.savings)
    shown = said("status", "second")
    assert re.search(r"epochs +12 requested, 4 trained, 10 by all studies of its task\n", shown)
    assert re.search(r"training +[\d.]+ s, [\d.]+ s by all studies of its task\n", shown)


def test_the_time_of_what_no_trial_has_reported_is_named():
    study = study_of(max_epochs=300, task=Interrupted(1))
    study.run(progress=False, executor=SOLO, observers=[arming()])
    found = study.savings
    assert found.unreported_epochs > 0
    assert found.seconds_trained == pytest.approx(document()["seconds_by_study"])
    assert re.search(r"epochs? \([\d.]+ s\) trained besides, reported by no trial", str(found))
