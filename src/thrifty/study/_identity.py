"""The identity of a study, and why two studies do or do not share."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thrifty.core import SpaceError, StudyMismatchError, fingerprint
from thrifty.pack import SelfDescribing, Task, TaskIdentity, Trainable, task_identity
from thrifty.pack.identity import asking_legacy, note_moves
from thrifty.search import Algorithm, Auto, Enqueued
from thrifty.search._algorithm import why_not_longer
from thrifty.space import Choice, Coordinate, Coordinates, Space, TimeUnit
from thrifty.space._domain import domain_text
from thrifty.space._units import EPOCHS
from thrifty.store._reports import changes, is_legacy, listed

from ._goals import Bound, Goals
from ._results import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """The trials of a study and their results at one epoch.

    Attributes:
        epoch: The epoch at which the values were taken (0: there are no values).
        numbers: The trials' numbers.
        states: The trials' states.
        picked: For each trial its picks by coordinate (options by their index).
        values: For each trial the metric after ``epoch`` epochs, finite.
        feasible: For each trial whether it keeps the study's constraints at the epoch it has
            reached.
        coordinates: The coordinates that can take more than one value.
    """

    epoch: int
    numbers: tuple[int, ...]
    states: tuple[str, ...]
    picked: tuple[Mapping[str, Any], ...]
    values: tuple[float, ...]
    feasible: tuple[bool, ...]
    coordinates: tuple[Coordinate, ...]
    unit: TimeUnit = EPOCHS
    """The unit in which the study shows what it trains."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many other trials there are, by the reason why they cannot be compared."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def without(self) -> str:
        """Which trials are left out and why, as the end of a line; "" if there are none.

        >>> Comparable(
        ...     epoch=9,
        ...     numbers=(),
        ...     states=(),
        ...     picked=(),
        ...     values=(),
        ...     feasible=(),
        ...     coordinates=(),
        ...     left_out={"failed": 1, "not trained for 9 epochs": 2},
        ... ).without
        '; without 3 others (1 failed, 2 not trained for 9 epochs)'
        """
        number = sum(self.left_out.values())
        if not number:
            return ""
        why = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"; without {number:,} other{'s' * (number > 1)} ({why})"

    def has_one_value(self, name: str) -> bool:
        """Return whether all these trials have the same value of a hyper-parameter.

        Args:
            name: The hyper-parameter, or one of its coordinates.
        """
        names = [c.name for c in self.coordinates if is_part(c.name, name)]
        return len({tuple(picked.get(each) for each in names) for picked in self.picked}) <= 1

    def coordinate(self, name: str) -> Coordinate | None:
        """Return the coordinate of this name, or None."""
        return next((c for c in self.coordinates if c.name == name), None)


def comparable(trials: Sequence[TrialResult], space: Space, *, at_least: int = 0) -> Comparable:
    """Return the trials at the largest epoch that enough of them have reached.

    If too few trials exist, use the largest epoch that all have reached. An algorithm that stops
    most trials early leaves values from a few epochs, which say little next to a finished training,
    so the final values of trials must not be compared.

    Enough means ``enough(...)`` trials, and at least ``at_least``. They must also cover enough
    different configurations: sampling a small space repeats configurations, and otherwise only the
    best one might be left. Failed trials are left out, and so are values that are not finite and
    trials that are not of the space (those of a population whose schedules changed on the way).
    """
    coordinates = Coordinates(space)
    left_out: Counter[str] = Counter()
    varying = tuple(c for c in coordinates.coordinates if c.domain.size() > 1)
    usable = []
    for trial in trials:
        picked = picked_by(trial, coordinates)
        if trial.state == "failed":
            left_out["failed"] += 1
        elif not trial.curve:
            left_out["not reported yet"] += 1
        elif picked is None:
            left_out["with values outside of the space"] += 1
        else:
            usable.append((trial, picked))
    num_needed = enough(num_coordinates=len(varying))
    curves, longest = [trial.curve for trial, _ in usable], _longest_of_each(usable)
    epoch = min(
        common_epoch(curves, num_needed=max(num_needed, at_least)),
        common_epoch(longest, num_needed=min(num_needed, len(longest))),
    )
    unit = trials[0].unit if trials else EPOCHS
    reached = [(t, p) for t, p in usable if len(t.curve) >= epoch]
    left_out[f"not trained for {unit.text(epoch)}"] = len(usable) - len(reached)
    usable = [(t, p) for t, p in reached if _is_finite_at(t.curve, epoch)]
    left_out["with a metric that is not finite"] = len(reached) - len(usable)
    return Comparable(
        epoch=epoch,
        numbers=tuple(trial.number for trial, _ in usable),
        states=tuple(trial.state for trial, _ in usable),
        picked=tuple(picked for _, picked in usable),
        values=tuple(trial.curve[epoch - 1] for trial, _ in usable),
        feasible=tuple(not trial.violation for trial, _ in usable),
        coordinates=varying,
        unit=unit,
        left_out=dict(+left_out),
    )


def is_part(coordinate: str, name: str) -> bool:
    """Return whether a coordinate is, or is within, a hyper-parameter or another coordinate.

    >>> is_part("lr[1].value", "lr"), is_part("lr_decay", "lr")
    (True, False)
    """
    return coordinate == name or coordinate.startswith((f"{name}.", f"{name}["))


def _longest_of_each(
    usable: Sequence[tuple[TrialResult, Mapping[str, Any]]],
) -> list[tuple[float, ...]]:
    """Return the longest curve of each configuration."""
    longest: dict[str, tuple[float, ...]] = {}
    for trial, picked in usable:
        of_its_kind = longest.get(repr(picked), ())
        longest[repr(picked)] = max(of_its_kind, tuple(trial.curve), key=len)
    return list(longest.values())


def enough(*, num_coordinates: int) -> int:
    """Return how many trials are informative: ``num_coordinates + 2``, and at least 8.

    >>> enough(num_coordinates=3), enough(num_coordinates=20)
    (8, 22)
    """
    return max(8, num_coordinates + 2)


def common_epoch(curves: Sequence[Sequence[float]], *, num_needed: int) -> int:
    """Return the largest epoch at which ``num_needed`` curves have a finite value.

    If there is none, return the largest epoch that all curves have reached.

    >>> curves = [[0.5], [0.5, 0.6], [0.5, 0.7, 0.8]]
    >>> common_epoch(curves, num_needed=2), common_epoch(curves, num_needed=4)
    (2, 1)
    """
    lengths = sorted({len(curve) for curve in curves}, reverse=True)
    for epoch in lengths:
        if sum(_is_finite_at(curve, epoch) for curve in curves) >= num_needed:
            return epoch
    return lengths[-1] if lengths else 0


def picked_by(trial: TrialResult, coordinates: Coordinates) -> dict[str, Any] | None:
    """Return a trial's picks by coordinate, or None if it is not of the space."""
    try:
        return coordinates.values(trial.config)
    except SpaceError:
        return None


def objective_values(trial: TrialResult, metrics: Sequence[str]) -> tuple[float, ...] | None:
    """Return the trial's objectives at the epoch it has reached.

    Return None unless all objectives are known and finite.
    """
    if len(metrics) == 1:
        values = [trial.value]
    else:
        values = [trial.values.get(metric) for metric in metrics]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return known if len(known) == len(values) else None


def is_log(coordinate: Coordinate) -> bool:
    """Return whether the coordinate has a logarithmic axis."""
    return not isinstance(coordinate.domain, Choice) and coordinate.domain.log


def _is_finite_at(curve: Sequence[float], epoch: int) -> bool:
    return 0 < epoch <= len(curve) and math.isfinite(curve[epoch - 1])


VERSION = 3
"""Part of a plan's identity; raised when the meaning of seeds, epochs or states changes."""
LEGACY_VERSION = 2
"""The version that identified tasks by their source only. Its studies keep their plans."""

_REMOVED_OPTIONS = (
    ", threshold='sqrt-log', width='fixed', levels='round'",  # of FixedWidthSubSampling
    ", threshold='sqrt-log', width='fixed', ladder='widest'",  # of WideBOSS
)
"""Options in the text of older studies' algorithms, with the values that always hold now."""
_RENAMED = {
    r"\bGriddedSampler\(": "QuantizedSampler(",
    r"^SubSampling\((?!.*\bthreshold=)": "FixedWidthSubSampling(",
    r"^AsyncSubSampling\(": "SubSampling(",
    r"^BOSS\((?!.*\bthreshold=)": "WideBOSS(",
}
"""Names in the text of older studies' algorithms, and what they are called now.

``SubSampling`` and ``BOSS`` without a threshold were what their names no longer mean.
"""

_UNSET = {"seeds": 1}
"""Values of fields that are stored only if they differ from these."""
_NOT_COMPARED = ("file", "task", "unit", "earlier_max_epochs", "auto")
"""Fields that a study is not compared by; a task is compared by its plan."""


class CannotGrowError(StudyMismatchError):
    """A stored study is shorter than this one, and cannot become as long."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a study that define it.

    Attributes:
        apart: Whether metrics are separate from training; False if they change what is trained.
    """

    task: Task | Trainable
    space: Space
    algorithm: Algorithm
    goals: Goals
    seed: int
    num_seeds: int = 1
    """The number of seeds that each configuration is trained with."""
    unit: TimeUnit = EPOCHS
    """The unit in which the study shows what it trains."""
    warm_start: tuple[str, ...] = ()
    """Names of the earlier studies that this study learns from."""
    apart: bool = True
    auto: Mapping[str, str] | None = None
    """What ``Auto`` has chosen, and the reason; None if the algorithm was given."""
    _known: dict[str, TaskIdentity] = field(default_factory=dict, repr=False, compare=False)

    @property
    def identity(self) -> TaskIdentity:
        """The identity of the task, computed once for all uses of this recipe.

        Raises:
            TaskError: A value that the task reads has no content.
        """
        if "task" not in self._known:
            self._known["task"] = task_identity(self.task)
        found = self._known["task"]
        return found if self.apart else found.joined()

    @contextlib.contextmanager
    def watched(self, *, fresh: bool) -> Iterator[None]:
        """Record what the task changes in its own values in this context, as still the same task.

        Args:
            fresh: Whether the study is new; a study of an older version is identified differently.
        """
        before = self.identity if fresh else self._known.get("task")
        try:
            yield
        finally:
            if before is not None:
                note_moves(self.task, before)

    def plan_identity(self, *, legacy: bool = False) -> str:
        """Return the identity of the plan; studies that share it share training and evaluation."""
        if legacy:
            parts = {"task": self._legacy_task(), "seed": self.seed, "version": LEGACY_VERSION}
            return fingerprint(parts)
        return fingerprint({"family": self.family(), "metrics": self.identity.evaluation_digest})

    def family(self) -> str:
        """Return the identity of the training; studies that share it may differ in metrics."""
        return fingerprint({
            "training": self.identity.training_digest,
            "seed": self.seed,
            "version": VERSION,
        })

    def like(self, spec: Mapping[str, Any]) -> Recipe:
        """Return the same recipe, with metrics apart from training if a stored spec has them so.

        What ``Auto`` has chosen is that of the stored spec, too.
        """
        made = self.chosen_as(spec)
        if is_legacy(spec):
            return made
        stored = spec["task"]
        # a task that had nothing to evaluate by may have it now
        mixed = not stored["evaluation"] and made.has_parts_in(stored["training"])
        return replace(made, apart=not mixed)

    def has_parts_in(self, training: Mapping[str, str]) -> bool:
        """Return whether a stored identity of training has a part of this task's evaluation."""
        evaluation = replace(self, apart=True).identity.evaluation
        return not evaluation.keys().isdisjoint(training)

    def chosen_for(self, num_workers: int) -> Recipe:
        """Return the recipe of a new study: ``Auto`` chooses its algorithm."""
        if not isinstance(self.algorithm, Auto):
            return self
        choice = self.algorithm.chosen(
            self.space, workers=num_workers, num_objectives=len(self.goals.metrics)
        )
        auto = {"choice": choice.name, "reason": choice.reason}
        return replace(self, algorithm=choice.algorithm, auto=auto)

    def chosen_as(self, spec: Mapping[str, Any]) -> Recipe:
        """Return the recipe with the algorithm that ``Auto`` has chosen for a stored study.

        A recipe whose algorithm was given stays as it is.

        Raises:
            AlgorithmError: Another version of thrifty has chosen an algorithm that is unknown here.
        """
        auto = spec.get("auto")
        if not isinstance(self.algorithm, Auto) or auto is None:
            return self
        algorithm = self.algorithm.built(auto["choice"], self.space)
        return replace(self, algorithm=algorithm, auto=auto)

    @property
    def choice(self) -> str:
        """What ``Auto`` has chosen and why, as a line; empty if the algorithm was given."""
        return chosen_text(self.auto)

    def spec(self, *, legacy: bool = False) -> dict[str, Any]:
        """Return the study as plain data; rarely used fields are present only if set."""
        goals = self.goals
        several = len(goals.metrics) > 1
        content = {"version": VERSION, **self.identity.to_json()} if not legacy else None
        spec: dict[str, Any] = {
            "task": content or self._legacy_task(),
            "space": self.space.to_json(),
            "algorithm": repr(self.algorithm),
            "max_epochs": self.algorithm.max_epochs,
            "metric": list(goals.metrics) if several else goals.metrics[0],
            "mode": list(goals.modes) if several else goals.modes[0],
            "seed": self.seed,
        }
        if self.num_seeds > 1:
            spec["seeds"] = self.num_seeds
        if not self.unit.is_epochs:
            spec["unit"] = self.unit.to_json()
        if goals.constraints:
            spec["constraints"] = {name: [b.side, b.limit] for name, b in goals.constraints}
        if self.auto is not None:
            spec["auto"] = dict(self.auto)
        if self.warm_start:
            spec["warm_start"] = list(self.warm_start)
        return spec

    def check_same(self, found: Mapping[str, Any], *, same_plan: bool, where: str) -> None:
        """Raise StudyMismatchError unless the stored spec is that of this study."""
        legacy = is_legacy(found)
        found = {**found, "algorithm": _as_written_now(found.get("algorithm", ""))}
        mine = self.like(found).spec(legacy=legacy)
        keys = [
            key
            for key in dict.fromkeys((*mine, *found))
            if key not in _NOT_COMPARED and found.get(key) != mine.get(key)
        ]
        differing = [
            f"{key} was {domain_text(found.get(key, unset))} and is "
            f"{domain_text(mine.get(key, unset))}"
            for key, unset in ((key, _UNSET.get(key)) for key in keys)
        ]
        compare = _legacy_difference if legacy else _difference
        changed = compare(found.get("task", {}), mine["task"])
        if changed:
            differing.append(changed)
        elif not same_plan and not differing:
            differing.append("it was made by another version of thrifty")
        if not differing:
            return
        advice = "Give this one another name, or restore what has changed"
        if not changed and set(keys) <= {"algorithm", "max_epochs"}:
            if self.extends(found):
                why = self.why_not_longer(found["max_epochs"])
                if not why:
                    return
                raise CannotGrowError(
                    f"from max_epochs={found['max_epochs']} to {self.algorithm.max_epochs}: {why}. "
                    "Or give the longer one another name: in the same database, it trains only "
                    "epochs that no study has trained yet"
                )
            if self._is_shorter_than(found):
                advice = (
                    "A study cannot become shorter: give the stored max_epochs or more, or give "
                    "this one another name"
                )
        if keys == ["seeds"] and not changed:
            advice = (
                "Give this one another name: in the same database, it trains only those seeds of a "
                "configuration that no study has trained yet"
            )
        raise StudyMismatchError(f"{where}: {'; '.join(differing)}. {advice}")

    def extends(self, found: Mapping[str, Any]) -> bool:
        """Return whether the study differs from a stored one only in more trials or epochs."""
        stored = _as_written_now(found.get("algorithm", ""))
        mine = self.chosen_as(found).algorithm
        before: dict[str, int | None] = {}
        length = found.get("max_epochs")
        if isinstance(length, int) and length < mine.max_epochs:
            before["max_epochs"] = length
            if isinstance(mine, Enqueued) and mine.epochs == length:
                before["epochs"] = None  # ``Study.only`` leaves out what was the whole length
        number = re.search(r"\bnum_trials=(\d+)", stored)
        num_trials = getattr(mine, "num_trials", None)
        if mine.can_grow and number is not None and isinstance(num_trials, int):
            if num_trials < int(number[1]):
                return False
            before["num_trials"] = int(number[1])
        return stored != repr(mine) and stored == _text_with(mine, **before)

    def _is_shorter_than(self, found: Mapping[str, Any]) -> bool:
        """Return whether the study differs from a stored one only in a smaller ``max_epochs``."""
        length = found.get("max_epochs")
        is_less = isinstance(length, int) and self.algorithm.max_epochs < length
        return is_less and found["algorithm"] == _text_with(self.algorithm, max_epochs=length)

    def why_not_longer(self, before: int) -> str:
        """Return why what a study of ``before`` epochs has trained and decided would be others.

        Empty if it stays as it is, or if the study is not longer.
        """
        after = self.algorithm.max_epochs
        if after == before:
            return ""
        if self.space.has_horizons:
            return f"the trials of a {type(self.space).__name__} end at horizons of their own"
        if isinstance(self.task, SelfDescribing) and hasattr(self.task, "num_epochs"):
            return f"each trial of {self.task.name!r} reports a fixed number of times"
        changed = self.space.changed_by_length(before=before, after=after)
        if changed is not None:
            name, schedule = changed
            return (
                f"the schedule {schedule} of {name!r} depends on max_epochs, so the first "
                f"{before} epochs would have other values"
            )
        return why_not_longer(self.algorithm, before)

    def _legacy_task(self) -> dict[str, str]:
        with asking_legacy():
            return dict(self.task.identity())


def chosen_text(auto: Mapping[str, str] | None) -> str:
    """Return what ``Auto`` has chosen and why, as a line; empty if it has chosen nothing.

    >>> chosen_text({"choice": "ASHA", "reason": "8 workers never wait for each other in it"})
    'Auto has chosen ASHA: 8 workers never wait for each other in it'
    """
    return "" if auto is None else f"Auto has chosen {auto['choice']}: {auto['reason']}"


def _text_with(algorithm: Algorithm, **options: Any) -> str:
    """Return an algorithm with other options as text; empty if it cannot have them."""
    try:
        changed: Any = replace(algorithm, **options)  # type: ignore[type-var]
    except Exception:  # noqa: BLE001 (a class of the user's may check its options in any way)
        return ""
    return repr(changed)


def _as_written_now(algorithm: str) -> str:
    """Return the text of a stored algorithm as this version writes it."""
    for options in _REMOVED_OPTIONS:
        algorithm = algorithm.replace(options, "")
    for old, new in _RENAMED.items():
        algorithm = re.sub(old, new, algorithm)
    return algorithm


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    training = changes(was["training"], now["training"])
    evaluation = changes(was["evaluation"], now["evaluation"])
    if training:
        return f"the task has changed ({listed([*training, *evaluation])})"
    if evaluation:
        return (
            f"its metrics have changed ({listed(evaluation)}); under another name, what was "
            "trained and is still kept is only evaluated again"
        )
    return ""


def _legacy_difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs between two identities of older versions."""
    texts = [
        key if key == "source" else f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in dict.fromkeys((*now, *was))
        if was.get(key) != now.get(key)
    ]
    return f"the task has changed ({', '.join(texts)})" if texts else ""


def goals_of(spec: Mapping[str, Any]) -> Goals:
    """Return the goals of a stored study."""
    constraints = {n: Bound(*bound) for n, bound in spec.get("constraints", {}).items()}
    return Goals.of(spec["metric"], spec["mode"], constraints=constraints)
