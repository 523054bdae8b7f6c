"""One line for an Optuna objective: a study of it, with workers, a database and a dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from thrifty.core import StudyMismatchError, UsageError, plain_logger, with_advice
from thrifty.run import ExecutorConfig
from thrifty.search import Algorithm, KDESampler, RandomSearch, Sampler, StoppingASHA
from thrifty.space import Space
from thrifty.space._units import EPOCHS
from thrifty.store._reports import trials_text
from thrifty.study import Bound, Observer, StopWhen, Storage, Study, TrialResult

from ._objective import UNFINISHED, VALUE, WAITING, Objective, ObjectiveTask


logger = plain_logger(__name__)

Direction = Literal["minimize", "maximize"]
_MODES: Mapping[str, Literal["min", "max"]] = {"minimize": "min", "maximize": "max"}

_ARGUMENTS = {
    "mode": 'direction="minimize" or direction="maximize"',
    "study_name": "name=",
    "num_trials": "n_trials=",
    "n_jobs": "executor=th.Local(workers=...)",
    "workers": "executor=th.Local(workers=...)",
    "num_workers": "executor=th.Local(workers=...)",
    "pruner": "prune=True or prune=False",
    "callbacks": "observers=[...]",
    "show_progress_bar": "progress=",
}
"""What ``Study`` or other libraries call an argument of ``optimize``, and what to write."""


@with_advice(_ARGUMENTS)
def optimize(  # noqa: PLR0913 (Optuna's options, and those of a study)
    objective: Objective,
    *,
    n_trials: int,
    direction: Direction = "minimize",
    max_epochs: int = 1,
    timeout: float | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = Exception,
    enqueue: Sequence[Mapping[str, Any]] = (),
    sampler: Sampler | None = None,
    prune: bool = True,
    space: Space | None = None,
    name: str | None = None,
    storage: Storage | str = "sqlite:///thrifty.db",
    seed: int = 0,
    executor: ExecutorConfig | None = None,
    progress: bool = True,
    observers: Sequence[Observer] = (),
) -> Study:
    """Run an Optuna objective as it is: a function of a trial that returns a number.

    The objective may use ``trial.suggest_*``, ``report``, ``should_prune``, ``params``, ``number``,
    ``user_attrs`` and ``set_user_attr``, and raise ``optuna.TrialPruned``; ``log_artifact(path)``
    keeps a copy of a file. Its hyper-parameters are found by running it until it trains, once for
    each value that may decide what it suggests, in processes that are then ended. Give a ``space``
    if it must not be run more often than there are trials.

    The best trial is the best of those whose objective has returned a value. Workers, the database,
    the dashboard and resuming work as for any study, and a configuration
    that comes again is not trained again. But nothing else is shared: an objective cannot go on
    from a state. A training function can, and needs few changes; see ``thrifty.trainable``.

    Args:
        objective: The function.
        n_trials: How many trials there are in all; a study that has fewer goes on.
        direction: Whether to minimise or maximise its value.
        max_epochs: How often a trial reports. If it is 1, reports are not compared, and no trial is
            pruned.
        timeout: Stop after this many seconds, at the next reports.
        catch: Errors that only make a trial fail; another one ends the study.
        enqueue: Configurations that are tried first.
        sampler: Where configurations come from (default: ``KDESampler()``).
        prune: Whether trials are stopped that are not among the best third of those that have
            reported as often, as ``StoppingASHA`` does.
        space: The hyper-parameters, if they are not to be looked for.
        name: The study's name (default: that of the objective). Another search in the same database
            whose function has the same name needs a name of its own.
        storage: A database address, or a ``Storage``.
        seed: The seed of sampling, and of all random streams before each trial.
        executor: What trains it (default: ``thrifty.Local()``, this process).
        progress: Whether to show progress.
        observers: Observers of the run, such as loggers.

    Returns:
        The study; ``study.best_trial`` and everything else is there.

    Raises:
        UsageError: An argument is invalid.
        StudyMismatchError: The database has a different study of this name.
        TaskError: The objective fails before it suggests anything.
        StateError: It has raised an error that ``catch`` does not have.

    >>> import thrifty as th
    >>> def objective(trial):
    ...     x = trial.suggest_float("x", -1.0, 1.0)
    ...     return (x - 0.3) ** 2
    >>> study = th.optimize(objective, n_trials=20, storage="sqlite://", progress=False)
    >>> study.best_trial.value < 0.1
    True
    """
    kinds = _checked(objective, direction=direction, catch=catch)
    n_trials = _whole_number(
        "n_trials", n_trials, why="to search for some time, give a large number, and timeout="
    )
    max_epochs = _whole_number(
        "max_epochs", max_epochs, why="it is how often a trial reports; leave it out if none does"
    )
    task = ObjectiveTask(objective, num_epochs=max_epochs, catch=kinds)
    study = Study(
        task,
        space,
        algorithm=_algorithm(
            max_epochs, n_trials, sampler=KDESampler() if sampler is None else sampler, prune=prune
        ),
        metric=VALUE,
        mode=_MODES[direction],
        constraints=None if max_epochs == 1 else {UNFINISHED: Bound("in_the_end", 0.0)},
        storage=storage,
        name=task.name.replace("<", "").replace(">", "") if name is None else name,
        seed=seed,
    )
    for config in enqueue:
        study.enqueue_trial(config)
    try:
        study.run(
            executor=executor,
            stop=None if timeout is None else StopWhen(seconds=timeout),
            progress=progress,
            observers=observers,
        )
    except StudyMismatchError as error:
        if name is not None:
            raise
        raise StudyMismatchError(
            f"th.optimize names its study after the function, and a different study {study.name!r} "
            "is stored already. If this is another search, give it a name of its own: "
            f'th.optimize({study.name}, name="NAME", ...). {error}'
        ) from None
    finally:
        WAITING.end_all()
    _say(what_would_be_shared(study.trials, max_epochs=max_epochs), progress=progress)
    return study


def _say(text: str, *, progress: bool) -> None:
    """Print a line on the terminal, or log it."""
    if progress:
        Console(stderr=True).print(Text(text), soft_wrap=True)
    else:
        logger.info("%s", text)


def _checked(objective: object, *, direction: object, catch: Any) -> tuple[type[Exception], ...]:
    """Check arguments of ``optimize``, and return the errors to catch as a tuple."""
    if not callable(objective):
        raise UsageError(f"optimize({objective!r}): give a function of a trial")
    if direction not in _MODES:
        raise UsageError(f'optimize(direction={direction!r}): it is "minimize" or "maximize"')
    kinds = catch if isinstance(catch, tuple) else (catch,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise UsageError(f"optimize(catch={catch!r}): give an exception class, or several")
    return kinds


def _whole_number(name: str, value: object, *, why: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise UsageError(f"optimize({name}={value!r}): give a whole number, 1 or more; {why}")
    return int(value)


def what_would_be_shared(trials: Sequence[TrialResult], *, max_epochs: int) -> str:
    """Return what a training function would share that an objective cannot."""
    stopped = [trial.epochs for trial in trials if 0 < trial.epochs < max_epochs]
    lost = ""
    if stopped:
        were, total = "was" if len(stopped) == 1 else "were", EPOCHS.short(sum(stopped))
        together = "" if len(stopped) == 1 else " in all"
        lost = (
            f"{trials_text(len(stopped))} {were} stopped, after {total}{together}, and cannot go "
            "on. "
        )
    return (
        f"{lost}An objective has no state, so its trials share nothing. As a training function "
        "(@th.trainable, `for epoch in trial.epochs(state)`, and a yield instead of a report) they "
        "could go on later, and equal beginnings would be trained once"
    )


def _algorithm(max_epochs: int, num_trials: int, *, sampler: Sampler, prune: bool) -> Algorithm:
    if prune and max_epochs != 1:
        return StoppingASHA(max_epochs=max_epochs, num_trials=num_trials, sampler=sampler)
    return RandomSearch(max_epochs=max_epochs, num_trials=num_trials, sampler=sampler)
