"""The forecast of a study's cost before any training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

from thrifty.core import error_text, plain_logger
from thrifty.pack import Task, Trainable
from thrifty.pack.trial._trial_needs import MemoryForecast, available_memory, flops_per_s, memory_of
from thrifty.plan import ForestStage, SearchPlan, stage_forest
from thrifty.search import Algorithm, History, Trial
from thrifty.space import Config, Space, Timeline, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store._reports import trials_text

from ._goals import Goals
from ._ledger import Ledger
from ._results import lines
from ._sharing_reason import why_nothing_is_shared
from .simulation._synthetic_results import MadeUpRun


logger = plain_logger(__name__)


def unique_epochs(ledger: Ledger) -> list[int]:
    """Return, for each trial, the unique epochs of this trial and those before it together."""
    seen: set[tuple[int, int]] = set()
    counts = []
    for number in range(len(ledger.history)):
        for passed in ledger.places(number):
            for place in passed:
                if place in seen:
                    break  # all earlier epochs are counted as well
                seen.add(place)
        counts.append(len(seen))
    return counts


NUM_SIMULATIONS = 8
MIN_SIMULATIONS = 4
MANY_DECISIONS = 100_000
"""Decisions over all simulations after which a known mean ends the forecast early.

See ``_are_known``.
"""
STANDARD_ERROR = 0.01
"""Standard error of a mean, as a share of the mean, at which the mean counts as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The size of a study, with sharing and without.

    An adaptive algorithm promotes trials by their results, which are not known yet. It is therefore
    simulated on made-up results eight times, or at least four times if the study is large and the
    simulations agree to 1 %. ``unique_epochs`` is the mean, and ``unique_range`` the minimum and
    the maximum. ``exact`` is True if all simulations agree. If they do not, the text calls each
    number that depends on them an estimate. The simulations start from the beginning, also if a
    part of the study has run. A study that is done is not simulated: the numbers are its own.
    ``seconds`` is the time that the unique epochs take. It is known once an earlier run has timed
    epochs of this task (None before).

    Of the unique epochs, ``known_epochs`` are known already, from this study or another one of its
    plan. ``evaluated_epochs`` are only evaluated again: their states are kept, but the metrics have
    changed. The rest is trained. ``known_exact`` is True if all simulations agree on both. The
    text counts in ``unit``. ``memory`` is what trials need at a time, with one base for all and
    with one for each; None if it was not asked for, or the task makes no model without values.
    ``choice`` is the algorithm that ``Auto`` has chosen and the reason; empty without ``Auto``.
    ``why_unshared`` says why no epoch is shared; it is empty if one is.
    """

    num_trials: int
    trial_epochs: float
    unique_epochs: float
    unique_range: tuple[int, int]
    exact: bool
    seconds: float | None
    forest: tuple[ForestStage, ...]
    known_epochs: float = 0.0
    evaluated_epochs: float = 0.0
    known_exact: bool = True
    unit: TimeUnit = EPOCHS
    memory: MemoryForecast | None = None
    choice: str = ""
    why_unshared: str = ""

    @property
    def epochs_to_train(self) -> float:
        """Unique epochs that are neither known nor only evaluated again."""
        return self.unique_epochs - self.known_epochs - self.evaluated_epochs

    @property
    def seconds_to_train(self) -> float | None:
        """Seconds that ``epochs_to_train`` take, if ``seconds`` is known."""
        if self.seconds is None:
            return None
        return self.seconds * self.epochs_to_train / max(self.unique_epochs, 1)

    @property
    def merge_rate(self) -> float:
        """Trial-epochs per epoch that is really trained; at least 1."""
        return self.trial_epochs / max(self.unique_epochs, 1)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return lines("Forecast", self._lines())

    def _lines(self) -> list[str]:
        """Return the text, with "about" before each number that depends on made-up results."""
        is_exact = self.exact and self.known_exact
        about = "" if self.exact else "about "
        unit = self.unit
        low, high = map(unit.count, self.unique_range)
        span = "" if self.exact else f" ({low:,} to {high:,} in simulations)"
        saved = 1 - 1 / max(self.merge_rate, 1)
        trials = trials_text(self.num_trials)
        trial_epochs = f"{unit.count(self.trial_epochs):,.0f}"
        unique = f"{unit.count(self.unique_epochs):,.0f}"
        rate = f"merge rate {about}{self.merge_rate:.2f}"
        out = [
            f"{trials}, {about}{trial_epochs} trial-{_noun(unit, trial_epochs)}",
            f"{about}{unique} unique {_noun(unit, unique)} to train{span}",
            f"{rate}: sharing saves {about}{saved:.0%} of the trial-{unit.name}",
        ]
        if self.why_unshared:
            out.append(self.why_unshared)
        if self.known_epochs or self.evaluated_epochs:
            out.append(self._left())
        left_s = self.seconds_to_train
        if left_s is not None and self.epochs_to_train:
            about = "" if is_exact else "about "
            out.append(f"forecast: {about}{left_s:,.1f} s of training")
        if not unit.is_epochs:
            out.append(unit.definition)
        if self.choice:
            out.append(self.choice)
        if not is_exact:
            out.append("estimate: the algorithm reacts to results, so thrifty simulated them")
        return [*out, *([] if self.memory is None else self._needs(self.memory))]

    def _left(self) -> str:
        """Return how many epochs are known or only evaluated again, and what is left to train."""
        is_exact = self.exact and self.known_exact
        known, again, left = (
            f"{'' if is_exact else 'about '}{self.unit.count(value):,.0f}" if value else ""
            for value in (self.known_epochs, self.evaluated_epochs, self.epochs_to_train)
        )
        if known:
            shown = f"{known} {_noun(self.unit, known)} known already"
            shown += f", {again} evaluated again with kept states" if again else ""
        else:
            shown = f"{again} {_noun(self.unit, again)} evaluated again with kept states"
        return f"{shown}: {left or 'nothing'} left to train"

    def _needs(self, memory: MemoryForecast) -> list[str]:
        """Return the memory of trials, and the least time that training takes."""
        alone = memory.least_seconds(self.epochs_to_train, at_once=1)
        if alone is None or memory.flops_per_s is None or alone < _SHORTEST:
            return memory.lines()
        at_once = max(1, min(self.num_trials, memory.num_trials(shared=True)[0]))
        packed = memory.least_seconds(self.epochs_to_train, at_once=at_once)
        text = f"time: at least {_duration(alone)} one trial at a time"
        if at_once > 1 and packed is not None and packed < alone:
            text += f", {_duration(packed)} in packs of {at_once}"
        rate = f"{memory.flops_per_s / 1e9:,.0f} GFLOP/s"
        return [*memory.lines(), f"{text}, if products take all of it ({rate}, measured now)"]


def _noun(unit: TimeUnit, number: str) -> str:
    """Return the name of a unit as it stands after a number."""
    return unit.name.removesuffix("s") if number == "1" else unit.name


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


_SHORTEST = 0.1
"""Least times below this many seconds are not shown: they say nothing of a real run."""

NUM_SAMPLED = 4
"""Configurations whose memory is computed."""


def memory_forecast(
    task: Task | Trainable, space: Space, *, max_epochs: int, seed: int, real: bool
) -> MemoryForecast | None:
    """Return the memory of some trials of a study; None if it is not known.

    Args:
        task: The task.
        space: The search space, from which configurations are drawn.
        max_epochs: The length of a trial.
        seed: The seed of the draws.
        real: Whether to make real models if the task makes none on the meta device.
    """
    if not isinstance(task, Task):
        return None
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_SAMPLED):
        values = Timeline(space.sample(rng), epochs=max_epochs).at(0)
        try:
            memory = memory_of(task, values, real=real)
        except Exception as error:  # user code may raise anything
            if real:
                raise
            logger.debug("memory is not forecast: %s", error_text(error))
            return None
        if memory is None:
            return None
        found.append(memory)
    capacity, place = available_memory()
    rate = flops_per_s() if any(each.epoch_flops for each in found) else None
    return MemoryForecast(
        trials=tuple(found), capacity_bytes=capacity, place=place, flops_per_s=rate
    )


def forecast(  # noqa: PLR0913 (the parts of a study, and what is known of it)
    algorithm: Algorithm,
    space: Space,
    *,
    goals: Goals,
    seed: int,
    num_seeds: int = 1,
    epoch_seconds: float | None = None,
    enqueued: Sequence[Config] = (),
    prior: Sequence[Trial] = (),
    known: SearchPlan | None = None,
    unit: TimeUnit = EPOCHS,
) -> Forecast:
    """Simulate the study on made-up results, without any training.

    ``known`` is what the store knows of its plan; timelines of the forecast are added to it. How
    often trials will keep the constraints is not known: the forecast assumes always.
    """
    run = MadeUpRun(
        algorithm, space, num_metrics=len(goals.metrics), seed=seed, num_seeds=num_seeds
    )
    unique: list[int] = []
    trial_epochs: list[int] = []
    counts: list[tuple[int, int]] = []
    num_decisions = 0
    for round_ in range(NUM_SIMULATIONS):
        history = History(prior=prior, max_epochs=algorithm.max_epochs)
        for config in enqueued:
            history.record_enqueued(config)
        run.play(history)
        unique.append(run.plan.num_epochs_needed)
        trial_epochs.append(run.trial_epochs)
        if known is not None:
            counts.append(_count_known(run.plan, known))
        if not round_:
            num_trials, forest = len(history), forest_of(run)
            why = why_nothing_is_shared(timelines_of(run))
        num_decisions += history.num_decisions
        if num_decisions >= MANY_DECISIONS and _are_known(unique, trial_epochs):
            break
    known_epochs, evaluated = (mean(c) for c in zip(*counts, strict=True)) if counts else (0, 0)
    return Forecast(
        num_trials=num_trials,
        trial_epochs=mean(trial_epochs),
        unique_epochs=mean(unique),
        unique_range=(min(unique), max(unique)),
        exact=min(unique) == max(unique) and min(trial_epochs) == max(trial_epochs),
        seconds=None if epoch_seconds is None else mean(unique) * epoch_seconds,
        forest=tuple(forest),
        known_epochs=known_epochs,
        evaluated_epochs=evaluated,
        known_exact=len(set(counts)) <= 1,
        why_unshared=why if unique == trial_epochs else "",
        unit=unit,
    )


def forest_of(ledger: Ledger | MadeUpRun) -> list[ForestStage]:
    """Return the stage forest of a study as it is now, or of a made-up run."""
    ends = Counter(
        (node, trial.target) for trial in ledger.history for node in ledger.nodes_of[trial.number]
    )
    return stage_forest(ledger.plan, ends=ends)


def timelines_of(ledger: Ledger | MadeUpRun) -> list[Timeline]:
    """Return the timelines of all trials in the first seed."""
    return [ledger.plan.nodes[nodes[0]].timeline for nodes in ledger.nodes_of]


def mean_epoch_s(ledger: Ledger) -> float | None:
    """Return the mean time of an epoch, or None if no epoch was timed."""
    spent = [each.seconds for each in ledger.epochs.times.values()]
    return sum(spent) / len(spent) if spent else None


def trained_forecast(
    ledger: Ledger, *, forest: Sequence[ForestStage], epoch_seconds: float | None
) -> Forecast:
    """Return the size of a study that is done; nothing of it is simulated."""
    unique = unique_epochs(ledger)[-1] if len(ledger.history) else 0
    return Forecast(
        num_trials=len(ledger.history),
        trial_epochs=ledger.trial_epochs,
        unique_epochs=unique,
        unique_range=(unique, unique),
        exact=True,
        seconds=None if epoch_seconds is None else unique * epoch_seconds,
        forest=tuple(forest),
        known_epochs=unique,
        why_unshared=""
        if unique < ledger.trial_epochs
        else why_nothing_is_shared(timelines_of(ledger)),
        unit=ledger.unit,
    )


def _count_known(plan: SearchPlan, known: SearchPlan) -> tuple[int, int]:
    """Return how many epochs of a made-up run are known, and of how many only the states are."""
    num_known = num_kept = 0
    for node in plan.nodes:
        if node.farthest <= node.start:
            continue
        place = known.insert(node.timeline)
        for epoch in range(node.start + 1, node.farthest + 1):
            owner = known.owner(place, epoch)
            num_known += epoch in owner.metrics
            num_kept += epoch in owner.kept
    return num_known, num_kept


def _are_known(*samples: Sequence[int]) -> bool:
    """Return whether the mean of each sample is known to ``STANDARD_ERROR``."""
    return all(
        len(sample) >= MIN_SIMULATIONS
        and stdev(sample) / math.sqrt(len(sample)) <= STANDARD_ERROR * mean(sample)
        for sample in samples
    )
