"""Weights & Biases."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from thrifty.core import MissingExtraError, UsageError, fingerprint
from thrifty.study import (
    StudyBegan,
    StudyEnded,
    TrialAdvanced,
    TrialBegan,
    TrialEnded,
    TrialEvent,
)

from ._logger import Logger, OpenRuns, plain


Mode = Literal["online", "offline"]

MAX_OPEN = 8
"""Each open run has a stream of its own in the library's service process."""


class WandB(Logger):
    """Writes a study to Weights & Biases: a run for each trial, those of a study in one group.

    The id of a run is made of the study and the trial, so a trial that goes on in another run of the study, or in another process,
    goes on in its run; no epoch is written twice. (``mode="offline"`` cannot know what was written before: each time a folder
    of the same id is written, and ``wandb sync --append`` adds it.) The step is the epoch.

    Args:
        project: the project.
        entity: the user or team (default: your own).
        mode: ``"offline"`` writes files only (default: what W&B is set to).
        folder: where these go (default: ``wandb`` here).
        patience_s: how many seconds the end of a run waits at most for what is not written yet.

    Raises:
        MissingExtraError: wandb is not installed.
        UsageError: the mode is unknown, the patience not a number of seconds.

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
        """The group of a study."""
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
        """Of those trials that may go on."""
        self._runs = OpenRuns(self._open, lambda run: run.finish(), limit=MAX_OPEN)

    def take(self, event: TrialEvent) -> None:
        """Writes an event."""
        if isinstance(event, TrialBegan):
            self._configs[event.trial] = plain(event.config)
        elif isinstance(event, TrialAdvanced):
            run = self._runs[event.trial]
            # a run that goes on knows where it stands
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
            # several trials are under way at a time, and none of them is "the" run of this process
            reinit="create_new",
            resume="allow",
            settings=self._wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )


def _wandb() -> Any:
    try:
        return import_module("wandb")
    except ImportError:
        raise MissingExtraError("wandb", extra="wandb") from None
