"""Data of trials and their schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.core import ThriftyError, plain_text
from thrifty.space import Schedule, Timeline, config_from_json
from thrifty.store import Order, StudyView, TrialFilter, Views

from . import _models as models
from ._columns import texts
from ._forest_view import StageForest
from ._models import Line, finite
from ._study_views import max_epochs


_MAX_POINTS = 240
_MAX_STEPS = 8


def lines(config: Mapping[str, Any], *, epochs: int) -> list[Line]:
    """Return a line per hyper-parameter of a JSON configuration, those that change first.

    >>> from thrifty.space import Step, config_to_json
    >>> found = lines(config_to_json({"width": 64, "lr": Step(0.5, [2], gamma=0.5)}), epochs=4)
    >>> [(line.name, line.text, line.moves, sorted(set(line.values))) for line in found]
    [('lr', 'Step(0.5, (2,), gamma=0.5)', True, [0.25, 0.5]), ('width', '64', False, [64.0])]
    """
    try:
        read = config_from_json(config)
        timeline = Timeline(read, epochs=max(epochs, 1))
        drawn = [_line(timeline, name, value) for name, value in read.items()]
    except (ThriftyError, TypeError, KeyError, ValueError):
        # This version does not know the kind: show the value as stored.
        drawn = [_still(name, value) for name, value in config.items()]
    return sorted(drawn, key=lambda line: not line.moves)


def _still(name: str, value: Any) -> Line:
    number = finite(value)
    return Line(
        name=name,
        text=str(value),
        kind="text" if number is None else "number",
        moves=False,
        epochs=[0.0],
        values=[str(value) if number is None else number],
    )


def _line(timeline: Timeline, name: str, value: Any) -> Line:
    if not isinstance(value, Schedule):
        return _still(name, value)
    steps = max(1, min(_MAX_STEPS, _MAX_POINTS // timeline.epochs))
    every = max(1, timeline.epochs // _MAX_POINTS)
    at: list[float] = []
    values: list[Any] = []
    for epoch in range(0, timeline.epochs, every):
        within = timeline.values(name, epoch, num_steps=steps)
        spread = within if isinstance(within, list) else [within] * steps
        at.extend(epoch + step / steps for step in range(steps))
        values.extend(spread)
    numeric = all(finite(v) is not None for v in values)
    shown = [finite(v) if numeric else str(v) for v in values]
    return Line(
        name=name,
        text=str(value),
        kind="number" if numeric else "text",
        moves=len(set(shown)) > 1,
        epochs=at,
        values=shown,
    )


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
