"""The table of a study's trials: the columns of data frames and of exported files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thrifty.space import TimeUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """What the table shows of one trial.

    Attributes:
        number: Number of the trial.
        state: Its state, as in ``Study.trials``.
        epochs: The epochs that it has reached.
        value: The first objective there; None before the first report.
        sd: The standard deviation of the value over seeds; None for one seed.
        objectives: All objectives by name.
        violation: By how much it breaks the constraints; None before the first report.
        metrics: All metrics of the task by name.
        error: Why it failed; empty if it has not.
        config: Its hyper-parameters.
        user_attrs: Its user attributes.
    """

    number: int
    state: str
    epochs: int
    value: float | None
    sd: float | None = None
    objectives: Mapping[str, float | None] = field(default_factory=dict)
    violation: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    user_attrs: Mapping[str, Any] = field(default_factory=dict)


def table_of(
    trials: Sequence[TableRow],
    *,
    objectives: Sequence[str],
    has_constraints: bool,
    num_seeds: int,
    unit: TimeUnit,
) -> list[dict[str, Any]]:
    """Return a dict for each trial, all with the same keys: the columns, in order.

    What a trial lacks is None.

    Args:
        trials: The trials.
        objectives: The metrics that the study optimises.
        has_constraints: Whether the study has constraints.
        num_seeds: The seeds of each configuration.
        unit: The unit in which the study counts what it trains.

    >>> from thrifty.space._units import EPOCHS
    >>> trial = TableRow(
    ...     number=0,
    ...     state="done",
    ...     epochs=4,
    ...     value=0.5,
    ...     metrics={"mse": 0.5, "train_loss": 1.0},
    ...     config={"lr": 0.1},
    ... )
    >>> list(
    ...     table_of([trial], objectives=["mse"], has_constraints=False, num_seeds=1, unit=EPOCHS)[
    ...         0
    ...     ]
    ... )
    ['number', 'state', 'epochs', 'value', 'metrics_train_loss', 'error', 'params_lr']
    """
    several = objectives if len(objectives) > 1 else ()
    names = dict.fromkeys(name for trial in trials for name in trial.metrics)
    others = [name for name in names if name not in objectives]
    params = dict.fromkeys(name for trial in trials for name in trial.config)
    attributes = dict.fromkeys(key for trial in trials for key in trial.user_attrs)
    return [
        {
            "number": trial.number,
            "state": trial.state,
            "epochs": trial.epochs,
            **({} if unit.is_epochs else {unit.name: unit.count(trial.epochs)}),
            "value": trial.value,
            **({"sd": trial.sd, "seeds": num_seeds} if num_seeds > 1 else {}),
            **{f"values_{name}": trial.objectives.get(name) for name in several},
            **({"violation": trial.violation} if has_constraints else {}),
            **{f"metrics_{name}": trial.metrics.get(name) for name in others},
            "error": trial.error,
            **{f"params_{name}": trial.config.get(name) for name in params},
            **{f"user_attrs_{key}": trial.user_attrs.get(key) for key in attributes},
        }
        for trial in trials
    ]
