"""Importance of hyper-parameters."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thrifty.core import UsageError, require
from thrifty.space import Choice, Coordinate, Domain, Int, Schedule, Space, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store._reports import trials_text

from ._identity import Comparable, comparable, enough, is_part
from ._results import MAX_ROWS, TrialResult, table


if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution


def empty_study(*, metrics: Sequence[str], modes: Sequence[str]) -> optuna.Study:
    """Return an Optuna study without trials."""
    module = load_optuna()
    directions = ["maximize" if mode == "max" else "minimize" for mode in modes]
    with _quiet("optuna.storages._in_memory"):
        study: optuna.Study = module.create_study(
            storage=module.storages.InMemoryStorage(), directions=directions
        )
    # This is what set_metric_names does, without its warning about an experimental feature.
    study._storage.set_study_system_attr(study._study_id, "study:metric_names", list(metrics))
    return study


def load_optuna() -> Any:
    """Return the module ``optuna``.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    return require("optuna", extra="optuna")


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence one logger in this context without changing the user's verbosity for Optuna."""

    nobody = logging.Filter("nobody")  # only passes records of a logger named "nobody"
    quieted = logging.getLogger(name)
    quieted.addFilter(nobody)
    try:
        yield
    finally:
        quieted.removeFilter(nobody)


def distribution(coordinate: Coordinate) -> BaseDistribution:
    """Return Optuna's distribution for a coordinate's domain."""
    optuna, domain = load_optuna().distributions, coordinate.domain
    found: BaseDistribution
    if isinstance(domain, Choice):
        found = optuna.CategoricalDistribution(option_names(domain))
    elif isinstance(domain, Int):
        # The last value that is reached: Optuna warns if the steps do not end at the bound.
        high = domain.levels(2)[-1]
        found = optuna.IntDistribution(domain.low, high, log=domain.log, step=domain.step)
    elif domain.step is not None:
        found = optuna.FloatDistribution(domain.low, domain.levels(2)[-1], step=domain.step)
    else:
        found = optuna.FloatDistribution(domain.low, domain.high, log=domain.log)
    return found


def external(distribution: Any, picked: Any) -> Any:
    """Return Optuna's representation of a pick."""
    choices = getattr(distribution, "choices", None)
    return picked if choices is None else choices[picked]


FloatArray = npt.NDArray[np.float64]

_NUM_TREES = 64
_MAX_DEPTH = 64


def fanova(points: FloatArray, values: FloatArray, *, seed: int) -> FloatArray:
    """Return the share of variance that each coordinate explains alone, shape ``[d]``.

    The shares sum to less than one if coordinates explain a part only together. ``points`` are in
    the unit cube, shape ``[n, d]``; ``values`` has shape ``[n]``. All shares are zero if the forest
    is constant.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    >>> points = np.random.default_rng(0).uniform(size=(100, 2))
    >>> fanova(points, points[:, 1] ** 2, seed=0).round(1).tolist()
    [0.0, 1.0]
    """
    forest = _ensemble().RandomForestRegressor(
        n_estimators=_NUM_TREES, max_depth=_MAX_DEPTH, random_state=seed
    )
    forest.fit(points, values)
    shares = [_tree_shares(each.tree_, points.shape[1]) for each in forest.estimators_]
    known = [share for share in shares if share is not None]
    return np.mean(known, axis=0) if known else np.zeros(points.shape[1])


def _tree_shares(tree: Any, num_coordinates: int) -> FloatArray | None:
    """Return the shares in one tree, or None if the tree is constant."""
    boxes_LD2 = _leaf_boxes(tree, num_coordinates)
    values_L = tree.value[tree.feature < 0].reshape(-1)
    widths_LD = boxes_LD2[:, :, 1] - boxes_LD2[:, :, 0]
    volumes_L = widths_LD.prod(axis=1)
    mean = volumes_L @ values_L
    variance = volumes_L @ (values_L - mean) ** 2
    if variance <= 0.0:
        return None
    shares = np.zeros(num_coordinates)
    for index in range(num_coordinates):
        edges_S = np.unique(boxes_LD2[:, index, :])
        middles_S = (edges_S[1:] + edges_S[:-1]) / 2
        # The mean over all other coordinates, for each interval in which the tree is constant.
        low_L1, high_L1 = boxes_LD2[:, index, :1], boxes_LD2[:, index, 1:]
        inside_LS = (low_L1 <= middles_S) & (middles_S < high_L1)
        weighted_L = values_L * volumes_L / widths_LD[:, index]
        marginal_S = weighted_L @ inside_LS
        shares[index] = np.diff(edges_S) @ (marginal_S - mean) ** 2 / variance
    return shares


def _leaf_boxes(tree: Any, num_coordinates: int) -> FloatArray:
    """Return lower and upper bounds of each leaf, shape ``[leaves, d, 2]``."""
    boxes = np.empty((tree.node_count, num_coordinates, 2))
    boxes[0] = 0.0, 1.0
    for node in np.flatnonzero(tree.feature >= 0):  # visits parents before their children
        feature, threshold = tree.feature[node], tree.threshold[node]
        left, right = tree.children_left[node], tree.children_right[node]
        boxes[left] = boxes[right] = boxes[node]
        boxes[left, feature, 1] = boxes[right, feature, 0] = threshold
    leaves: FloatArray = boxes[tree.feature < 0]
    return leaves


def _ensemble() -> Any:
    return require("sklearn.ensemble", package="scikit-learn", extra="search")


Method = Literal["fanova", "ped-anova"]
Level = Literal["hyperparameter", "coordinate"]

_NUM_FOR_PED_ANOVA = 20
"""Trials for PED-ANOVA, so that the best tenth is more than one trial."""
_NUM_FILLS = 4
"""How often a trial that lacks coordinates is shown to the forest, each time with random values."""


class Importance(dict[str, float]):
    """Shares by hyper-parameter, the largest first, and what they were computed from.

    The shares sum to one, or they are all zero if no hyper-parameter explains the differences.

    Attributes:
        metric: The metric whose differences are explained.
        method: "fanova" or "ped-anova".
        epoch: The epoch at which the metric of all these trials was compared.
        unit: The unit in which the text names the epoch.
        states: How many trials were compared, by state.
        num_left_out: Trials of the study that were not compared: they have not reached the epoch,
            have failed, have no finite metric there, or have values that are not of the space.
        one_value: Hyper-parameters of which all compared trials have the same value. Their share
            is 0, which says nothing about their importance.

    >>> shares = Importance(
    ...     {"lr": 0.8, "width": 0.2},
    ...     metric="loss",
    ...     method="fanova",
    ...     epoch=3,
    ...     states={"stopped": 7, "done": 2},
    ...     num_left_out=4,
    ... )
    >>> shares["lr"], shares.num_trials
    (0.8, 9)
    >>> shares
    <Importance {'lr': 0.8, 'width': 0.2} by fanova: loss after epoch 3 of 9 trials (2 done, 7
    stopped); 4 others left out>
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        *,
        metric: str,
        method: Method,
        epoch: int,
        unit: TimeUnit = EPOCHS,
        states: Mapping[str, int],
        num_left_out: int,
        one_value: Collection[str] = (),
    ) -> None:
        super().__init__(shares)
        self.metric = metric
        self.method = method
        self.epoch = epoch
        self.unit = unit
        self.states = dict(sorted(states.items()))
        self.num_left_out = num_left_out
        self.one_value = frozenset(one_value)

    def text(self, name: str) -> str:
        """Return the share of a hyper-parameter as text.

        >>> shares = Importance(
        ...     {"lr": 1.0, "width": 0.0},
        ...     metric="loss",
        ...     method="fanova",
        ...     epoch=3,
        ...     states={"done": 9},
        ...     num_left_out=0,
        ...     one_value=["width"],
        ... )
        >>> shares.text("lr"), shares.text("width")
        ('100.0%', 'one value')
        """
        return "one value" if name in self.one_value else f"{self[name]:.1%}"

    def __repr__(self) -> str:
        return f"<Importance {super().__repr__()} by {self.method}: {self.basis}>"

    def _repr_html_(self) -> str:
        """Return the largest shares as a table, and what they were computed from."""
        num_more = len(self) - MAX_ROWS
        return table(
            f"What makes trials differ in {self.metric}",
            ("hyper-parameter", "share"),
            ((name, self.text(name)) for name in self),
            notes=[
                *([f"… and {num_more:,} more: dict(importance)"] if num_more > 0 else []),
                f"{self.method}: {self.basis}",
            ],
        )

    @property
    def num_trials(self) -> int:
        """The number of trials that were compared."""
        return sum(self.states.values())

    @property
    def basis(self) -> str:
        """What was compared, in one line."""
        states = ", ".join(f"{count:,} {state}" for state, count in self.states.items())
        others = ""
        if self.num_left_out:
            others = f"; {self.num_left_out:,} other{'s' * (self.num_left_out > 1)} left out"
        return (
            f"{self.metric} after {self.unit.place(self.epoch)} of {trials_text(self.num_trials)} "
            f"({states}){others}"
        )


def importance(
    trials: Sequence[TrialResult],
    space: Space,
    *,
    metric: str,
    mode: str,
    method: Method = "fanova",
    level: Level = "hyperparameter",
    seed: int = 0,
) -> Importance:
    """Return each hyper-parameter's share in the differences between trials, largest first.

    The shares sum to one. If all trials are equally good, all shares are zero. Trials are compared
    at the largest epoch that enough of them have reached (see ``comparable``), in whatever state
    they are, unless they have failed. The result says which epoch and which trials these are.

    - ``method="fanova"``: a random forest learns the metric, and a share is the part of its
      variance over the whole space that one coordinate explains alone (Hutter et al., ICML 2014).
      Values that are far worse than most count only as the worst of the others. Otherwise a few
      diverged trials would dominate the variance.
    - ``method="ped-anova"``: the shares say what distinguishes the best tenth of the trials
      (Watanabe et al., IJCAI 2023).

    With ``level="coordinate"``, each domain inside schedules and choices counts separately;
    otherwise their shares are summed up.

    Raises:
        UsageError: Too few trials have reported, or ``method`` or ``level`` is unknown.
        MissingExtraError: scikit-learn (for fANOVA) or Optuna (for PED-ANOVA) is not installed.

    >>> from thrifty.space import Float
    >>> space = Space(lr=Float(0, 1), decay=Float(0, 1))
    >>> draws = [space.sample(np.random.default_rng(seed)) for seed in range(30)]
    >>> trials = [
    ...     TrialResult(number=n, config=c, state="done", epochs=1, value=c["lr"], curve=(c["lr"],))
    ...     for n, c in enumerate(draws)
    ... ]
    >>> importance(trials, space, metric="loss", mode="min")["lr"] > 0.9
    True
    """
    if method not in ("fanova", "ped-anova"):
        raise UsageError(f"method={method!r}: use 'fanova' or 'ped-anova'")
    if level not in ("hyperparameter", "coordinate"):
        raise UsageError(f"level={level!r}: use 'hyperparameter' or 'coordinate'")
    at_least = _NUM_FOR_PED_ANOVA if method == "ped-anova" else 0
    seen = comparable(trials, space, at_least=at_least)
    _check_number(seen, trials, metric=metric, method=method, at_least=at_least)
    if not seen.coordinates:
        raise UsageError(
            f"nothing varies: every hyper-parameter of the space ({', '.join(space.names)}) has "
            "one value only"
        )
    if min(seen.values) == max(seen.values):
        shares = dict.fromkeys((c.name for c in seen.coordinates), 0.0)
    elif method == "fanova":
        shares = _fanova(seen, mode=mode, seed=seed)
    else:
        shares = _ped_anova(seen, metric=metric, mode=mode)
    # The forest's rounding would give such a name a share of 1e-33 on some machines.
    shares |= {name: 0.0 for name in shares if seen.has_one_value(name)}
    if level == "hyperparameter":
        varying = [n for n in space.names if any(is_part(c.name, n) for c in seen.coordinates)]
        shares = _summed(shares, varying)
    total = sum(shares.values())
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return Importance(
        {name: share / total if total else 0.0 for name, share in ranked},
        metric=metric,
        method=method,
        epoch=seen.epoch,
        unit=seen.unit,
        states=Counter(seen.states),
        num_left_out=len(trials) - len(seen),
        one_value=[name for name in shares if seen.has_one_value(name)],
    )


def _check_number(
    seen: Comparable, trials: Sequence[TrialResult], *, metric: str, method: Method, at_least: int
) -> None:
    """Raise UsageError if there are too few comparable trials, and say what the others lack."""
    num_needed = max(enough(num_coordinates=len(seen.coordinates)), at_least)
    if len(seen) >= num_needed:
        return
    num_failed = sum(trial.state == "failed" for trial in trials)
    num_silent = sum(not trial.curve and trial.state != "failed" for trial in trials)
    num_other = len(trials) - len(seen) - num_failed - num_silent
    lacks = ", ".join(
        f"{number:,} {what}"
        for number, what in (
            (num_failed, "failed"),
            (num_silent, "have not reported"),
            (num_other, f"have no finite {metric} or are not of this space"),
        )
        if number
    )
    raise UsageError(
        f"importance ({method}) needs {num_needed} trials with a finite {metric}, there are "
        f"{len(seen)} of {len(trials)}{f' ({lacks})' if lacks else ''}; run more trials first"
    )


def _fanova(seen: Comparable, *, mode: str, seed: int) -> dict[str, float]:
    """Return the variance that each coordinate explains alone.

    The forest needs a value for every coordinate. A coordinate that is absent has no effect, so it
    gets random values, several of them for each trial. One that no trial has explains nothing.
    """
    every = np.array([_unit_point(seen, picked) for picked in seen.picked])
    there = ~np.isnan(every).all(axis=0)
    points = every[:, there]
    values = _standardised(np.array(_tamed(seen.values, mode=mode)))
    if np.isnan(points).any():
        points, values = np.repeat(points, _NUM_FILLS, axis=0), np.repeat(values, _NUM_FILLS)
        drawn = np.random.default_rng(seed).uniform(size=points.shape)
        points = np.where(np.isnan(points), drawn, points)
    shares = np.zeros(len(there))
    if there.any():
        shares[there] = fanova(points, values, seed=seed)
    return {c.name: float(share) for c, share in zip(seen.coordinates, shares, strict=True)}


def _standardised(values: FloatArray) -> FloatArray:
    """Return values moved and scaled to 0 to 1.

    A tree does not split values whose variance is tiny, and the variance of huge ones overflows.
    """
    scaled = values / max(float(np.abs(values).max()), np.finfo(float).tiny)
    scaled -= scaled.min()
    return scaled / (scaled.max() or 1.0)


def _unit_point(seen: Comparable, picked: Mapping[str, Any]) -> list[float]:
    """Return a trial's point in the unit cube, on which every coordinate is uniform.

    Options own equal intervals.
    """
    point = []
    for coordinate in seen.coordinates:
        if coordinate.name not in picked:
            point.append(math.nan)
        elif isinstance(coordinate.domain, Choice):
            point.append((picked[coordinate.name] + 0.5) / len(coordinate.domain.options))
        else:
            point.append(coordinate.to_unit(picked[coordinate.name]))
    return point


def _tamed(values: Sequence[float], *, mode: str) -> list[float]:
    """Return the values, with far worse ones set to the worst of the others.

    Tukey's outer fence decides which values are far worse.
    """
    sign = 1.0 if mode == "max" else -1.0
    scores = sign * np.array(values)
    low, high = np.quantile(scores, [0.25, 0.75])
    if high > low:
        fence = low - 3 * (high - low)
        scores = np.maximum(scores, scores[scores >= fence].min())
    return [float(sign * score) for score in scores]


def _ped_anova(seen: Comparable, *, metric: str, mode: str) -> dict[str, float]:
    """Return how far the best tenth differs from all trials, by coordinate."""
    optuna = load_optuna()
    study = empty_study(metrics=[metric], modes=[mode])
    distributions = {c.name: distribution(c) for c in seen.coordinates}
    for picked, value in zip(seen.picked, seen.values, strict=True):
        own = {name: d for name, d in distributions.items() if name in picked}
        params = {name: external(d, picked[name]) for name, d in own.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=own, value=value))
    present = {name for picked in seen.picked for name in picked}
    shares = {}
    with warnings.catch_warnings():
        # Ignore warnings: the evaluator is experimental, or only one trial took a branch.
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        for name in distributions:
            found = evaluator.evaluate(study, params=[name]) if name in present else {name: 0.0}
            shares[name] = float(found[name])
    return shares


def _summed(shares: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Sum the shares of coordinates by the hyper-parameter that they are part of."""
    out = dict.fromkeys(names, 0.0)
    for coordinate, share in shares.items():
        out[hyperparameter_of(coordinate, names)] += share
    return out


def hyperparameter_of(coordinate: str, names: Sequence[str]) -> str:
    """Return the hyper-parameter that a coordinate is part of.

    >>> hyperparameter_of("lr[1].value", ["lr", "lr_decay"])
    'lr'
    """
    parts = [name for name in names if is_part(coordinate, name)]
    return max(parts, key=len)


# -- names of options ------------------------------------------------------------------


def option_names(choice: Choice) -> tuple[str, ...]:
    """Return the options as a user would write them, each different from the others.

    >>> from thrifty.space import Constant, Cosine, Float
    >>> option_names(Choice(["sgd", 1, Constant(0.1), Cosine(Float(0.1, 0.3))]))
    ('sgd', '1', 'Constant(0.1)', 'Cosine(*)')
    """
    return distinct_names([_name(option) for option in choice.options])


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which each is different: equal ones get their index."""
    return tuple(
        f"{name} [{index}]" if names.count(name) > 1 else name for index, name in enumerate(names)
    )


def _name(option: Any) -> str:
    if isinstance(option, str):
        return option or "''"
    if isinstance(option, Domain) and not isinstance(option, Choice):
        ends = option.levels(2)
        return f"{ends[0]:.6g} to {ends[-1]:.6g}"
    return _describe(option)


def _describe(value: Any) -> str:
    """Return a value as a user would write it, with ``*`` for each domain.

    What is picked from a domain is a separate coordinate.
    """
    if isinstance(value, Domain):
        return "*"
    if isinstance(value, tuple):
        inside = ", ".join(_describe(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if not isinstance(value, Schedule):
        return f"{value:.6g}" if isinstance(value, float) else repr(value)
    shown = []
    for each in fields(value):  # type: ignore[arg-type]  # every schedule is a dataclass
        item = getattr(value, each.name)
        if each.default is not MISSING and repr(item) == repr(each.default):
            continue
        shown.append(f"{each.name}={_describe(item)}" if each.kw_only else _describe(item))
    return f"{type(value).__name__}({', '.join(shown)})"
