"""API responses about single trials: the table, and a trial's own page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.core import plain_text
from thrifty.store import Order, StudyView, TrialFilter, Views

from . import _models as models
from ._columns import texts
from ._forest import StageForest
from ._models import finite
from ._schedule import lines
from ._studies import max_epochs


_OTHERS = 8
"""Maximum number of listed trials that share a stage."""


def table(
    views: Views,
    view: StudyView,
    which: TrialFilter,
    *,
    sort: str,
    order: Order,
    offset: int,
    limit: int,
) -> models.Trials:
    """Return a page of the table of trials."""
    rows = views.trials.page(view.id, which, sort=sort, order=order, offset=offset, limit=limit)
    names = dict.fromkeys(view.spec.get("space", {}))
    for row in rows:
        names.update(dict.fromkeys(row.config))
    return models.Trials(
        names=list(names),
        metrics=list(view.metrics),
        trials=[_row(row, view) for row in rows],
        total=views.trials.count(view.id, which),
    )


def trial(views: Views, view: StudyView, row: Any, *, forest: StageForest) -> models.Trial:
    """Return one trial with its schedule, its curves and the trials that share its stages."""
    epochs = max(max_epochs(view) or 0, row.target, 1)
    paths = views.plans.paths(view.plan, [row.node])
    places = _places(forest, paths.origins, row)
    kind, message, traceback = (
        plain_text(text, lines=True) for text in row.error or ("", "", "")
    )
    stages = [_stage(forest, place, number=row.number) for place in places]
    return models.Trial(
        **_row(row, view).model_dump(exclude={"config"}),
        error=f"{kind}: {message}" if message else kind,
        traceback=traceback,
        parent=row.parent,
        schedule=lines(row.config, epochs=epochs),
        curves=_curves(paths.curve(row.node, row.reached)),
        stages=stages,
        shared_epochs=sum(s.stop - s.start for s in stages if s.trials > 1),
    )


def _row(row: Any, view: StudyView) -> models.TrialRow:
    values = row.objectives or {}
    return models.TrialRow(
        number=row.number,
        state=state_of(row, view),
        value=finite(row.value),
        values={name: finite(values.get(name)) for name in view.metrics[1:]},
        reached=row.reached,
        target=row.target,
        violation=finite(row.violation),
        config=texts(row.config),
    )


def state_of(row: Any, view: StudyView) -> str:
    """Return the state as in ``Study.trials``: a waiting trial is done or paused."""
    if row.state != "waiting":
        return str(row.state)
    farthest = max_epochs(view)
    return "done" if farthest is not None and row.reached >= farthest else "paused"


def _curves(
    points: Sequence[tuple[int, Mapping[str, float]]],
) -> dict[str, list[tuple[int, float | None]]]:
    names = dict.fromkeys(name for _, metrics in points for name in metrics)
    return {
        name: [(epoch, finite(metrics.get(name))) for epoch, metrics in points]
        for name in names
    }


def _places(
    forest: StageForest, origins: Mapping[int, tuple[int | None, int]], row: Any
) -> list[int]:
    stop = row.target if row.state == "running" else row.reached
    node: int | None = row.node
    while node is not None and node in origins and stop <= origins[node][1]:
        node = origins[node][0]
    return [] if node is None else forest.path(node, stop)


def _stage(forest: StageForest, place: int, *, number: int) -> models.TrialStage:
    stage = forest.stages[place]
    some = forest.some_trials(place, limit=_OTHERS + 1)
    return models.TrialStage(
        node=stage.node,
        start=stage.start,
        stop=stage.stop,
        trials=stage.trials,
        others=[other for other in some if other != number][:_OTHERS],
    )
