"""Logger for Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from thrifty.core import UsageError, fingerprint, require
from thrifty.study import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent

from ._logger import Logger, OpenRuns, plain


Mode = Literal["online", "offline"]

MAX_OPEN = 8
"""Maximum number of open runs. Each has its own stream in the wandb service process."""


class WandB(Logger):
    """Logs a study to Weights & Biases: one run per trial, and one group per study.

    The run id is derived from the study and the trial. A trial that continues in another run of the
    study, or in another process, therefore continues its W&B run, and no epoch is written twice.
    (With ``mode="offline"`` earlier data are unknown: each time a folder of the same id is written,
    and ``wandb sync --append`` merges it.) The W&B step is the epoch.

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
        self._runs = OpenRuns(self._open, lambda run: run.finish(), limit=MAX_OPEN)

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
