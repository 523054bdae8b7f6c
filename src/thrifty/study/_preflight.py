"""Before a study trains: checks of its arguments, and trials that it is given."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from thrifty.core import (
    AlgorithmError,
    SpaceError,
    StudyMismatchError,
    TaskError,
    UsageError,
    derive_seed,
    error_text,
    plain_logger,
    plain_text,
)
from thrifty.core._determinism import STREAMS
from thrifty.pack import (
    TRAIN_LOSS,
    Optimizer,
    Optimizers,
    SelfDescribing,
    Task,
    TaskReport,
    Trainable,
    inspect_task,
)
from thrifty.pack._backend import no_exits
from thrifty.pack.task._task import options_of
from thrifty.pack.trial._trial import check_batches
from thrifty.run import ExecutorConfig
from thrifty.search import Algorithm, Trial
from thrifty.space import Choice, Coordinates, Domain, Space, Timeline
from thrifty.store import PriorRecord
from thrifty.store._reports import trials_text

from ._goals import Goals
from ._ledger import Ledger
from ._loop import StopWhen


MAX_NAME = 255
MAX_SEED = 2**63 - 1


def checked_name(name: object) -> str:
    """Return the name of a study after checking it.

    Raises:
        UsageError: The name is not a string, is empty or too long, or has characters that a
            database cannot store.
    """
    if not isinstance(name, str):
        raise UsageError(f"name is {name!r}; it must be a text such as 'digits'")
    if not name.strip():
        raise UsageError(f"name is {name!r}; give the study a name such as 'digits'")
    if len(name) > MAX_NAME:
        raise UsageError(f"name has {len(name):,} characters; it may have at most {MAX_NAME}")
    if "\0" in name or not _is_encodable(name):
        raise UsageError(
            f"name is {name!r}; it must not have NULs or characters that UTF-8 cannot encode"
        )
    return name


def checked_seed(seed: object) -> int:
    """Return the seed of a study as an int after checking it.

    Raises:
        UsageError: The seed is not an integer from 0 to 2**63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UsageError(f"seed is {seed!r}; it must be an integer, 0 or more")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed is {seed}; it must be from 0 to 2**63 - 1 ({MAX_SEED:,})")
    return int(seed)


MAX_SEEDS = 1000


def checked_seeds(seeds: object) -> int:
    """Return the number of seeds of a study as an int after checking it.

    Raises:
        UsageError: It is not an integer from 1 to ``MAX_SEEDS``.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int | np.integer):
        raise UsageError(
            f"seeds is {seeds!r}; it must be the number of seeds of each configuration, an integer"
        )
    if not 1 <= seeds <= MAX_SEEDS:
        raise UsageError(f"seeds is {seeds}; it must be from 1 to {MAX_SEEDS:,}")
    return int(seeds)


def check_max_epochs(algorithm: Algorithm) -> None:
    """Raise AlgorithmError unless ``max_epochs`` is a positive integer."""
    epochs = getattr(algorithm, "max_epochs", None)
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise AlgorithmError(
            f"{type(algorithm).__name__}.max_epochs is {epochs!r}; it must be an integer, 1 or more"
        )


def check_horizons(algorithm: Algorithm, space: Space) -> None:
    """Raise AlgorithmError if the space has horizons that the algorithm does not follow."""
    if space.has_horizons and not algorithm.follows_horizons:
        name = type(algorithm).__name__
        raise AlgorithmError(
            f"{name} compares trials after the same number of epochs, but those of a "
            f"{type(space).__name__} end at horizons of their own: some have cooled down where "
            "others have not; use GridSearch or RandomSearch"
        )


_refusal: ContextVar[str] = ContextVar("_refusal", default="")


@contextmanager
def refused_runs(message: str) -> Iterator[None]:
    """Let ``Study.run`` raise a UsageError with this message instead of training.

    Commands load a user's file with it if they are not there to train.
    """
    before = _refusal.set(message)
    try:
        yield
    finally:
        _refusal.reset(before)


def refusal() -> str:
    """Return why no study may train now; empty if one may."""
    return _refusal.get()


def check_run(executor: object, stop: object, observers: object) -> None:
    """Raise UsageError for arguments of ``Study.run`` of the wrong kind."""
    if executor is not None and not isinstance(executor, ExecutorConfig):
        raise UsageError(f"executor is {executor!r}; give one such as thrifty.Local(workers=2)")
    if stop is not None and not isinstance(stop, StopWhen):
        raise UsageError(f"stop is {stop!r}; give thrifty.StopWhen(epochs=...) or the like")
    if not isinstance(observers, Iterable) or not all(
        callable(getattr(observer, "on_event", None)) for observer in observers
    ):
        raise UsageError(
            f"observers is {observers!r}; give a list of objects with a method on_event(event)"
        )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


logger = plain_logger(__name__)


def check_arguments(task: object, space: object, *, algorithm: object) -> None:
    """Raise UsageError for arguments of the wrong kind."""
    if inspect.isfunction(task):
        raise UsageError(
            f"task is the function {task.__name__}; put @thrifty.trainable above it, so that it is "
            "a task"
        )
    for value, kind, name, wanted in (
        (task, Task | Trainable, "task", "an instance of your thrifty.Task or thrifty.Trainable"),
        (space, Space, "space", "a search space, such as thrifty.Space(lr=0.1)"),
        (
            algorithm,
            Algorithm,
            "algorithm",
            "a search algorithm, such as thrifty.Hyperband(max_epochs=81)",
        ),
    ):
        if isinstance(value, type):
            raise UsageError(
                f"{name} is the class {value.__name__}; give an instance: {_call_of(value)}"
            )
        knows_space = name == "space" and value is None and isinstance(task, SelfDescribing)
        if not isinstance(value, kind) and not knows_space:
            got = "None" if value is None else f"of type {type(value).__name__}"
            raise UsageError(f"{name} is {got}; give {wanted}")


def _call_of(kind: type) -> str:
    """Return how an instance of a class is made, with its required arguments.

    >>> from thrifty.search import GridSearch
    >>> _call_of(GridSearch)
    'GridSearch(max_epochs=...)'
    """
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # some classes of extension modules have none
        return f"{kind.__name__}(...)"
    words = [
        f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name
        for each in signature.parameters.values()
        if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    return f"{kind.__name__}({', '.join(words)})"


@STREAMS.used("a study")
def check_study(
    task: Task | Trainable,
    space: Space,
    *,
    algorithm: Algorithm,
    goals: Goals,
    seed: int,
    devices: Iterable[str] = (),
) -> tuple[TaskReport | None, str]:
    """Check that space, task, algorithm and metrics fit together.

    Args:
        task: The task.
        space: The search space.
        algorithm: The algorithm.
        goals: The metrics.
        seed: The study's seed.
        devices: The devices of this machine on which trials will be trained, as far as is known.

    Returns:
        The report of a dry run, and its error. There is no report for a trainable, and none if the
        dry run failed.

    Raises:
        UsageError: They do not fit together.
    """
    if algorithm.max_epochs < 1:
        raise AlgorithmError(f"max_epochs is {algorithm.max_epochs}; it must be at least 1")
    space.check(max_epochs=algorithm.max_epochs)
    if isinstance(task, Trainable):
        return None, ""
    _check_names(task, space)
    _check_parts(task, space, max_epochs=algorithm.max_epochs, seed=seed)
    config = space.sample(np.random.default_rng(seed))
    timeline = Timeline(config, epochs=space.horizon_of(config) or algorithm.max_epochs)
    moving = _moving(space, algorithm)
    try:
        with no_exits():
            report = inspect_task(
                task, timeline.at(0), seed=seed, moving=moving, train_devices=devices
            )
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 (maybe only this configuration fails)
        logger.info("the dry run of %s failed: %s", plain_text(config), error_text(error))
        return None, error_text(error)
    goals.check({*report.metrics, TRAIN_LOSS})
    _check_averages(task, space, goals=goals, known=report.metrics)
    for name in sorted(moving & config.keys() - report.structural - report.followed):
        logger.warning(
            "%r has a schedule, but %s does not read it; name it in the optimizer or read it "
            "in adapt",
            name,
            type(task).__name__,
        )
    unread = report.unread - moving
    _warn_of_unread(task, space, unread=unread, max_epochs=algorithm.max_epochs, seed=seed)
    return report, ""


_MAX_OTHERS = 12
"""The number of other configurations that are tried where something is not read in one.

Where more are needed to see each option of each choice, nothing is said.
"""
_MAX_SECONDS = 5.0
"""How long they may take together; nothing is said if models take longer to make."""


def _warn_of_unread(
    task: Task, space: Space, *, unread: Collection[str], max_epochs: int, seed: int
) -> None:
    """Warn of hyper-parameters that are tuned, and that the task reads in no configuration.

    Those that are there under a condition may be read in other configurations.
    """
    names = {
        name
        for name in unread
        if isinstance(space[name], Domain) and space[name].size() > 1 and not space[name].conditions
    }
    others = list(_other_configs(space, seed=seed)) if names else []
    if len(others) > _MAX_OTHERS:
        return
    num_tried, began = 1, time.perf_counter()
    for config in others:
        if time.perf_counter() - began > _MAX_SECONDS:
            return
        timeline = Timeline(config, epochs=space.horizon_of(config) or max_epochs)
        try:
            with no_exits():
                names &= inspect_task(task, timeline.at(0), seed=seed).unread
        except Exception:  # noqa: BLE001 (maybe only this configuration fails)
            continue
        num_tried += 1
    for name in sorted(names):
        logger.warning(
            "%s reads %r in none of %d configurations that were tried; if trials that differ in it "
            "alone train the same thing, read it in the task (hp.%s), or take it out of the space",
            type(task).__name__,
            name,
            num_tried,
            name,
        )


def _other_configs(space: Space, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield configurations in which choices have other options than in those before, if any."""
    seen: set[tuple[str, str]] = set()
    for place in range(_NUM_PROBED):
        config = space.sample(np.random.default_rng(derive_seed(seed, "unread", place)))
        chosen = {(n, repr(v)) for n, v in config.items() if isinstance(space[n], Choice)}
        if place == 0 or not chosen <= seen:
            yield config
        seen |= chosen


_NUM_PROBED = 64


def _check_parts(task: Task, space: Space, *, max_epochs: int, seed: int) -> None:
    """Check the parts of batches in each epoch of some configurations.

    Raises:
        TaskError: The number of parts does not divide the batch size in one of them.
    """
    options = options_of(task)
    named = [name for name in (task.batch_size, options.accumulate) if isinstance(name, str)]
    if options.accumulate == 1 or not named:
        return
    rng = np.random.default_rng(seed)
    configs = [space.sample(rng) for _ in range(_NUM_PROBED)]
    for config in {repr([c.get(name) for name in named]): c for c in configs}.values():
        timeline = Timeline(config, epochs=space.horizon_of(config) or max_epochs)
        for epoch in range(timeline.epochs if timeline.moving() else 1):
            check_batches(task, options, timeline.at(epoch))


def _check_averages(
    task: Task | Trainable, space: Space, *, goals: Goals, known: Collection[str]
) -> None:
    """Raise TaskError unless the task has the averages by which the space judges trials."""
    for average in space.averages:
        for name in goals.names:
            if f"{average}_{name}" not in known:
                raise TaskError(
                    f"Ladder(averages={average!r}) needs the metric '{average}_{name}', which "
                    f"{type(task).__name__} does not have; give it average = "
                    f"thrifty.{average.upper()}(...), or leave averages out"
                )


def _check_names(task: Task, space: Space) -> None:
    followed: Iterable[str] = ()
    if isinstance(getattr(task, "optimizer", None), Optimizer | Optimizers):
        followed = task.optimizer.names()
    elif not callable(getattr(task, "optimizer", None)) or isinstance(task.optimizer, type):
        given = getattr(task, "optimizer", None)
        has = (
            "no optimizer"
            if given is None
            else f"optimizer = {given!r}, which is neither an optimizer of thrifty nor a method"
        )
        raise TaskError(
            f"{type(task).__name__} has {has}; set one, such as "
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


def check_goals(goals: Goals, *, source: str, theirs: Goals) -> None:
    """Raise StudyMismatchError unless an earlier study had the same objectives."""
    if (goals.metrics, goals.modes) != (theirs.metrics, theirs.modes):
        raise StudyMismatchError(
            f"warm_start: study {source!r} optimised {_said(theirs)}, this one {_said(goals)}; "
            "results of one say nothing about the other; leave warm_start out, or optimise the "
            "same metrics"
        )


def priors_of(ledger: Ledger, space: Space, *, source: str, goals: Goals) -> list[PriorRecord]:
    """Return the trials of an earlier study that the new study can learn from.

    They have reported or failed, and are of the new study's space.

    Raises:
        StudyMismatchError: The trials lack a metric that the new study needs.
    """
    coordinates = Coordinates(space)
    out: list[PriorRecord] = []
    num_skipped = 0
    for trial in ledger.history:
        if not trial.reached and trial.state != "failed":
            continue
        try:
            coordinates.values(trial.config)
        except SpaceError:
            num_skipped += 1
            continue
        curve = ledger.curve(trial.number)
        missing = [name for name in goals.names for metrics in curve if name not in metrics]
        if missing:
            raise StudyMismatchError(
                f"warm_start: the trials of study {source!r} have no metric {missing[0]!r}, which "
                "this study "
                "needs; leave the study out, or the constraint"
            )
        failed = trial.state == "failed"
        out.append(
            PriorRecord(
                config=trial.config,
                state="failed" if failed else "waiting",
                target=trial.target if failed else trial.reached,
                metrics=[{name: metrics[name] for name in goals.names} for metrics in curve],
            )
        )
    if num_skipped:
        logger.warning(
            "warm_start: %s of study %r %s not of this study's space and %s left out",
            trials_text(num_skipped),
            source,
            *(("is", "was") if num_skipped == 1 else ("are", "were")),
        )
    return out


def prior_trials(records: Iterable[PriorRecord], goals: Goals) -> Sequence[Trial]:
    """Return trials of earlier studies as algorithms see them, scored by the new study's goals."""
    return [_trial(number, record, goals) for number, record in enumerate(records)]


def _trial(number: int, record: PriorRecord, goals: Goals) -> Trial:
    metrics = record.metrics[-1] if record.metrics else None
    return Trial(
        number=number,
        config=record.config,
        target=record.target,
        reached=len(record.metrics),
        scores=tuple(goals.score(m) for m in record.metrics),
        state="failed" if record.state == "failed" else "waiting",
        objectives=() if metrics is None else goals.objectives(metrics),
        violation=0.0 if metrics is None else goals.violation(metrics),
    )


def _said(goals: Goals) -> str:
    return ", ".join(f"{m} ({mode})" for m, mode in zip(goals.metrics, goals.modes, strict=True))
