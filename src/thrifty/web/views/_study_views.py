"""API responses about studies, their search spaces, and their trials."""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.core import ThriftyError, plain_text
from thrifty.space import Schedule, Timeline, config_from_json
from thrifty.store import Order, StudyView, TrialFilter, Views
from thrifty.store._epoch_times import (
    attribute_text,
    interval,
    path_to,
    standard_deviation,
    stored_unit,
)
from thrifty.store._records import nodes_of_replicas
from thrifty.store._reports import num_stopped_in_training, shown_state, trials_by_state
from thrifty.store._trial_lines import last_epoch
from thrifty.store.queries._study_queries import Paths

from . import _models as models
from ._layouts import StageForest, texts
from ._models import Line, Parameter, finite


_MAX_LENGTH = 20_000
"""Longest record that is parsed; longer ones are shown as they are."""
_INTERVALS = {"Float": "real number", "Int": "whole number"}


def parameters(space: Mapping[str, Any]) -> list[Parameter]:
    """Return the hyper-parameters of a recorded space in words.

    >>> from thrifty.space import Float, Space
    >>> (found,) = parameters(Space(lr=Float(1e-4, 0.1, log=True)).to_json())
    >>> found.kind, found.options
    ('real number', ['0.0001 to 0.1 (log)'])
    """
    return [_parameter(str(name), str(domain)) for name, domain in space.items()]


def _parameter(name: str, domain: str) -> Parameter:
    try:
        if len(domain) > _MAX_LENGTH:
            raise ValueError
        node = ast.parse(domain, mode="eval").body
        kind, options, when = _kind(node), _options(node), _when(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Another version may have written the record: show it as it is.
        kind, options, when = "", [domain], ""
    return Parameter(name=name, domain=domain, kind=kind, options=options, when=when)


def _kind(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return "fixed"
    called = _called(node)
    return "choice" if called == "Choice" else _INTERVALS.get(called, "schedule")


def _options(node: ast.expr) -> list[str]:
    return [_text(option) for option in _choices(node)]


def _choices(node: ast.expr) -> list[ast.expr]:
    """Return the options of a choice; any other value is its only option."""
    if not isinstance(node, ast.Call) or _called(node) != "Choice":
        return [node]
    given = _arguments(node, ("options",)).get("options")
    return given.elts if isinstance(given, ast.Tuple | ast.List) else [node]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _text_of_call(node)
    if isinstance(node, ast.Tuple | ast.List):
        return f"[{', '.join(_text(item) for item in node.elts)}]"
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        return f"{node.value:.15g}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _text_of_call(node: ast.Call) -> str:
    called = _called(node)
    if called in _INTERVALS:
        return _interval(_arguments(node, ("low", "high")), default_step=called == "Int")
    if called == "Choice":
        options = _choices(node)
        return ast.unparse(node) if options == [node] else " or ".join(map(_text, options))
    given = [_text(each) for each in node.args]
    given += [f"{each.arg}={_text(each.value)}" for each in node.keywords]
    return f"{called}({', '.join(given)})"


def _interval(given: Mapping[str, ast.expr], *, default_step: bool) -> str:
    low, high = (_text(given[end]) if end in given else "?" for end in ("low", "high"))
    text = f"{low} to {high}"
    step = _constant(given.get("step"))
    if step is not None and not (default_step and step == 1):
        text += f" in steps of {_text(given['step'])}"
    return f"{text} (log)" if _constant(given.get("log")) is True else text


def _when(node: ast.expr) -> str:
    """Return the conditions of a domain, such as ``optimizer is sgd``."""
    if not isinstance(node, ast.Call):
        return ""
    conditions = _arguments(node, ()).get("conditions")
    if not isinstance(conditions, ast.Tuple | ast.List):
        return ""
    return " and ".join(_condition(each) for each in conditions.elts)


def _condition(node: ast.expr) -> str:
    given = _arguments(node, ("name", "values")) if isinstance(node, ast.Call) else {}
    values = given.get("values")
    if "name" not in given or not isinstance(values, ast.Tuple | ast.List):
        return ast.unparse(node)
    return f"{_text(given['name'])} is {' or '.join(_text(value) for value in values.elts)}"


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _arguments(node: ast.Call, names: tuple[str, ...]) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; ``names`` are those of positional ones."""
    given = dict(zip(names, node.args, strict=False))
    return {**given, **{each.arg: each.value for each in node.keywords if each.arg}}


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


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
        trials=trials_by_state(view.num_trials, num_done=view.num_done, study_state=view.state),
        stopped_in_training=num_stopped_in_training(view.num_trials, study_state=view.state),
        num_trials=sum(view.num_trials.values()),
        epochs=_saving(view),
        unit=unit_of(view),
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
        algorithm=_algorithm(spec),
        seed=_whole(spec.get("seed")),
        max_epochs=max_epochs(view),
        resume=_resume(view),
        constraints=_constraints(spec.get("constraints", {})),
        space=parameters(spec.get("space", {})),
        num_seeds=view.spec.get("seeds", 1),
        best_interval=None if best is None else _mean_interval(_seed_values(views, view, best)),
        best_config={} if best is None else texts(best.config),
        best_epochs=None if best is None else best.reached,
    )


def _resume(view: StudyView) -> str:
    """Return the command that goes on with a study; empty if none does.

    It does not name the database, whose address is not for all readers of the page.
    """
    if view.state not in ("stopped", "interrupted") or not view.spec.get("file"):
        return ""
    return shlex.join(["thrifty", "resume", *["--"] * view.name.startswith("-"), view.name])


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


def unit_of(view: StudyView) -> models.Unit:
    """Return the unit in which a study counts what it trains."""
    unit = stored_unit(view.spec)
    return models.Unit(name=unit.name, per_epoch=unit.per_epoch)


def _saving(view: StudyView) -> models.Saving:
    reached, trained = view.reached_epochs, view.trained_epochs
    return models.Saving(
        reached=reached,
        trained=trained,
        # Epochs of running trials are trained, but not yet reached.
        saved=max(0, reached - trained),
        factor=max(1.0, reached / trained) if trained else None,
    )


def _algorithm(spec: Mapping[str, Any]) -> str:
    """Return the algorithm as text, and why ``Auto`` has chosen it if it has."""
    text, auto = str(spec.get("algorithm", "")), spec.get("auto")
    return f"{text}, chosen by Auto: {auto['reason']}" if isinstance(auto, dict) else text


def _constraints(bounds: Mapping[str, Any]) -> list[str]:
    signs = {"at_most": "<=", "at_least": ">=", "in_the_end": "in the end <="}
    return [f"{name} {signs.get(side, side)} {limit:g}" for name, (side, limit) in bounds.items()]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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


_MAX_ATTRIBUTE = 4_000
"""Most characters of an attribute that are shown; the middle of a longer one is cut."""
_MAX_LINES = 200
"""Most log lines that are shown, the last ones."""
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
    epochs = max(row.horizon or max_epochs(view) or 0, row.target, 1)
    nodes = (row.node, *nodes_of_replicas(row.replicas))
    paths = views.plans.paths(view.plan, nodes)
    places = _places(forest, paths.origins, row)
    kind, message, traceback = (plain_text(text, lines=True) for text in row.error or ("", "", ""))
    stages = [_stage(forest, place, number=row.number) for place in places]
    values = _last_values(paths, view, row)
    return models.Trial(
        **_row(row, view).model_dump(exclude={"config"}),
        error=f"{kind}: {message}" if message else kind,
        traceback=traceback,
        parent=row.parent,
        schedule=lines(row.config, epochs=epochs),
        config=dict(row.config),
        curves=_curves(paths.mean_curve(nodes, row.reached)),
        stages=stages,
        shared_epochs=sum(s.stop - s.start for s in stages if s.trials > 1),
        seed_values=[finite(value) for value in values],
        sd=finite(standard_deviation(values)) if values else None,
        interval=_mean_interval(values),
        user_attrs={
            plain_text(key): plain_text(attribute_text(value), lines=True, limit=_MAX_ATTRIBUTE)
            for key, value in paths.user_attrs(row.node, row.reached).items()
        },
        artifacts=[
            models.ArtifactFile(
                name=plain_text(each.name),
                digest=plain_text(each.digest),
                num_bytes=each.num_bytes,
                error=plain_text(each.error),
            )
            for each in paths.artifacts_of(row.node, row.reached).values()
        ],
        seconds=finite(paths.spent(nodes, row.reached)),
        log_lines=_log_lines(views, view, row, origins=paths.origins),
    )


def _log_lines(
    views: Views, view: StudyView, row: Any, *, origins: Mapping[int, tuple[int | None, int]]
) -> list[models.TrialLine]:
    """Return the last lines that a trial has logged; what a database holds may be anything."""
    end = last_epoch(row.state, target=row.target, reached=row.reached)
    path = path_to(row.node, end, origins=origins)
    return [
        models.TrialLine(
            epoch=each.epoch,
            at=each.line.at,
            level=plain_text(each.line.level),
            logger=plain_text(each.line.logger),
            text=plain_text(each.line.text, lines=True, limit=_MAX_ATTRIBUTE),
        )
        for each in views.plans.log_lines(view.plan, path, origins=origins)[-_MAX_LINES:]
    ]


def _seed_values(views: Views, view: StudyView, row: Any) -> list[float]:
    """Return the first metric of each seed at the epoch reached; empty for one seed."""
    if not row.replicas:
        return []
    return _last_values(views.plans.paths(view.plan, (row.node, *row.replicas)), view, row)


def _last_values(paths: Paths, view: StudyView, row: Any) -> list[float]:
    if not row.replicas or not row.reached:
        return []
    ends = [paths.curve(node, row.reached)[-1:] for node in (row.node, *row.replicas)]
    return [metrics[view.metrics[0]] for end in ends for _, metrics in end]


def _mean_interval(values: Sequence[float]) -> list[float | None] | None:
    return [finite(end) for end in interval(values)] if len(values) > 1 else None


def _row(row: Any, view: StudyView) -> models.TrialRow:
    values = row.objectives or {}
    return models.TrialRow(
        number=row.number,
        state=state_of(row, view),
        value=finite(row.value),
        values={name: finite(values.get(name)) for name in view.metrics[1:]},
        reached=row.reached,
        target=row.target,
        horizon=max_epochs(view) if row.horizon is None else row.horizon,
        violation=finite(row.violation),
        config=texts(row.config),
    )


def state_of(row: Any, view: StudyView) -> str:
    """Return the state as in ``Study.trials``: a waiting trial is done or paused."""
    horizon = max_epochs(view) if row.horizon is None else row.horizon
    return shown_state(str(row.state), reached=row.reached, horizon=horizon, study_state=view.state)


def _curves(
    points: Sequence[tuple[int, Mapping[str, float]]],
) -> dict[str, list[tuple[int, float | None]]]:
    names = dict.fromkeys(name for _, metrics in points for name in metrics)
    return {
        name: [(epoch, finite(metrics.get(name))) for epoch, metrics in points] for name in names
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
