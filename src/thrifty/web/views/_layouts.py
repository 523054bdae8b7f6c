"""What pictures of a study are laid out from: columns of its configurations, and its stage forest.

Schedules are split into their fields, and columns hold numbers or categories. The forest is
computed from database rows. ``plan.stage_forest`` does the same for a plan in memory (a test checks
that they agree). Rebuilding a plan of 100,000 trials would take seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from thrifty.core import ThriftyError
from thrifty.space import config_from_json

from . import _models as models
from ._models import finite


Scalar = float | int | str | bool | None
_MAX_LABELS = 24
_MAX_TICKS = 12
_LOG_FROM = 50.0
"""Ratio of largest to smallest from which positive numbers get a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One coordinate of the configurations.

    ``values`` are numbers or indices into ``labels``; None where a trial does not have the
    coordinate. ``ticks`` are the distinct numbers if there are few of them, such as the options of
    a ``Choice``.
    """

    name: str
    labels: tuple[str, ...]
    log: bool
    values: tuple[float | None, ...]
    ticks: tuple[float, ...] = ()


def flatten(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return a JSON configuration as named scalars.

    >>> from thrifty.space import Cosine, config_to_json
    >>> flatten(config_to_json({"lr": Cosine(0.1), "width": 64}))["lr"]
    'Cosine'
    """
    out: dict[str, Scalar] = {}
    for name, value in config.items():
        _put(name, value, out)
    return out


def columns(configs: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the coordinates in which configurations differ, in order of first appearance.

    A part of a schedule that is equal in all schedules of a kind adds nothing to the kind, so it is
    left out.

    >>> [(c.name, c.labels, c.values) for c in columns([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}])]
    [('b', ('x', 'y'), (0.0, 1.0))]
    """
    flat = [flatten(config) for config in configs]
    names = list(dict.fromkeys(name for each in flat for name in each))
    out = []
    for name in names:
        values = [each.get(name) for each in flat]
        if len(set(map(repr, values))) > 1 and not _follows(name, values, flat):
            out.append(_column(name, values))
    return out


def _follows(name: str, values: Sequence[Scalar], flat: Sequence[Mapping[str, Scalar]]) -> bool:
    """Return whether a column has one value, present or missing depending only on the schedule."""
    if len({repr(value) for value in values if value is not None}) > 1 or "." not in name:
        return False
    kinds = [each.get(name.rpartition(".")[0]) for each in flat]
    both = {(repr(kind), value is None) for kind, value in zip(kinds, values, strict=True)}
    return len(both) == len(set(map(repr, kinds)))


def texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return hyper-parameters in readable form; unreadable ones as they are in the JSON.

    >>> texts({"lr": 0.1, "layers": [1, 2]})
    {'lr': '0.1', 'layers': '(1, 2)'}
    """
    try:
        return {name: _text(value) for name, value in config_from_json(config).items()}
    except (ThriftyError, TypeError, KeyError, ValueError):
        return {name: str(value) for name, value in config.items()}


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _put(name: str, value: Any, out: dict[str, Scalar]) -> None:
    if isinstance(value, Mapping) and "schedule" in value:
        out[name] = str(value["schedule"])
        for field, part in dict(value.get("fields", {})).items():
            _put(f"{name}.{field}", part, out)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _put(f"{name}[{index}]", item, out)
    elif value is not None:
        out[name] = value if isinstance(value, bool | int | float) else str(value)


def _column(name: str, values: Sequence[Scalar]) -> Column:
    present = [value for value in values if value is not None]
    numbers = [finite(value) for value in present]
    if all(number is not None for number in numbers):
        given = tuple(finite(value) for value in values)
        ticks = _ticks([n for n in given if n is not None])
        low, high = (min(n for n in given if n is not None), max(n for n in given if n is not None))
        log = low > 0 and (high / low >= _LOG_FROM or _is_geometric(ticks))
        return Column(name=name, labels=(), log=log, values=given, ticks=ticks)
    # Keep the most frequent labels, and combine the others.
    often = Counter(map(str, present)).most_common()
    labels = [label for label, _ in often[:_MAX_LABELS]]
    if len(often) > _MAX_LABELS:
        labels[-1] = "(others)"
    numeric = {str(v): n for v, n in zip(present, numbers, strict=True) if n is not None}
    labels.sort(key=lambda label: (label not in numeric, numeric.get(label, 0.0)))
    place = {label: float(index) for index, label in enumerate(labels)}
    rest = float(len(labels) - 1)
    return Column(
        name=name,
        labels=tuple(labels),
        log=False,
        values=tuple(None if v is None else place.get(str(v), rest) for v in values),
    )


def _ticks(numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the distinct numbers if they are few and each occurs about twice or more."""
    distinct = sorted(set(numbers))
    few = len(distinct) <= min(_MAX_TICKS, len(numbers) / 2)
    return tuple(distinct) if few else ()


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Return whether positive numbers are spaced more evenly by ratios than by differences."""
    if len(ticks) < 3 or ticks[0] <= 0:
        return False

    def unevenness(points: Sequence[float]) -> float:
        gaps = [b - a for a, b in pairwise(points)]
        # Two neighbours may be so close that their logarithms are equal.
        return max(gaps) / min(gaps) if min(gaps) > 0 else math.inf

    return unevenness([math.log(tick) for tick in ticks]) < unevenness(ticks)


_SOME = 6
"""Number of listed trials of a stage."""


@dataclass(slots=True, kw_only=True)
class Cut:
    """An epoch of a node at which trials end or branch off.

    It holds the number of trials that pass it, and the best score among them.
    """

    trials: int = 0
    failed: int = 0
    score: float = -math.inf
    first: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Epochs ``start + 1 .. stop`` of a node; ``parent`` is an index into the list of stages.

    ``score`` is the best value of the trials that pass (higher is better), ``first`` lists trials
    that end here.
    """

    parent: int | None
    node: int
    start: int
    stop: int
    trials: int
    failed: int
    score: float
    first: Sequence[int]
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForest:
    """All stages, parents before children; ``at`` finds a stage by its node and last epoch."""

    stages: Sequence[Stage]
    at: Mapping[tuple[int, int], int]
    sign: float
    children: Mapping[int, Sequence[int]]

    def path(self, node: int, stop: int) -> list[int]:
        """Return the stages that lead to an epoch of a node, in order."""
        out: list[int] = []
        place = self.at.get((node, stop))
        while place is not None:
            out.append(place)
            place = self.stages[place].parent
        return out[::-1]

    def some_trials(self, place: int, *, limit: int) -> list[int]:
        """Return some of the trials that pass a stage."""
        found: list[int] = []
        stack = [place]
        while stack and len(found) < limit:
            at = stack.pop()
            found.extend(self.stages[at].first)
            stack.extend(reversed(self.children.get(at, ())))
        return sorted(found)[:limit]


def stage_forest(tree: Iterable[Any], ends: Iterable[Any], *, mode: str) -> StageForest:
    """Cut the nodes of a plan wherever trials of a study end or branch off.

    ``tree`` and ``ends`` are the results of the ``store.Views`` methods of these names.
    """
    sign = -1.0 if mode == "min" else 1.0
    nodes = {row.node: (row.parent, row.start, row.last or 0) for row in tree}
    cuts: dict[int, dict[int, Cut]] = {}
    for row in ends:
        if row.epoch <= 0 or row.node not in nodes:
            continue
        cut = _cut(cuts, _owner(nodes, row.node, row.epoch), row.epoch)
        _add(cut, trials=row.trials, failed=row.failed, score=_score(row, sign))
        cut.first.append(row.first)
    for node in sorted(nodes, reverse=True):
        if node in cuts:
            _pass_on(nodes, cuts, node)
    stages: list[Stage] = []
    at: dict[tuple[int, int], int] = {}
    children: dict[int, list[int]] = {}
    for node in sorted(cuts):
        above, start, last = nodes[node]
        parent = None if above is None else at[_owner(nodes, above, start), start]
        for stop in sorted(cuts[node]):
            at[node, stop] = len(stages)
            if parent is not None:
                children.setdefault(parent, []).append(len(stages))
            stages.append(
                _stage(cuts[node][stop], node=node, span=(start, stop), parent=parent, last=last)
            )
            parent, start = at[node, stop], stop
    return StageForest(stages=stages, at=at, sign=sign, children=children)


def draw(
    forest: StageForest, *, metric: str, limit: int, unit: models.Unit = models.EPOCHS
) -> models.Forest:
    """Lay out the stages with the most trials, including all their ancestors, on rows.

    Among stages with equally many trials, the best ones are shown.
    """
    stages = forest.stages
    ranked = sorted(range(len(stages)), key=lambda i: (-stages[i].trials, -stages[i].score, i))
    shown = set(ranked[:limit])
    left_out = _left_out(stages, shown)
    tops, bottoms, mores, rows = _layout(forest, shown, left_out)
    return models.Forest(
        metric=metric,
        mode="min" if forest.sign < 0 else "max",
        stages=[_model(forest, i, top=tops[i], bottom=bottoms[i]) for i in sorted(shown)],
        more=[
            models.HiddenStages(
                parent=parent,
                stages=more.stages,
                trials=more.trials,
                start=more.start,
                stop=more.stop,
                top=mores[parent],
                bottom=mores[parent] + 1,
            )
            for parent, more in left_out.items()
        ],
        rows=rows,
        epochs=max((stage.stop for stage in stages), default=0),
        unit=unit,
        total=len(stages),
        saved=sum((s.stop - s.start) * (s.trials - 1) for s in stages),
    )


@dataclass(slots=True, kw_only=True)
class _Rest:
    stages: int = 0
    trials: int = 0
    start: int = 0
    stop: int = 0


Nodes = Mapping[int, tuple[int | None, int, int]]


def _owner(nodes: Nodes, node: int, epoch: int) -> int:
    parent, start, _ = nodes[node]
    while epoch <= start and parent is not None:
        node = parent
        parent, start, _ = nodes[node]
    return node


def _cut(cuts: dict[int, dict[int, Cut]], node: int, epoch: int) -> Cut:
    return cuts.setdefault(node, {}).setdefault(epoch, Cut())


def _add(cut: Cut, *, trials: int, failed: int, score: float) -> None:
    cut.trials += trials
    cut.failed += failed
    cut.score = max(cut.score, score)


def _score(row: Any, sign: float) -> float:
    value = row.low if sign < 0 else row.high
    return -math.inf if value is None or not math.isfinite(value) else sign * value


def _pass_on(nodes: Nodes, cuts: dict[int, dict[int, Cut]], node: int) -> None:
    """Add the trials of a cut to all cuts before it and to the parent's cut.

    Process children before their parents, so that the counts are complete.
    """
    parent, start, _ = nodes[node]
    total = Cut()
    for epoch in sorted(cuts[node], reverse=True):
        cut = cuts[node][epoch]
        cut.trials += total.trials
        cut.score = max(cut.score, total.score)
        total.trials, total.score = cut.trials, cut.score
    if parent is not None:
        above = _cut(cuts, _owner(nodes, parent, start), start)
        _add(above, trials=total.trials, failed=0, score=total.score)


def _stage(cut: Cut, *, node: int, span: tuple[int, int], parent: int | None, last: int) -> Stage:
    return Stage(
        parent=parent,
        node=node,
        start=span[0],
        stop=span[1],
        trials=cut.trials,
        failed=cut.failed,
        score=cut.score,
        first=cut.first,
        last=last,
    )


def _left_out(stages: Sequence[Stage], shown: set[int]) -> dict[int | None, _Rest]:
    """Return the stages not shown, grouped by their last ancestor that is shown."""
    under: dict[int, int | None] = {}
    out: dict[int | None, _Rest] = {}
    for index, stage in enumerate(stages):
        if index in shown:
            continue
        direct = stage.parent is None or stage.parent in shown
        under[index] = stage.parent if stage.parent is None or direct else under[stage.parent]
        rest = out.setdefault(under[index], _Rest(start=stage.start))
        rest.stages += 1
        rest.trials += stage.trials if direct else 0
        rest.stop = max(rest.stop, stage.stop)
    return out


def _layout(
    forest: StageForest, shown: set[int], left_out: Mapping[int | None, _Rest]
) -> tuple[dict[int, float], dict[int, float], dict[int | None, float], float]:
    """Assign a row to each leaf and one to omitted stages; a stage spans its descendants' rows."""
    below: dict[int | None, list[int]] = {}
    for index in sorted(shown):
        below.setdefault(forest.stages[index].parent, []).append(index)
    height: dict[int, float] = {}
    for index in sorted(shown, reverse=True):
        inside = sum(height[child] for child in below.get(index, ()))
        height[index] = max(1.0, inside + (index in left_out))
    tops: dict[int, float] = {}
    mores: dict[int | None, float] = {}
    stack: list[tuple[int | None, float]] = [(None, 0.0)]
    rows = 0.0
    while stack:
        parent, row = stack.pop()
        following = below.get(parent, [])
        for child in sorted(following, key=lambda i: (-forest.stages[i].trials, i)):
            tops[child] = row
            stack.append((child, row))
            row += height[child]
        if parent in left_out:
            mores[parent] = row
            row += 1
        rows = max(rows, row)
    bottoms = {index: tops[index] + height[index] for index in shown}
    return tops, bottoms, mores, rows


def _model(forest: StageForest, index: int, *, top: float, bottom: float) -> models.ForestStage:
    stage = forest.stages[index]
    return models.ForestStage(
        id=index,
        parent=stage.parent,
        node=stage.node,
        start=stage.start,
        stop=stage.stop,
        trials=stage.trials,
        saved=(stage.stop - stage.start) * (stage.trials - 1),
        some=forest.some_trials(index, limit=_SOME),
        best=models.finite(forest.sign * stage.score),
        state=_state(stage),
        top=top,
        bottom=bottom,
    )


def _state(stage: Stage) -> Any:
    if stage.last >= stage.stop:
        return "done"
    if stage.failed:
        return "failed"
    return "running" if stage.last > stage.start else "pending"
