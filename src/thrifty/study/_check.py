"""Checks that find errors before the first epoch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thrifty.core import (
    AlgorithmError,
    TaskError,
    UsageError,
    error_text,
    plain_logger,
    plain_text,
)
from thrifty.pack import TRAIN_LOSS, Optimizer, Task, TaskReport, Trainable, inspect_task
from thrifty.pack._backend import no_exits
from thrifty.search import Algorithm
from thrifty.space import Space, Timeline

from ._goals import Goals


logger = plain_logger(__name__)


def check_arguments(task: object, space: object, *, algorithm: object) -> None:
    """Raise UsageError for arguments of the wrong kind."""
    for value, kind, name in (
        (task, Task | Trainable, "task"),
        (space, Space, "space"),
        (algorithm, Algorithm, "algorithm"),
    ):
        if isinstance(value, type):
            raise UsageError(
                f"{name} is the class {value.__name__}; give an instance: {value.__name__}()"
            )
        if not isinstance(value, kind):
            raise UsageError(f"{name} is a {type(value).__name__}; it must be a {_name(kind)}")


def check_study(
    task: Task | Trainable, space: Space, *, algorithm: Algorithm, goals: Goals, seed: int
) -> TaskReport | None:
    """Check that space, task, algorithm and metrics fit together.

    Returns:
        The report of a dry run; None for a trainable, or if the dry run failed.

    Raises:
        UsageError: They do not fit together.
    """
    if algorithm.max_epochs < 1:
        raise AlgorithmError(f"max_epochs is {algorithm.max_epochs}; it must be at least 1")
    space.check(max_epochs=algorithm.max_epochs)
    if isinstance(task, Trainable):
        return None
    _check_names(task, space)
    config = space.sample(np.random.default_rng(seed))
    timeline = Timeline(config, epochs=algorithm.max_epochs)
    moving = _moving(space, algorithm)
    try:
        with no_exits():
            report = inspect_task(task, timeline.at(0), seed=seed, moving=moving)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 (maybe only this configuration fails)
        logger.warning("the dry run of %s failed: %s", plain_text(config), error_text(error))
        return None
    goals.check({*report.metrics, TRAIN_LOSS})
    for name in sorted(moving & config.keys() - report.structural - report.followed):
        logger.warning(
            "%r has a schedule, but %s does not read it; name it in the optimizer or read it "
            "in adapt",
            name,
            type(task).__name__,
        )
    return report


def _check_names(task: Task, space: Space) -> None:
    followed: Iterable[str] = ()
    if isinstance(getattr(task, "optimizer", None), Optimizer):
        followed = task.optimizer.names()
    elif not callable(getattr(task, "optimizer", None)) or isinstance(task.optimizer, type):
        raise TaskError(
            f"{type(task).__name__} has no optimizer; set one, such as "
            'optimizer = thrifty.SGD(lr="lr", momentum=0.9)'
        )
    batch_size = [task.batch_size] if isinstance(task.batch_size, str) else []
    for name in (*sorted(followed), *batch_size):
        if name not in space.names:
            where = "batch_size" if name in batch_size else "optimizer"
            raise TaskError(
                f"{type(task).__name__}.{where} follows hyper-parameter {name!r}, which the "
                "search space does "
                f"not have (it has: {', '.join(space.names)}); add it to the space or give a number"
            )


def _moving(space: Space, algorithm: Algorithm) -> frozenset[str]:
    """Return the hyper-parameters that change in training, by schedule or by the algorithm."""
    max_epochs = algorithm.max_epochs
    scheduled = {n for n in space.names if space.changes_over_time(n, max_epochs=max_epochs)}
    return frozenset(scheduled | set(algorithm.varied))


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind).replace("thrifty.pack._task.", ""))
