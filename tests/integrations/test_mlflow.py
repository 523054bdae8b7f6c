from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException

from tests.integrations.streams import advanced, began, first_run, second_run, tell
from thrifty.integrations import MLflow
from thrifty.integrations._trackers import _experiment
from thrifty.study import StudyEnded, TrialBegan


# MLflow's own tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_warning(caplog, request):
    """Assert that loggers can write all that tests give them."""
    yield
    if "warning" not in request.node.name:
        assert "does not write" not in caplog.text


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """Return one database for all tests, because creating one takes long."""
    before = os.environ.get("MLFLOW_DISABLE_TELEMETRY")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    if before is None:
        del os.environ["MLFLOW_DISABLE_TELEMETRY"]


@pytest.fixture
def client(uri):
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    return MlflowClient(tracking_uri=uri)


def runs_of(client, experiment):
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id], max_results=100)
    return {int(run.data.tags["thrifty.trial"]): run for run in runs}


def history(client, run, metric="mse"):
    found = client.get_metric_history(run.info.run_id, metric)
    return sorted((m.step, m.value) for m in found)


def test_each_trial_is_a_run_with_params_metrics_and_tags(uri, client):
    tell(MLflow(tracking_uri=uri, experiment="first"), first_run())
    runs = runs_of(client, "first")
    assert sorted(runs) == [0, 1, 2, 3]
    assert history(client, runs[0]) == [(1, 0.5), (2, 0.4), (3, 0.3)]
    assert history(client, runs[0], "a metric ___") == [(1, 1.5), (2, 1.4), (3, 1.3)]
    assert runs[0].data.params == {
        "lr": "Step(0.1, (3,))", "width": "64", "norm": "True", "name": "a b", "none": "None",
    }  # fmt: skip
    tags = runs[3].data.tags
    assert (tags["thrifty.study"], tags["thrifty.parent"]) == ("digits", "0 at epoch 2")
    assert runs[2].data.tags["thrifty.error"] == "it broke"
    assert [runs[t].info.status for t in range(4)] == ["FINISHED", "KILLED", "FAILED", "SCHEDULED"]


def test_a_trial_goes_on_in_its_run_and_has_each_epoch_once(uri, client):
    for events in (first_run(), second_run()):
        tell(MLflow(tracking_uri=uri, experiment="second"), events)
    runs = runs_of(client, "second")
    assert len(client.search_runs([runs[3].info.experiment_id])) == 4
    assert history(client, runs[3]) == [(1, 0.5), (2, 0.4), (3, 0.3), (4, 0.2), (5, 0.1)]
    assert runs[3].info.status == "FINISHED"


def test_a_study_of_the_same_name_has_runs_of_its_own(uri, client):
    for key in ("1" * 16, "2" * 16):
        events = [
            began(key=key, study="it's new"),
            TrialBegan(trial=0, config={"a": 1}),
            StudyEnded(state="done"),
        ]
        tell(MLflow(tracking_uri=uri), events)
    found = client.get_experiment_by_name("it's new")
    runs = client.search_runs([found.experiment_id])
    assert sorted(run.data.tags["thrifty.key"][0] for run in runs) == ["1", "2"]
    assert [run.info.status for run in runs] == ["KILLED", "KILLED"], (
        "the study is done, so no trial continues"
    )


def test_many_metrics_and_long_values_are_taken_in_portions(uri, client):
    config = {f"p{i}": "x" * 900 for i in range(150)}
    tell(
        MLflow(tracking_uri=uri, experiment="many"),
        [
            began(),
            TrialBegan(trial=0, config=config),
            advanced(0, 1, [float(e) for e in range(700)]),
            StudyEnded(state="stopped"),
        ],
    )
    (run,) = runs_of(client, "many").values()
    assert len(run.data.params) == 150
    assert set(run.data.params.values()) == {"x" * 500}
    assert len(history(client, run)) == 700


def test_a_place_that_cannot_be_is_a_warning(caplog):
    tell(MLflow(tracking_uri="nowhere://here"), first_run())
    assert "MLflow does not write" in caplog.text


class Rival:
    """A client of a server where another study creates the experiment first, or creation fails."""

    def __init__(self, *, made):
        self.made, self.asked = made, 0

    def get_experiment_by_name(self, name):
        self.asked += 1
        return SimpleNamespace(experiment_id=7) if self.made and self.asked > 1 else None

    def create_experiment(self, name):
        raise MlflowException("there is one already" if self.made else "it was deleted")


def test_two_studies_may_make_an_experiment_at_the_same_time():
    assert _experiment(Rival(made=True), "ours") == "7"
    with pytest.raises(MlflowException, match="it was deleted"):
        _experiment(Rival(made=False), "ours")
