"""Any error in a task's code fails its own trial, in any process and on every database."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.helpers import Count, make_study
from thrifty.cli import _app
from thrifty.core import TaskError, UsageError
from thrifty.pack import Trainable
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, MultiStep, Space, Step
from thrifty.store import Store
from thrifty.study import Storage
from thrifty.testing import FaultyTask
from thrifty.web import create_app


pytestmark = pytest.mark.slow


FAULTS = ("raise", "exit", "interrupt", "odd text", "huge text", "no text")
SPACE = Space(
    lr=Choice([0.1]),
    fault=Choice(["", *(MultiStep(["", fault], milestones=[2]) for fault in FAULTS)]),
)
EXECUTORS = {
    "solo": Local(pack="solo", threads=1),
    "concatenated": Local(pack="concatenated", pack_size=4, threads=1),
    "fused": Local(pack="fused", pack_size=4, threads=1),
    "processes": Local(workers=2, pack="solo", threads=1),
}


def study_of(folder, url, **options):
    storage = Storage(url=url, checkpoints=str(folder / "checkpoints"))
    algorithm = GridSearch(max_epochs=4)
    return make_study(
        folder, task=FaultyTask(), space=SPACE, algorithm=algorithm, storage=storage, **options
    )


def assert_each_failed_alone(study) -> None:
    good, *failed = study.trials
    assert (good.state, good.epochs) == ("done", 4)
    assert {trial.state for trial in failed} == {"failed"}
    assert [trial.epochs for trial in failed] == [0] * len(FAULTS)
    for trial in failed:
        trial.error.encode("utf-8")
        assert len(trial.error) < 1_000_000
    assert "SystemExit" in failed[1].error
    assert "KeyboardInterrupt" in failed[2].error


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    return request.getfixturevalue("postgresql")


@pytest.mark.sample(2)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_trial_fails_alone(tmp_path, executor):
    study = study_of(tmp_path, f"sqlite:///{tmp_path}/t.db")
    study.run(progress=False, executor=EXECUTORS[executor])
    assert_each_failed_alone(study)


@pytest.mark.sample(1)
def test_it_is_kept_and_shown(tmp_path, url):
    study_of(tmp_path, url).run(progress=False, executor=EXECUTORS["solo"])
    assert_each_failed_alone(study_of(tmp_path, url))
    with Store.open(url) as store:
        assert store.studies.summary("s").num_trials["failed"] == len(FAULTS)
    with TestClient(create_app(url), base_url="http://localhost") as client:
        for number in range(1 + len(FAULTS)):
            answer = client.get(f"/api/studies/1/trials/{number}")
            assert answer.status_code == 200
            assert (answer.json()["state"] == "failed") == (number > 0)
    for kind in ("csv", "json", "parquet"):
        out = tmp_path / f"trials.{kind}"
        words = ["export", "s", "--storage", url, "--out", str(out)]
        result = CliRunner().invoke(_app, words, catch_exceptions=False)
        assert result.exit_code == 0
        assert out.stat().st_size > 100
    found = json.loads((tmp_path / "trials.json").read_text())
    assert "SystemExit" in found[2]["error"]


class Interrupting(FaultyTask):
    """Task whose user presses Ctrl-C twice while it trains."""

    def loss(self, model, batch):
        if model.training:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return super().loss(model, batch)


def test_ctrl_c_still_stops_the_study(tmp_path):
    study = make_study(tmp_path, task=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        study.run(progress=False, executor=EXECUTORS["solo"])


class Exiting(FaultyTask):
    def model(self, hp):
        raise SystemExit("no model today")


@pytest.mark.parametrize("executor", ["solo", "fused", "processes"])
def test_an_exit_while_the_model_is_made_fails_its_trial(tmp_path, executor):
    study = make_study(tmp_path, task=Exiting())
    study.run(progress=False, executor=EXECUTORS[executor])
    assert all("no model today" in trial.error for trial in study.trials)


class Stateless(Trainable):
    """Trainable whose state cannot be read."""

    def setup(self, hp, *, seed, device) -> None:
        self.error = hp["error"]

    def train(self, epoch, hp) -> None:
        pass

    def evaluate(self):
        return {"mse": 0.0}

    def state(self):
        if self.error == "exit":
            raise SystemExit(1)
        if self.error == "raise":
            raise TaskError("no state")
        return {}

    def load_state(self, state) -> None:
        pass


def test_a_state_that_cannot_be_had_ends_no_study(tmp_path, caplog):
    """A state that cannot be read does not end the study.

    The metrics are known by then; only trials that continue from that state fail.
    """
    study = make_study(
        tmp_path,
        task=Stateless(),
        space=Space(error=Choice(["", "raise", "exit"])),
        algorithm=GridSearch(max_epochs=2),
    )
    study.run(progress=False, executor=EXECUTORS["solo"])
    assert [trial.value for trial in study.trials] == [0.0, 0.0, 0.0]
    assert "TaskError: no state" in caplog.text
    assert "SystemExit: 1" in caplog.text


class Moving(Trainable):
    """Trainable whose state cannot be kept, or not be loaded, from some epoch on."""

    def setup(self, hp, *, seed, device) -> None:
        self.fault, self.x = hp["fault"], 1.0

    def train(self, epoch, hp) -> None:
        self.x -= hp["lr"] * self.x
        self.epoch = epoch

    def evaluate(self):
        return {"mse": self.x}

    def state(self):
        if self.fault == "late" and self.epoch >= 2:
            raise TaskError("no state any more")
        return {"x": self.x, "epoch": self.epoch}

    def load_state(self, state) -> None:
        if self.fault == "load":
            raise TaskError("no way back")
        self.x, self.epoch = state["x"], state["epoch"]


class Arrays(Moving):
    def state(self):
        return {**super().state(), "array": np.zeros(2)}


@pytest.mark.parametrize("executor", ["solo", "processes"])
@pytest.mark.parametrize(
    ("task", "fault", "told", "num_done"),
    [
        (Moving, "", "", 3),
        (Moving, "late", "no state any more", 0),
        (Moving, "load", "no way back", 0),
        (Arrays, "", "is a ndarray", 0),
    ],
)
def test_what_goes_on_from_a_state_that_cannot_be_had_fails(
    tmp_path, executor, task, fault, told, num_done
):
    """A state that cannot be kept ends what goes on from it, and is not trained again for ever."""
    count = Count()
    study = make_study(
        tmp_path,
        task=task(),
        space=Space(fault=fault, lr=Choice([0.1, Step(0.1, [3]), Step(0.1, [4])])),
        algorithm=GridSearch(max_epochs=6),
    )
    study.run(progress=False, executor=EXECUTORS[executor], observers=[count])
    assert [trial.state for trial in study.trials].count("done") == num_done
    assert all(told in trial.error for trial in study.trials if trial.state == "failed")
    assert {trial.state for trial in study.trials} <= {"done", "failed"}
    assert count.epochs <= 3 * 6


def test_a_file_that_exits_is_an_error(tmp_path):
    (tmp_path / "study.py").write_text("import sys\nsys.exit(0)\n")
    result = CliRunner().invoke(_app, ["plan", str(tmp_path / "study.py")])
    assert isinstance(result.exception, UsageError)
    assert "line 2: SystemExit: 0" in str(result.exception)


def test_old_rows_are_shown_as_plain_text(tmp_path):
    """Old rows are shown as plain text, because anything may have written the database."""
    url = f"sqlite:///{tmp_path}/t.db"
    study_of(tmp_path, url).run(progress=False, executor=EXECUTORS["solo"])
    with Store.open(url) as store, store._engine.begin() as connection:
        error = json.dumps(["error", "\x1b[31m\ud800\0", "tra\x1bce\nback"])
        connection.exec_driver_sql("UPDATE trials SET error = ? WHERE number = 1", (error,))
    trial = study_of(tmp_path, url).trials[1]
    assert trial.error == "\\x1b[31m\\ud800\\x00\ntra\\x1bce\nback"
    with TestClient(create_app(url), base_url="http://localhost") as client:
        answer = client.get("/api/studies/1/trials/1").json()
    assert answer["error"] == "error: \\x1b[31m\\ud800\\x00"
    assert answer["traceback"] == "tra\\x1bce\nback"
