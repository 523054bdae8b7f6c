"""The task to train on rented machines, timed on this one. This module imports torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thrifty.cli._train import load_study
from thrifty.core import TaskError, ThriftyError, UsageError, error_text, plain_text
from thrifty.hetero import HeteroTask, profile_step
from thrifty.hetero.balance._profile import DISTURBED
from thrifty.pack import (
    HyperParameters,
    Source,
    Task,
    borrowed_streams,
    check_usual_step,
    open_source,
    optimizer_of,
)
from thrifty.pack.task._data import steps_of as steps_per_pass
from thrifty.perf import StepProfile
from thrifty.space import Timeline
from thrifty.study import Study


_PARTS = (8, 4, 2, 1)
"""The parts of the global batch to time, because it is split among devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTask:
    """A task and the hyper-parameters to profile it with.

    Attributes:
        task: A plain task.
        values: Values of its hyper-parameters.
        study: The study of the task; None if the file defines no study.
    """

    task: Task
    values: Mapping[str, Any]
    study: Study | None

    @property
    def batch_size(self) -> int:
        """Number of samples per step.

        Raises:
            UsageError: It follows a hyper-parameter that has no value.
        """
        size = self.task.batch_size
        if isinstance(size, str) and size not in self.values:
            raise UsageError(
                f"the task's batch_size follows hyper-parameter {size!r}: give --hp {size}=32, or "
                "--batch"
            )
        with self._user_code("its batch size"):
            return int(self.values[size] if isinstance(size, str) else size)

    def source(self) -> Source:
        """Open the task's data on the profiled device.

        Raises:
            TaskError: The task's own code has failed.
        """
        with borrowed_streams(), self._user_code("its data"):
            return open_source(self.task.data(HyperParameters(self.values)), device=_device())

    def profile(self, source: Source, *, batch: int, cache: Path) -> StepProfile:
        """Time a step with several parts of the given batch size.

        Raises:
            TaskError: The task's own code has failed, or its steps cannot be timed here.
        """
        check_usual_step(self.task, where="thrifty rent", counts_steps=True)
        hp = HyperParameters(self.values)
        with borrowed_streams(), self._user_code("its model"):
            model = self.task.model(hp).to(_device()).train()
        with self._user_code("its optimizer"):
            optimizer = optimizer_of(self.task, hp).build(model.named_parameters(), self.values)
        sizes = {min(-(-batch // part), source.num_train) for part in _PARTS}
        with self._user_code("a step"), _without_its_warning():
            return profile_step(
                model,
                optimizer,
                batches_of(source),
                loss=self.task.loss,
                batches=sorted(sizes),
                cache=cache,
            )

    @contextmanager
    def _user_code(self, what: str) -> Iterator[None]:
        try:
            yield
        except ThriftyError:
            raise
        except Exception as error:
            raise TaskError(
                f"{type(self.task).__name__} cannot be timed with {plain_text(self.values)}: "
                f"{what} failed with {error_text(error)}; change the task, or give other values "
                "with --hp NAME=VALUE"
            ) from error


@contextmanager
def _without_its_warning() -> Iterator[None]:
    """Drop the warning that the machine is busy: the notes of ``thrifty rent`` say that."""
    log = logging.getLogger("thrifty.hetero")

    begin, _, _ = DISTURBED.partition("%")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(begin)

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def load_subject(file: Path, *, name: str | None, hp: Mapping[str, Any]) -> ProfiledTask:
    """Load the study or the task that a file defines.

    Args:
        file: A Python file.
        name: Selects one of several studies, or one of several tasks by its variable or class.
        hp: Values of hyper-parameters. Others take the first value in the study's space.

    Raises:
        UsageError: The file defines none or several, or one of a kind that cannot be profiled.
    """
    try:
        study = load_study(file, name=name)
    except UsageError:
        module = sys.modules.get(file.stem)
        found = {} if module is None else vars(module)
        tasks = _tasks(found, name)
        if not tasks or (name is None and any(isinstance(v, Study) for v in found.values())):
            raise
        if len(tasks) > 1:
            raise UsageError(
                f"{file} defines several tasks ({', '.join(tasks)}); pick one with --name"
            ) from None
        return ProfiledTask(task=_plain(next(iter(tasks.values()))), values=dict(hp), study=None)
    config = {**next(study.space.grid(levels=1)), **hp}
    values = Timeline(config, epochs=study.algorithm.max_epochs).at(0)
    return ProfiledTask(task=_plain(study.task), values=values, study=study)


def batches_of(source: Source) -> Callable[[int], Any]:
    """Return a function that makes a batch of the given number of training samples.

    It makes batches one after the other, so that a loader is started only once.
    """
    going: dict[int, Iterator[Any]] = {}

    def batches(num: int) -> Iterator[Any]:
        while steps_per_pass(source, num):  # an error says that a pass has none
            yield from source.train_batches(seed=0, epoch=0, batch_size=num)

    def make(num: int) -> Any:
        if source.arrays is not None:
            return tuple(array[:num] for array in source.arrays)
        return next(going.setdefault(num, batches(num)))

    return make


def steps_of(task: Task, source: Source, batch: int) -> int:
    """Return the number of steps of an epoch."""
    return task.steps_per_epoch or steps_per_pass(source, batch)


def _tasks(found: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Return the tasks of a module by their names: instances, or else classes."""
    named = {
        key: value
        for key, value in found.items()
        if (name in {None, key}) and not key.startswith("_")
    }
    instances = {key: value for key, value in named.items() if isinstance(value, Task)}
    home = found.get("__name__")
    return instances or {
        key: value
        for key, value in named.items()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == home
    }


def _plain(task: Any) -> Task:
    if isinstance(task, HeteroTask):
        return task.task
    if isinstance(task, type):
        try:
            made: Task = task()
            return made
        except TypeError as error:
            raise UsageError(
                f"{task.__name__} cannot be made without arguments ({error}); write `task = "
                f"{task.__name__}(...)` at the file's top level"
            ) from error
    if isinstance(task, Task):
        return task
    raise UsageError(
        f"{type(task).__name__} owns its training loop, so its steps cannot be timed here; give "
        "--profile, --steps and --batch"
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
