"""Loggers for TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from thrifty.core import MissingExtraError, UsageError, fingerprint, require
from thrifty.study import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent

from ._logger import Logger, OpenRuns, plain, safe_name


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


MAX_OPEN_WRITERS = 32
"""Maximum number of trials with an open file (and a thread that writes it)."""

_BEGINNING, _END = 1, 2
"""Positions of the start and end summaries; the first one, the experiment's, is optional."""


class TensorBoard(Logger):
    """Logs a study to TensorBoard: a folder per trial, with metrics by epoch and hyper-parameters.

    Trial 7 of study ``digits`` is in ``digits-1f0c6e/trial-0007`` in the folder. The six
    hexadecimal digits distinguish studies of the same name. ``tensorboard --logdir FOLDER`` shows
    the curves, and all trials in its tab of hyper-parameters. A trial that continues in another
    run, or in another process, continues in its folder.

    Args:
        folder: Folder to write to.
        patience_s: Maximum seconds that the end of a run waits for unwritten data.

    Raises:
        MissingExtraError: Neither tensorboard nor tensorboardX is installed.
        UsageError: The patience is not a number of seconds.

    >>> import thrifty as th
    >>> from thrifty.testing import LineTask
    >>> folder = getfixture("tmp_path")
    >>> study = th.Study(
    ...     LineTask(),
    ...     th.Space(lr=th.Float(0.01, 0.1)),
    ...     metric="mse",
    ...     mode="min",
    ...     name="line",
    ...     algorithm=th.RandomSearch(max_epochs=2, num_trials=2),
    ...     storage="sqlite://",
    ... )
    >>> _ = study.run(progress=False, observers=[TensorBoard(folder)])
    >>> sorted(path.name for path in folder.glob("line-*/*"))
    ['trial-0000', 'trial-0001']
    """

    def __init__(self, folder: str | Path, *, patience_s: float = 60.0) -> None:
        super().__init__(patience_s=patience_s)
        self.folder = Path(folder)
        _package()

    def open(self, began: StudyBegan) -> _Folder:
        """Open the folder of a study."""
        folder = self.folder / f"{safe_name(began.study)}-{began.key[:6]}"
        return _Folder(folder, _package())


class _Folder:
    """The folder of a study, which contains one folder per trial."""

    def __init__(self, folder: Path, package: Any) -> None:
        self._folder = folder
        self._package = package
        self._reached: dict[int, int] = {}
        """Last epoch of each trial."""
        self._writers = OpenRuns(self._open, lambda writer: writer.close(), limit=MAX_OPEN_WRITERS)

    def take(self, event: TrialEvent) -> None:
        """Write an event."""
        if isinstance(event, TrialBegan):
            self._reached[event.trial] = event.epoch
            self._summary(event.trial, _BEGINNING, plain(event.config))
        elif isinstance(event, TrialAdvanced):
            self._advance(event)
        elif isinstance(event, TrialEnded):
            self._end(event)
        elif isinstance(event, StudyEnded):
            self._writers.close()

    def _open(self, trial: int) -> Any:
        reached = self._reached[trial]
        return self._package.SummaryWriter(
            str(self._folder / f"trial-{trial:04d}"),
            # If two files have the same epoch, TensorBoard must use the later one.
            purge_step=reached + 1,
            # Two files of the same second must have different names.
            filename_suffix=f".{reached:06d}",
        )

    def _advance(self, event: TrialAdvanced) -> None:
        self._reached.setdefault(event.trial, event.first_epoch - 1)
        writer = self._writers[event.trial]
        for epoch, metrics in event.epochs():
            for name, value in metrics.items():
                writer.add_scalar(name, value, epoch)
        writer.flush()
        self._reached[event.trial] = event.epoch

    def _end(self, event: TrialEnded) -> None:
        if event.trial not in self._reached:  # the trial has ended before
            return
        if event.state == "failed":
            self._writers[event.trial].add_text("failure", event.message)
        else:
            self._summary(event.trial, _END, {})
        self._writers.pop(event.trial).close()
        del self._reached[event.trial]

    def _summary(self, trial: int, which: int, config: dict[str, Any]) -> None:
        """Write a hyper-parameter summary."""
        summary = self._package.hparams(config, {})[which]
        self._writers[trial].file_writer.add_summary(summary)


class _Package:
    """The parts that are used of torch.utils.tensorboard or tensorboardX."""

    def __init__(self, name: str) -> None:
        self.SummaryWriter = import_module(name).SummaryWriter
        self.hparams = import_module(f"{name}.summary").hparams


def _package() -> _Package:
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return _Package(name)
        except ImportError:
            continue
    raise MissingExtraError("tensorboard", extra="tensorboard")


Mode = Literal["online", "offline"]

MAX_OPEN_RUNS = 8
"""Maximum number of open runs. Each has its own stream in the wandb service process."""


class WandB(Logger):
    """Logs a study to Weights & Biases: one run per trial, and one group per study.

    The run id is derived from the study and the trial. A trial that continues in another run of the
    study, or in another process, therefore continues its W&B run, and no epoch is written twice.
    (With ``mode="offline"`` earlier data are unknown: each time a folder of the same id is written,
    and ``wandb sync`` uploads these in the order of their starts.) The W&B step is the epoch.

    Args:
        project: The W&B project.
        entity: The user or team (default: your own).
        mode: ``"offline"`` writes files only (default: W&B's own setting).
        folder: Folder for these files (default: ``wandb`` in the working directory).
        patience_s: Maximum seconds that the end of a run waits for unwritten data.

    Raises:
        MissingExtraError: wandb is not installed.
        UsageError: The mode is unknown, or the patience is not a number of seconds.

    >>> WandB(project="digits", mode="offline").project
    'digits'
    """

    def __init__(
        self,
        *,
        project: str,
        entity: str | None = None,
        mode: Mode | None = None,
        folder: str | Path | None = None,
        patience_s: float = 120.0,
    ) -> None:
        super().__init__(patience_s=patience_s)
        if mode not in (None, *get_args(Mode)):
            raise UsageError(f'mode is {mode!r}; it is "online", "offline" or None')
        self.project = project
        self.entity = entity
        self.mode = mode
        self.folder = folder
        _wandb()

    def open(self, began: StudyBegan) -> _Group:
        """Open the group of a study."""
        options: dict[str, Any] = {
            "project": self.project,
            "entity": self.entity,
            "mode": self.mode,
            "dir": None if self.folder is None else str(self.folder),
        }
        return _Group(_wandb(), options, began=began)


class _Group:
    """The runs of a study's trials."""

    def __init__(self, wandb: Any, options: dict[str, Any], *, began: StudyBegan) -> None:
        self._wandb = wandb
        self._options = options
        self._began = began
        self._configs: dict[int, dict[str, Any]] = {}
        """Configurations of the trials that may continue."""
        self._runs = OpenRuns(self._open, lambda run: run.finish(), limit=MAX_OPEN_RUNS)

    def take(self, event: TrialEvent) -> None:
        """Write an event."""
        if isinstance(event, TrialBegan):
            self._configs[event.trial] = plain(event.config)
        elif isinstance(event, TrialAdvanced):
            run = self._runs[event.trial]
            # A resumed run knows its last step.
            first = run.step
            for epoch, metrics in event.epochs():
                if epoch >= first:
                    run.log(dict(metrics), step=epoch)
        elif isinstance(event, TrialEnded) and event.trial in self._configs:
            run = self._runs.pop(event.trial)
            run.summary.update({"state": event.state, "error": event.message})
            run.finish(exit_code=int(event.state == "failed"))
            del self._configs[event.trial]
        elif isinstance(event, StudyEnded):
            self._runs.close()

    def _open(self, trial: int) -> Any:
        began = self._began
        return self._wandb.init(
            **self._options,
            id=fingerprint([began.key, trial]),
            name=f"{began.study} {trial}",
            group=began.study,
            job_type="trial",
            config=self._configs.get(trial, {}),
            # Several trials run at a time, and none of them is "the" run of this process.
            reinit="create_new",
            resume="allow",
            settings=self._wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )


def _wandb() -> Any:
    return require("wandb", extra="wandb")
