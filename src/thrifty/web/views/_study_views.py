"""API responses about studies as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thrifty.store import StudyView, Views

from . import _models as models
from ._columns import texts
from ._models import finite
from ._space_view import parameters


def study_list(views: Views) -> models.StudyList:
    """Return all studies."""
    return models.StudyList(studies=[card(view) for view in views.studies.list()])


def card(view: StudyView) -> models.StudyCard:
    """Return the summary of a study."""
    return models.StudyCard(
        id=view.id,
        name=view.name,
        state=view.state,
        task=view.task,
        metrics=list(view.metrics),
        modes=list(view.modes),
        created_at=view.created_at,
        last_activity=view.last_activity,
        trials=dict(view.num_trials),
        num_trials=sum(view.num_trials.values()),
        epochs=_saving(view),
        seconds=view.seconds,
        best_value=finite(view.best_value),
        best_trial=view.best_trial,
    )


def detail(views: Views, view: StudyView) -> models.StudyDetail:
    """Return one study: its definition and its best trial."""
    spec = view.spec
    best = None if view.best_trial is None else views.trials.get(view.id, view.best_trial)
    return models.StudyDetail(
        study=card(view),
        algorithm=str(spec.get("algorithm", "")),
        seed=_whole(spec.get("seed")),
        max_epochs=max_epochs(view),
        constraints=_constraints(spec.get("constraints", {})),
        space=parameters(spec.get("space", {})),
        best_config={} if best is None else texts(best.config),
        best_epochs=None if best is None else best.reached,
    )


def history(views: Views, view: StudyView, *, limit: int) -> models.History:
    """Return the values of trials and the best so far.

    All improvements are included, and a subsample of about ``limit`` of all trials.
    """
    found = views.samples.values(view.id)
    sign = -1.0 if view.modes[0] == "min" else 1.0
    best = -math.inf
    improved: list[tuple[int, float]] = []
    for number, value, counts in found:
        if counts and math.isfinite(value) and sign * value > best:
            best = sign * value
            improved.append((number, value))
    every = math.ceil(len(found) / limit) if found else 1
    shown = found[::every]
    return models.History(
        metric=view.metrics[0],
        mode=view.modes[0],
        trials=[number for number, _, _ in shown],
        values=[finite(value) for _, value, _ in shown],
        best_trials=[number for number, _ in improved],
        best_values=[value for _, value in improved],
        shown=len(shown),
        total=len(found),
    )


def max_epochs(view: StudyView) -> int | None:
    """Return the maximum number of epochs of a trial."""
    return _whole(view.spec.get("max_epochs"))


def _saving(view: StudyView) -> models.Saving:
    reached, trained = view.reached_epochs, view.trained_epochs
    return models.Saving(
        reached=reached,
        trained=trained,
        # Epochs of running trials are trained, but not yet reached.
        saved=max(0, reached - trained),
        factor=max(1.0, reached / trained) if trained else None,
    )


def _constraints(bounds: Mapping[str, Any]) -> list[str]:
    signs = {"at_most": "<=", "at_least": ">="}
    return [
        f"{name} {signs.get(side, side)} {limit:g}" for name, (side, limit) in bounds.items()
    ]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
