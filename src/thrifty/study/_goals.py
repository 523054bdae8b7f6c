"""What a study aims at and counts in: metrics to optimise, constraints, and units of epochs.

An epoch of a task has a number of steps and tokens, so that amounts become epochs.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thrifty.core import TaskError, UsageError, error_text
from thrifty.pack import HyperParameters, Task, Trainable, measure_data
from thrifty.pack._backend import no_exits
from thrifty.search import Algorithm
from thrifty.space import Amount, Domain, EpochSize, Schedule, Space, TimeUnit
from thrifty.space._domain import amounts_in, in_epochs


Mode = Literal["max", "min"]

_FLOOR = -10.0
"""Below the score of every feasible trial and above that of every infeasible one."""


_SHRINKING = re.compile(
    r"loss(es)?|r?mse|mae|mape|r?msle|err(ors?)?|perplexity|ppl|nll|bp[bc]|[cw]er|fid|regret|"
    r"crossentropy|xent"
)
"""Pattern of the words in the names of metrics of which smaller values are better."""


def is_better_smaller(metric: str) -> bool:
    """Return whether a metric's name says that smaller values are better.

    >>> [is_better_smaller(name) for name in ("valid_loss", "val/mse", "accuracy", "lossless")]
    [True, True, False, False]
    >>> is_better_smaller("neg_mean_squared_error")  # a score of scikit-learn
    False
    """
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    is_negated = words & {"neg", "negative", "inverse"}
    return not is_negated and any(_SHRINKING.fullmatch(word) for word in words)


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on a metric; created by ``at_most`` and ``at_least``.

    A limit of the side ``in_the_end`` is one like ``at_most`` that trials break until they end. It
    says which of them may be the best, but they are compared without it on their way.
    """

    side: Literal["at_most", "at_least", "in_the_end"]
    limit: float

    def __post_init__(self) -> None:
        if not _is_number(self.limit):
            raise UsageError(f"{self.side}({self.limit!r}): the limit must be a finite number")

    def excess(self, value: float) -> float:
        """Return by how much a value breaks the limit, or 0 if it keeps the limit.

        The excess is a share of the limit, or the plain difference if the limit is 0.

        >>> at_most(4.0).excess(5.0), at_least(4.0).excess(5.0), at_most(0.0).excess(5.0)
        (0.25, 0.0, 5.0)
        """
        over = self.limit - value if self.side == "at_least" else value - self.limit
        if over <= 0:
            return 0.0
        share = over / abs(self.limit) if self.limit else over
        # An excess must stay positive and finite.
        return min(max(share, sys.float_info.min), sys.float_info.max)


def at_most(limit: float) -> Bound:
    """Return the constraint that a metric must not exceed a limit.

    Raises:
        UsageError: The limit is not a finite number.

    >>> at_most(5.0)
    Bound(side='at_most', limit=5.0)
    """
    return Bound("at_most", limit)


def at_least(limit: float) -> Bound:
    """Return the constraint that a metric must not fall below a limit.

    Raises:
        UsageError: The limit is not a finite number.

    >>> at_least(0.9)
    Bound(side='at_least', limit=0.9)
    """
    return Bound("at_least", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The objectives of a study (rungs compare trials by the first) and its constraints.

    >>> goals = Goals.of("accuracy", "max", constraints={"latency_ms": 5.0})
    >>> goals.violation({"accuracy": 0.9, "latency_ms": 6.0})
    0.2
    >>> goals.score({"accuracy": 0.9, "latency_ms": 6.0}) < goals.score({
    ...     "accuracy": 0.1,
    ...     "latency_ms": 4.0,
    ... })
    True
    """

    metrics: tuple[str, ...]
    modes: tuple[Mode, ...]
    constraints: tuple[tuple[str, Bound], ...] = ()

    @classmethod
    def of(
        cls,
        metric: str | Sequence[str],
        mode: Mode | Sequence[Mode],
        *,
        constraints: Mapping[str, Bound | float] | None = None,
    ) -> Goals:
        """Return the goals that the arguments of a study describe.

        Raises:
            UsageError: There is no metric, or not exactly one mode for each metric.
        """
        metrics = (metric,) if isinstance(metric, str) else metric
        if not isinstance(metrics, Sequence) or not all(isinstance(m, str) for m in metrics):
            raise UsageError(
                f"metric is {metric!r}; it must be a metric's name, or a list of names"
            )
        if not metrics or not all(metrics) or len(set(metrics)) < len(metrics):
            raise UsageError(f"metric is {metric!r}; name at least one metric, each only once")
        modes = (mode,) if isinstance(mode, str) else mode
        if not isinstance(modes, Sequence) or any(m not in ("max", "min") for m in modes):
            raise UsageError(f'mode is {mode!r}; it must be "max" or "min", or a list of these')
        if len(modes) != len(metrics):
            raise UsageError(
                f'metric is {metric!r} and mode is {mode!r}; give each metric its "max" or "min"'
            )
        if not isinstance(constraints or {}, Mapping):
            raise UsageError(
                f'constraints is {constraints!r}; write {{"a metric": 5.0}} for at most 5, or '
                "at_least(5.0)"
            )
        bounds = tuple((name, _bound(b)) for name, b in (constraints or {}).items())
        return cls(metrics=tuple(metrics), modes=tuple(modes), constraints=bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """All metrics that the study needs, each once."""
        return tuple(dict.fromkeys((*self.metrics, *(name for name, _ in self.constraints))))

    @property
    def sign(self) -> float:
        """1 if higher is better for the first objective, else -1."""
        return 1.0 if self.modes[0] == "max" else -1.0

    def check(self, known: Collection[str]) -> None:
        """Raise TaskError unless all needed metrics are known."""
        for name in self.names:
            if name not in known:
                what = "metric" if name in self.metrics else "constrained metric"
                raise TaskError(
                    f"the study's {what} {name!r} is not among the task's metrics "
                    f"({', '.join(sorted(known))}); name one of these, or return it for each batch"
                )

    def objectives(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return all objectives, with signs such that higher is better."""
        pairs = zip(self.metrics, self.modes, strict=True)
        return tuple(metrics[name] if mode == "max" else -metrics[name] for name, mode in pairs)

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return all objectives by name, as the task measured them."""
        return {name: metrics[name] for name in self.metrics}

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the first objective; a value that is not finite counts as the worst."""
        value = metrics[self.metrics[0]]
        return value if math.isfinite(value) else -self.sign * math.inf

    def not_finite(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the needed metrics that are not finite."""
        return [name for name in self.names if not math.isfinite(metrics[name])]

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return the sum of all excesses, each as a share of its limit; 0 if all limits hold."""
        return _violation(metrics, self.constraints)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return a number to compare trials by; higher is better.

        It is ``-inf`` if a needed metric is not finite. A feasible trial is better than an
        infeasible one, and among infeasible trials the least violation is the best. Without
        constraints, the score is the first objective, with its sign changed if lower is better.
        Limits that hold only in the end do not count.

        References:
            Deb, "An efficient constraint handling method for genetic algorithms", 2000.
        """
        # A fast path, because this runs for each epoch of each trial.
        for name in self.metrics:
            if not math.isfinite(metrics[name]):
                return -math.inf
        score = self.sign * metrics[self.metrics[0]]
        if not self.constraints:
            return score
        if self.not_finite(metrics):
            return -math.inf
        always = [(name, bound) for name, bound in self.constraints if bound.side != "in_the_end"]
        if not always:
            return score
        violation = _violation(metrics, always)
        return _FLOOR - math.log1p(violation) if violation else _above_floor(score)


def _violation(metrics: Mapping[str, float], constraints: Sequence[tuple[str, Bound]]) -> float:
    total = sum(bound.excess(metrics[name]) for name, bound in constraints)
    return min(total, sys.float_info.max)


def _above_floor(score: float) -> float:
    """Squeeze scores below zero into ``(_FLOOR, 0)``, in order and almost as precise.

    The logarithm comes first, because a bounded function of the score itself would make large ones
    equal.
    """
    if score >= 0:
        return score
    depth = math.log1p(-score)
    return -depth / (1 - depth / _FLOOR)


def _bound(value: object) -> Bound:
    if isinstance(value, Bound):
        return value
    if not _is_number(value):
        raise UsageError(
            f"a constraint is {value!r}; it must be a finite number (at most so much), or "
            "at_least(number)"
        )
    return Bound("at_most", value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def unit_of(algorithm: Algorithm, space: Space, size: EpochSize) -> TimeUnit:
    """Return the unit in which a study shows what it trains: that of its horizon or its schedules.

    Raises:
        UsageError: The task does not say how much of it an epoch has.
    """
    amounts = (*algorithm.amounts(), *space.amounts())
    return size.unit(amounts[0].unit) if amounts else TimeUnit()


@dataclass(kw_only=True)
class EpochSizes:
    """The epochs of one study, measured when an amount is first turned into epochs.

    Nothing is loaded if the task says everything that the units need. A trainable has no data to
    load, so it needs no space here.
    """

    task: Task | Trainable
    space: Space | None
    seed: int
    _known: EpochSize | None = field(default=None, repr=False)

    def loads_data(self, amounts: Iterable[Amount]) -> bool:
        """Return whether data have to be loaded to know the epochs of some amounts."""
        units = {amount.unit for amount in amounts} - {"epochs"}
        if not units or not isinstance(self.task, Task):
            return False
        says = getattr(self.task, "tokens_per_sample", None) is not None
        return self.task.steps_per_epoch is None or ("tokens" in units and not says)

    def of(self, amounts: Iterable[Amount]) -> EpochSize:
        """Return the size of an epoch in the units of some amounts.

        Raises:
            UsageError: The task does not say it; the message says what to set.
        """
        units = {amount.unit for amount in amounts} - {"epochs"}
        if not units:
            return EpochSize()
        if self._known is None:
            self._known = self._measured()
        for unit in units:
            self._known.unit(unit)
        return self._known

    def in_epochs(self, value: Any) -> Any:
        """Return a value, a mapping of values or ``None`` with all amounts in epochs.

        Raises:
            UsageError: The task does not say how large an epoch is.
        """
        if isinstance(value, Mapping):
            return {name: self.in_epochs(item) for name, item in value.items()}
        return in_epochs(value, self.of(amounts_in(value)))

    def _measured(self) -> EpochSize:
        name = type(self.task).__name__
        steps = getattr(self.task, "steps_per_epoch", None)
        set_steps = f"set {name}.steps_per_epoch, the optimizer steps of an epoch"
        if not isinstance(self.task, Task):
            if steps is None:
                set_steps = f"give {name} steps_per_epoch, the optimizer steps of an epoch"
            return EpochSize(
                steps=steps,
                why_no_steps=set_steps,
                why_no_tokens=f"{name} does not count tokens; write steps",
            )
        batch_size = self._fixed(self.task.batch_size)
        per_sample = getattr(self.task, "tokens_per_sample", None)
        if batch_size is None:
            why = f"the batch size follows hyper-parameter {self.task.batch_size!r}"
            return EpochSize(
                steps=steps,
                why_no_steps=f"{why}; {set_steps}",
                why_no_tokens=f"{why}, so the tokens of a step vary; write steps",
            )
        if steps is None or per_sample is None:
            try:
                found_steps, found_tokens = self._data(batch_size)
            except UsageError as error:
                if steps is None:
                    return EpochSize(why_no_steps=str(error), why_no_tokens=str(error))
                found_steps, found_tokens = steps, None
            steps = found_steps if steps is None else steps
            per_sample = found_tokens if per_sample is None else per_sample
        return EpochSize(
            steps=steps,
            tokens=None if per_sample is None else steps * batch_size * per_sample,
            why_no_tokens=f"set {name}.tokens_per_sample; if samples vary in length, write steps",
        )

    def _data(self, batch_size: int) -> tuple[int, int | None]:
        """Return the steps of a pass over the data, and the tokens of a sample if the data say it.

        Raises:
            UsageError: The data cannot be loaded, or depend on hyper-parameters that vary.
        """
        name = type(self.task).__name__
        set_steps = f"set {name}.steps_per_epoch, the optimizer steps of an epoch"
        assert self.space is not None
        names = self.space.names
        fixed = {each: self.space[each] for each in names if self._is_fixed(each)}
        hp = HyperParameters(fixed)
        why = ""
        assert isinstance(self.task, Task)
        try:
            with no_exits():
                size = measure_data(self.task, hp, batch_size=batch_size, seed=self.seed)
        except Exception as error:  # noqa: BLE001 (whatever the task's code raises)
            why = f"{name}.data(hp) cannot be loaded before training ({error_text(error)})"
        varying = sorted((hp.names_read & {*names}) - fixed.keys())
        if varying:
            why = (
                f"the data depend on hyper-parameter {varying[0]!r}, and may have more or fewer "
                "batches"
            )
        if why:
            raise UsageError(f"{why}; {set_steps}")
        return size.steps, size.tokens_per_sample

    def _is_fixed(self, name: str) -> bool:
        assert self.space is not None
        return not isinstance(self.space[name], Domain | Schedule)

    def _fixed(self, batch_size: int | str) -> int | None:
        """Return the batch size if it is one number, else None."""
        if isinstance(batch_size, str):
            assert self.space is not None
            known = batch_size in self.space.names and self._is_fixed(batch_size)
            found = self.space[batch_size] if known else None
            return found if isinstance(found, int) else None
        return batch_size
