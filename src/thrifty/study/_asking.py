"""A study that is asked what to train and told the results: its loop, in a thread of its own."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from thrifty.core import UsageError
from thrifty.run import AskedTrial, External
from thrifty.run._ask_tell import AskTell, AskTellExecutor, checked_attributes, checked_metrics

from ._goals import Goals
from ._reader import is_in_memory
from ._repository import StudyRepository


_LOCK = threading.Lock()
"""Held while a study begins to be asked, as several threads may ask at once."""


class AskingMixin:
    """The part of ``Study`` for loops that train its trials themselves.

    The attributes that it needs are declared here and defined in ``Study``.
    """

    task: Any
    goals: Goals
    _asking: Asking | None = None

    if TYPE_CHECKING:
        run: Callable[..., Any]

        def _repository(self) -> StudyRepository: ...

    def ask(self, *, wait: bool = True) -> AskedTrial | None:
        """Return what to train next; None once the study is done.

        Train the epochs of the trial and ``tell`` the metrics of each, then ask again. Several may
        be asked for before they are told.

        Args:
            wait: Whether to wait if the algorithm needs results before it decides; if not, None
                also means that no trial can go on until ``tell`` was called.

        Returns:
            The trial, whose ``config`` has the hyper-parameters of its next epoch.

        Raises:
            UsageError: The task is not an ``External``.
            StoreBusyError: Another process runs this study.
        """
        if not isinstance(self.task, External):
            raise UsageError(
                f"ask() is for what is trained elsewhere, and {type(self.task).__name__} is "
                'trained by run(); give the study the task thrifty.External("what it is")'
            )
        with _LOCK:
            asking = self._asking
            if asking is None or not (asking.is_running or is_in_memory(self._repository())):
                # A study that is done is only read; one that was stopped goes on.
                self._asking = asking = Asking(partial(self.run, progress=False))
        return asking.ask(wait=wait)

    def end_asking(self) -> None:
        """End the run that is asked, as the end of the process does; what was told is kept.

        Then another process may ask the study, and a later ``ask`` goes on.
        """
        if self._asking is not None:
            self._asking.end()

    def _check_enqueues(self) -> None:
        """Refuse to enqueue what the run that is asked would not find.

        Raises:
            UsageError: It has a database in memory of its own.
        """
        asking = self._asking
        if asking is not None and asking.is_running and is_in_memory(self._repository()):
            raise UsageError(
                "a study in memory that is being asked finds nothing that is enqueued later; "
                "enqueue it before the first ask(), or give the study a database"
            )

    def tell(
        self,
        trial: AskedTrial,
        metrics: Mapping[str, float] | float | None = None,
        *,
        error: str | None = None,
        user_attrs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Record the metrics of a trial's next epoch, or that it has failed.

        Args:
            trial: What ``ask`` has returned.
            metrics: The metrics after its next epoch, by name; a number is the study's metric.
            error: Why the trial has failed; it is then over.
            user_attrs: Facts about this epoch beside its metrics, such as texts, lists and dicts;
                see ``TrialResult.user_attrs``.

        Returns:
            Whether the trial goes on with another epoch. If not, ask for another trial.

        Raises:
            UsageError: The trial has ended, the metrics are no numbers or lack one that the study
                needs, or ``user_attrs`` are no JSON or take more than 64 KiB. Nothing is recorded,
                and a trial that has not ended waits to be told again.

        >>> import thrifty as th
        >>> study = th.Study(
        ...     th.External("a game"),
        ...     th.Space(skill=th.Float(0.0, 1.0)),
        ...     algorithm=th.ASHA(max_epochs=9, num_trials=9),
        ...     metric="score",
        ...     storage="sqlite://",
        ...     name="game",
        ... )
        >>> while trial := study.ask():
        ...     while study.tell(trial, trial.epoch * trial.config["skill"]):
        ...         pass
        >>> max(trial.epochs for trial in study.trials)
        9
        """
        if self._asking is None or not hasattr(trial, "resume"):
            raise UsageError(
                f"tell({trial!r}, ...) without a trial; tell what ask() has returned, unless that "
                "is None"
            )
        if (metrics is None) == (error is None):
            raise UsageError("tell() takes the metrics of a trial, or the error it has failed with")
        if error is not None and user_attrs is not None:
            raise UsageError(
                "tell(error=..., user_attrs=...): attributes are stored with the metrics of an "
                "epoch, and a failed trial has none; leave user_attrs out"
            )
        attributes = {} if user_attrs is None else checked_attributes(user_attrs)
        if error is not None:
            self._asking.fail(trial, str(error))
            return False
        found = checked_metrics(metrics, needed=self.goals.names)
        return self._asking.tell(trial, found, attributes=attributes)


class Asking:
    """The run of a study that is asked, from its first question to its end.

    Args:
        run: Runs the study with an executor, until all trials have ended.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        self._run = run
        self._told = AskTell(opened=[])
        self._error: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._train, name="thrifty-asked", daemon=True)
        self._thread.start()
        atexit.register(_end, weakref.ref(self))

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended yet."""
        return self._thread.is_alive()

    def ask(self, *, wait: bool) -> AskedTrial | None:
        """Return the next trial to train; None if the study is done, or has none now."""
        executor = self._executor()
        found = None if executor is None else executor.ask(wait=wait)
        if found is None:
            self._end_if_over(executor)
        return found

    def tell(
        self, asked: AskedTrial, metrics: Mapping[str, float], *, attributes: Mapping[str, Any]
    ) -> bool:
        """Take the metrics and attributes of an epoch; return whether the trial goes on."""
        executor = self._executor()
        assert executor is not None
        more = executor.tell(asked, metrics, attributes=attributes)
        self._end_if_over(executor)
        return more

    def fail(self, asked: AskedTrial, error: str) -> None:
        """Take note that a trial has failed."""
        executor = self._executor()
        assert executor is not None
        executor.fail(asked, error)
        self._end_if_over(executor)

    def end(self) -> None:
        """End the run; what was told is kept."""
        executor = self._executor()
        if executor is not None:
            executor.was_stopped = True
        self._thread.join()

    def _executor(self) -> AskTellExecutor | None:
        """Return the executor; None if the run has ended without one."""
        while not self._told.opened and self._thread.is_alive():
            self._is_ready.wait(0.01)
        self._raise()
        return self._told.opened[0] if self._told.opened else None

    def _train(self) -> None:
        try:
            self._run(executor=self._told)
        except BaseException as error:  # noqa: BLE001 (raised where the study is asked)
            self._error = error
        finally:
            for executor in self._told.opened:
                executor.close()

    def _end_if_over(self, executor: AskTellExecutor | None) -> None:
        """Wait for the end of a run that is over, and raise the error that has ended it."""
        if executor is None or executor.is_ended:
            self._thread.join()
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _end(asking: weakref.ref[Asking]) -> None:
    found = asking()
    if found is not None and found.is_running:
        found.end()
