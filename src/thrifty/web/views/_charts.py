"""Charts: learning curves, objectives and importance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.core import plain_text
from thrifty.store import StudyView, Views, nondominated
from thrifty.store._epoch_times import worker_use
from thrifty.store._records import nodes_of_replicas

from . import _models as models
from ._layouts import Column, StageForest, columns, stage_forest
from ._models import finite
from ._study_views import parameters, state_of, unit_of


_NUM_BINS = 8
Values = npt.NDArray[np.float64]


def shares(columns: Sequence[Column], values: Sequence[float], *, mode: str) -> dict[str, float]:
    """Return the share of each coordinate in the variance of the metric, the largest first.

    This is a one-way analysis of variance. Numbers are cut into bins of equally many trials, each
    category is a group, and trials without the coordinate form their own group. The shares are
    epsilon squared (Kelley, 1935), which subtracts what groups of random numbers would explain, so
    they need not add up to one. Values that are far worse than most are clipped to the worst of the
    others. ``Study.importance`` (fANOVA) is more thorough and takes longer.

    >>> grid = [(a, b) for a in range(8) for b in range(8)]
    >>> axes = [
    ...     Column(name="a", labels=(), log=False, values=tuple(float(a) for a, _ in grid)),
    ...     Column(name="b", labels=(), log=False, values=tuple(float(b) for _, b in grid)),
    ... ]
    >>> {
    ...     n: round(share, 1)
    ...     for n, share in shares(axes, [float(a) for a, _ in grid], mode="max").items()
    ... }
    {'a': 1.0, 'b': 0.0}
    """
    y = _tamed(np.asarray(values, float), mode=mode)
    total = float(((y - y.mean()) ** 2).sum()) if len(y) else 0.0
    found = {c.name: _share(_groups(c), y, total=total) for c in columns}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _share(groups: npt.NDArray[np.intp], y: Values, *, total: float) -> float:
    number, size = int(groups.max()) + 1, len(y)
    if total <= 0.0 or number < 2 or size <= number:
        return 0.0
    counts = np.bincount(groups, minlength=number)
    means = np.bincount(groups, weights=y, minlength=number) / counts
    within = float(((y - means[groups]) ** 2).sum())
    between = total - within
    by_chance = (number - 1) * within / (size - number)
    return min(max((between - by_chance) / total, 0.0), 1.0)


def _groups(column: Column) -> npt.NDArray[np.intp]:
    """Return the group of each trial, numbered from 0 without gaps."""
    x = np.array([np.nan if v is None else v for v in column.values], float)
    known = ~np.isnan(x)
    if not column.labels and len(np.unique(x[known])) > _NUM_BINS:
        edges = np.quantile(x[known], np.linspace(0, 1, _NUM_BINS + 1)[1:-1])
        x = np.where(known, np.searchsorted(edges, x, side="right"), np.nan)
    x = np.where(known, x, np.nanmax(x, initial=0.0) + 1)
    found: npt.NDArray[np.intp] = np.unique(x, return_inverse=True)[1].reshape(-1)
    return found


def _tamed(values: Values, *, mode: str) -> Values:
    """Clip values that are far worse to the worst of the others (Tukey's outer fence)."""
    if not len(values):
        return values
    sign = -1.0 if mode == "min" else 1.0
    scores = sign * values
    low, high = np.quantile(scores, [0.25, 0.75])
    if high > low:
        fence = low - 3 * (high - low)
        scores = np.maximum(scores, scores[scores >= fence].min())
    return scores


_TOUCHING_S = 1e-3
"""Stages that overlap by less only touch, because clocks are read one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLane:
    """The lane in which a stage is drawn, and the size of its pack."""

    lane: int
    pack: int


def lanes(spans: Sequence[tuple[float, float]]) -> list[StageLane]:
    """Return a lane for each span ``(began, ended)`` of one worker: the first that is free.

    Spans must be in order. A pack is a set of spans connected by overlaps, and its size is the
    number of lanes that it needs.

    >>> [(each.lane, each.pack) for each in lanes([(0, 2), (0, 2), (2, 3)])]
    [(0, 2), (1, 2), (0, 1)]
    """
    out: list[StageLane] = []
    free_at: list[float] = []
    chosen: list[int] = []
    ends_at = float("-inf")
    for began, ended in spans:
        if began >= ends_at - _TOUCHING_S:
            _close(chosen, out)
            free_at, chosen = [], []
        lane = next(
            (i for i, free in enumerate(free_at) if began >= free - _TOUCHING_S), len(free_at)
        )
        free_at[lane : lane + 1] = [ended]
        chosen.append(lane)
        ends_at = max(ends_at, ended)
    _close(chosen, out)
    return out


def _close(chosen: Sequence[int], out: list[StageLane]) -> None:
    pack = max(chosen, default=-1) + 1
    out.extend(StageLane(lane=lane, pack=pack) for lane in chosen)


_POINTS_OF_A_CURVE = 200
_TRIALS_FOR_IMPORTANCE = 4000
_FEWEST_TRIALS = 16
_MOST_STAGES = 50_000


def curves(
    views: Views, view: StudyView, *, metric: str | None, best: int, others: int
) -> models.Curves:
    """Return the learning curves of the best trials and of some others."""
    top = list(views.samples.best(view.id, mode=view.modes[0], limit=best)) if best else []
    known = {row.number for row in top}
    rest = list(views.samples.some(view.id, limit=others)) if others else []
    rest = [row for row in rest if row.number not in known]
    rows = [*top, *rest]
    every = max(1, math.ceil(max((r.reached for r in rows), default=1) / _POINTS_OF_A_CURVE))
    nodes = {row.number: (row.node, *nodes_of_replicas(row.replicas)) for row in rows}
    paths = views.plans.paths(view.plan, [*chain.from_iterable(nodes.values())], every=every)
    names = sorted({name for metrics in paths.metrics.values() for name in metrics})
    chosen = metric if metric in names else view.metrics[0]
    return models.Curves(
        metric=chosen,
        mode=_mode_of(view, chosen),
        names=names,
        every=every,
        unit=unit_of(view),
        curves=[
            models.Curve(
                trial=row.number,
                state=state_of(row, view),
                best=row.number in known,
                value=finite(row.value),
                points=[
                    (epoch, finite(metrics.get(chosen)))
                    for epoch, metrics in paths.mean_curve(nodes[row.number], row.reached)
                ],
            )
            for row in rows
        ],
        total=sum(view.num_trials.values()),
    )


def parallel(views: Views, view: StudyView, *, limit: int) -> models.Parallel:
    """Return trials with coordinates and metric, spread evenly over the ranks of their values."""
    rows = [
        row for row in views.samples.spread(view.id, limit=limit) if finite(row.value) is not None
    ]
    axes = columns([row.config for row in rows])
    return models.Parallel(
        metric=view.metrics[0],
        mode=view.modes[0],
        axes=[
            models.Axis(
                name=axis.name,
                kind="category" if axis.labels else "number",
                log=axis.log,
                labels=list(axis.labels),
                ticks=list(axis.ticks),
            )
            for axis in axes
        ],
        trials=[row.number for row in rows],
        rows=[
            [*(axis.values[index] for axis in axes), finite(row.value)]
            for index, row in enumerate(rows)
        ],
        total=sum(view.num_trials.values()),
    )


def pareto(views: Views, view: StudyView, *, limit: int) -> models.Pareto:
    """Return the whole Pareto front, and about ``limit`` other trials, evenly by number."""
    found = views.samples.objectives(view.id) if len(view.metrics) > 1 else []
    signs = [-1.0 if mode == "min" else 1.0 for mode in view.modes]
    rows = [
        (number, [values[name] for name in view.metrics])
        for number, values in found
        if all(finite(values.get(name)) is not None for name in view.metrics)
    ]
    points = [[s * v for s, v in zip(signs, row, strict=True)] for _, row in rows]
    front = {rows[index][0] for index in nondominated(points)}
    every = math.ceil(len(rows) / limit) if rows else 1
    shown = [each for i, each in enumerate(rows) if each[0] in front or i % every == 0]
    return models.Pareto(
        metrics=list(view.metrics),
        modes=list(view.modes),
        trials=[number for number, _ in shown],
        rows=[[finite(value) for value in row] for _, row in shown],
        front=sorted(front),
        total=len(rows),
    )


def importance(views: Views, view: StudyView) -> models.Importance:
    """Return the importance of coordinates at the largest epoch that enough trials have passed."""
    metric = view.metrics[0]
    levels = views.samples.levels(view.id)
    # The number of coordinates is not known yet, so estimate it by the size of the space.
    needed = max(_FEWEST_TRIALS, 2 + len(view.spec.get("space", {})))
    epoch = _common_epoch(levels, needed=needed)
    found = (
        views.samples.at_epoch(view.id, epoch, plan=view.plan, limit=_TRIALS_FOR_IMPORTANCE)
        if epoch
        else []
    )
    usable = [(c, m[metric]) for c, m in found if finite(m.get(metric)) is not None]
    enough = len(usable) >= _FEWEST_TRIALS
    axes = columns([config for config, _ in usable]) if enough else []
    values = [value for _, value in usable]
    alone = shares(axes, values, mode=view.modes[0])
    # Unequal groups, as of conditional hyper-parameters, explain some of the variance twice.
    total = sum(alone.values())
    note = ""
    if not enough:
        note = f"needs {_FEWEST_TRIALS} trials that have reported"
    elif alone and not total:
        note = "no hyper-parameter explains a difference between these trials"
    return models.Importance(
        metric=metric,
        epoch=epoch,
        unit=unit_of(view),
        trials=len(usable),
        shares=[
            models.Share(name=name, share=share / total)
            for name, share in (alone.items() if total else ())
        ],
        one_value=_with_one_value([config for config, _ in usable], view) if enough else [],
        note=note,
    )


def _with_one_value(configs: Sequence[Mapping[str, Any]], view: StudyView) -> list[str]:
    """Return the hyper-parameters of which all configurations have the same value.

    Constants of the space are left out.
    """
    space = view.spec.get("space", {})
    return [
        name
        for name, domain in space.items()
        if _varies(str(domain)) and len({repr(config.get(name)) for config in configs}) == 1
    ]


def _varies(domain: str) -> bool:
    """Return whether a recorded hyper-parameter may have several values.

    >>> _varies("Float(low=0.0, high=1.0)"), _varies("Choice(options=(8,))"), _varies("0.1")
    (True, False, False)
    """
    found = parameters({"": domain})[0]
    if found.kind == "choice" and len(found.options) > 1:
        return True
    inner = domain.removeprefix("Choice(")
    return any(f"{kind}(" in inner for kind in ("Choice", "Float", "Int"))


def forest(views: Views, view: StudyView) -> StageForest:
    """Return the stages of a study, without layout."""
    ends = views.plans.ends(view.id)
    tree = views.plans.tree(view.plan)  # last, so that it has the node of every end
    return stage_forest(tree, ends, mode=view.modes[0])


def workers(
    views: Views, view: StudyView, *, since: float | None, until: float | None, limit: int
) -> models.Workers:
    """Return which worker trained which stage when."""
    extent = views.plans.extent(view.plan)
    total, rows = views.plans.stages(view.plan, since=since, until=until, limit=_MOST_STAGES)
    longest = {row.id for row in sorted(rows, key=lambda row: -row.seconds)[:limit]}
    by_worker: dict[str, list[Any]] = {}
    for row in rows:
        by_worker.setdefault(row.worker, []).append(row)
    names = sorted(by_worker, key=_natural)
    return models.Workers(
        began=finite(extent.began),
        ended=finite(extent.ended),
        workers=[_worker(name, by_worker[name], shown=longest) for name in names],
        shown=len(longest),
        counted=len(rows),
        total=total,
    )


def _worker(name: str, rows: Sequence[Any], *, shown: Collection[int]) -> models.WorkerRow:
    spans = [(row.started_at, row.started_at + row.seconds) for row in rows]
    placed, used = lanes(spans), worker_use(name, rows)
    return models.WorkerRow(
        name=name,
        lanes=max(each.lane for each in placed) + 1,
        total=len(rows),
        largest=max(each.pack for each in placed),
        busy=used.busy_s,
        device=None if used.device is None else plain_text(used.device),
        peak_bytes=used.peak_bytes,
        stages=[
            models.WorkerStage(
                id=row.id,
                node=row.node,
                start=row.start,
                stop=row.stop,
                state=row.state,
                error=row.error,
                began=row.started_at,
                seconds=row.seconds,
                lane=each.lane,
                pack=each.pack,
            )
            for row, each in zip(rows, placed, strict=True)
            if row.id in shown
        ],
    )


def _common_epoch(levels: Sequence[tuple[int, int]], *, needed: int) -> int:
    """Return the largest epoch that ``needed`` trials have passed.

    Otherwise return the first epoch that any trial stands at, or 0 if there is none.
    """
    passed = 0
    for epoch, number in reversed(levels):
        passed += number
        if passed >= needed:
            return epoch
    return levels[0][0] if levels else 0


def _mode_of(view: StudyView, metric: str) -> str:
    modes: Mapping[str, str] = dict(zip(view.metrics, view.modes, strict=False))
    return modes.get(metric, "")


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts worker 10 after worker 9."""
    parts: list[str] = []
    for char in name:
        if parts and parts[-1][-1].isdecimal() == char.isdecimal():
            parts[-1] += char
        else:
            parts.append(char)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts)
