"""Logger for TensorBoard."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from thrifty.core import MissingExtraError
from thrifty.study import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded, TrialEvent

from ._logger import Logger, OpenRuns, plain, safe_name


MAX_OPEN = 32
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
        self._writers = OpenRuns(self._open, lambda writer: writer.close(), limit=MAX_OPEN)

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
