"""Logger for MLflow."""

from __future__ import annotations

import re
import time
from typing import Any

from thrifty.core import require
from thrifty.study import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent

from ._logger import Logger, plain


MAX_VALUE = 500
"""Maximum length of a parameter that every version of MLflow accepts."""
MAX_TAG = 5000

_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(Logger):
    """Logs a study to MLflow: one run per trial, with metrics by epoch and hyper-parameters.

    Runs have the tags ``thrifty.study``, ``thrifty.trial`` and ``thrifty.key`` (the study's key,
    which distinguishes studies of the same name). A trial that continues in another run of the
    study, or in another process, continues its MLflow run, which is found by its tags. No epoch is
    written twice. The status of a trial that was stopped early is ``KILLED``, and that of a trial
    that waits while the study is not running is ``SCHEDULED``.

    Args:
        tracking_uri: A server, or a database such as ``"sqlite:///mlflow.db"`` (default: MLflow's
            own setting).
        experiment: Name of the experiment, created if it does not exist (default: the name of the
            study).
        patience_s: Maximum seconds that the end of a run waits for unwritten data.

    Raises:
        MissingExtraError: MLflow is not installed.
        UsageError: The patience is not a number of seconds.

    >>> MLflow(tracking_uri="sqlite:///mlflow.db", experiment="digits").experiment
    'digits'
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        patience_s: float = 60.0,
    ) -> None:
        super().__init__(patience_s=patience_s)
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        _mlflow("tracking")

    def open(self, began: StudyBegan) -> _Experiment:
        """Open the experiment of a study."""
        client = _mlflow("tracking").MlflowClient(tracking_uri=self.tracking_uri)
        experiment = _experiment(client, self.experiment or began.study)
        return _Experiment(client, _mlflow("entities"), experiment, began=began)


class _Experiment:
    """The runs of a study's trials."""

    def __init__(self, client: Any, entities: Any, experiment: str, *, began: StudyBegan) -> None:
        self._client = client
        self._entities = entities
        self._experiment = experiment
        self._began = began
        self._runs: dict[int, str] = {}
        """Run id of each trial that may continue."""
        self._logged: dict[int, int] = {}
        """Last epoch of each such trial in MLflow."""

    def take(self, event: TrialEvent) -> None:
        """Write an event."""
        if isinstance(event, TrialBegan):
            self._begin(event)
        elif isinstance(event, TrialAdvanced):
            self._advance(event)
        elif isinstance(event, TrialEnded):
            self._end(event)
        elif isinstance(event, StudyEnded):
            self._leave(event)

    def _begin(self, event: TrialBegan) -> None:
        run = self._run(event.trial)
        params = [
            self._entities.Param(_name(key), str(value)[:MAX_VALUE])
            for key, value in plain(event.config).items()
        ]
        self._client.log_batch(run, params=params)
        if event.parent is not None:
            self._client.set_tag(run, "thrifty.parent", "{} at epoch {}".format(*event.parent))

    def _run(self, trial: int) -> str:
        """Return the run id of a trial, and create the run if there is none."""
        if trial not in self._runs:
            run = self._find(trial) if self._began.resumed else None
            if run is None:
                run = self._client.create_run(
                    self._experiment,
                    tags=self._tags(trial),
                    run_name=f"{self._began.study} {trial}",
                )
            else:
                self._client.update_run(run.info.run_id, status="RUNNING")
            self._runs[trial] = run.info.run_id
            self._logged[trial] = self._last_epoch(run)
        return self._runs[trial]

    def _tags(self, trial: int) -> dict[str, str]:
        began = self._began
        return {"thrifty.study": began.study, "thrifty.trial": str(trial), "thrifty.key": began.key}

    def _find(self, trial: int) -> Any:
        # Do not search by the study's name, which may contain quotes.
        found = self._client.search_runs(
            [self._experiment],
            filter_string=(
                f"tags.`thrifty.key` = '{self._began.key}' and tags.`thrifty.trial` = '{trial}'"
            ),
            max_results=1,
        )
        return found[0] if found else None

    def _last_epoch(self, run: Any) -> int:
        epochs = [
            metric.step
            for name in list(run.data.metrics)[:1]
            for metric in self._client.get_metric_history(run.info.run_id, name)
        ]
        return max(epochs, default=0)

    def _advance(self, event: TrialAdvanced) -> None:
        run, now = self._run(event.trial), int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_name(name), value, now, epoch)
            for epoch, values in event.epochs()
            if epoch > self._logged[event.trial]
            for name, value in values.items()
        ]
        self._client.log_batch(run, metrics=metrics)
        self._logged[event.trial] = max(event.epoch, self._logged[event.trial])

    def _end(self, event: TrialEnded) -> None:
        run = self._runs.pop(event.trial, None)
        if run is None:  # the trial has ended before
            return
        if event.message:
            self._client.set_tag(run, "thrifty.error", event.message[:MAX_TAG])
        self._client.set_terminated(run, status=_STATUS[event.state])

    def _leave(self, event: StudyEnded) -> None:
        for run in self._runs.values():
            if event.state == "done":
                # The study is done, so this trial never continues.
                self._client.set_terminated(run, status="KILLED")
            else:
                self._client.update_run(run, status="SCHEDULED")


def _experiment(client: Any, name: str) -> str:
    """Return the id of an experiment, and create it if it does not exist."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except _mlflow("exceptions").MlflowException:
            # Another study may have created it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _name(name: str) -> str:
    """Return a name with only characters that MLflow accepts."""
    return re.sub(r"[^\w./ -]", "_", name)


def _mlflow(part: str) -> Any:
    """Import a part of MLflow that mlflow-skinny contains, too."""
    return require(f"mlflow.{part}", package="mlflow-skinny", extra="mlflow")
