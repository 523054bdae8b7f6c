"""Simulation of a study: trials and their packing are made up, all else is real."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thrifty.core import SystemClock, UsageError, derive_seed
from thrifty.plan import SearchPlan
from thrifty.run import Faults
from thrifty.run._simulated import EpochSeconds, Outcome, Simulated, SimulatedExecutor, as_it_is
from thrifty.search import Algorithm, Auto, Decision, History, Proposal, Stop
from thrifty.space import Space, Timeline
from thrifty.store import Store, StudyMoved
from thrifty.study._goals import Goals, Mode
from thrifty.study._housekeeping import DiskBudget, Packing, PassedStates
from thrifty.study._ledger import Ledger
from thrifty.study._loop import RunLoop, Steering, ask_rng
from thrifty.study._preflight import check_horizons, checked_seeds
from thrifty.study._trial_events import FailureLog

from ._simulation_report import DecisionTimes, Simulation, UnsharedPlan, least_s
from ._synthetic_results import made_up_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpCurve:
    """A metric of workers that do not train; see ``made_up_scores``."""

    metric: str
    mode: Mode
    averages: tuple[str, ...] = ()
    """The averages of weights that have the metric, too; their weights are no better here."""

    def __call__(self, timeline: Timeline, epoch: int, seed: int) -> dict[str, float]:
        """Return the metric after ``epoch`` epochs."""
        (reached,) = made_up_scores(timeline, epoch - 1, epoch, seed=seed)
        value = reached if self.mode == "max" else 1.0 - reached
        twins = {f"{average}_{self.metric}": value for average in self.averages}
        return {self.metric: value, **twins}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStudy:
    """One of several studies that are simulated on one plan."""

    algorithm: Algorithm
    space: Space
    seed: int


class JointHistory(History):
    """The history of all trials, which also keeps a separate history for each study.

    Everything is recorded in both. ``Trial.group`` holds the study and the group in that study.
    """

    def __init__(self, num_studies: int, *, max_epochs: int) -> None:
        super().__init__(max_epochs=max_epochs)
        self.parts = [History(max_epochs=max_epochs) for _ in range(num_studies)]
        self._places: list[tuple[int, int]] = []
        """For each trial, its study and its number in that study."""
        self._numbers: list[list[int]] = [[] for _ in range(num_studies)]
        """For each study, the joint numbers of its trials."""

    def joint(self, study: int, decision: Decision) -> Decision:
        """Return a study's decision in terms of the joint history."""
        numbers = self._numbers[study]
        if decision.trial is not None:
            return replace(decision, trial=numbers[decision.trial])
        assert isinstance(decision, Proposal)
        parent = decision.parent
        if parent is not None:
            parent = numbers[parent[0]], parent[1]
        return replace(decision, group=(study, decision.group), parent=parent)

    def record_decision(self, decision: Decision) -> int:
        """Record a decision in this history and in its study's history."""
        number = super().record_decision(decision)
        if isinstance(decision, Stop) or decision.trial is not None:
            study, own = self._places[number]
            self.parts[study].record_decision(replace(decision, trial=own))
            return number
        study, group = _study_and_group(decision.group)
        parent = decision.parent
        if parent is not None:
            parent = self._places[parent[0]][1], parent[1]
        own = self.parts[study].record_decision(replace(decision, group=group, parent=parent))
        self._places.append((study, own))
        self._numbers[study].append(number)
        return number

    def record_scores(
        self,
        number: int,
        scores: Sequence[float],
        *,
        objectives: Sequence[float] = (),
        violation: float = 0.0,
        standard_errors: Sequence[float] = (),
    ) -> None:
        """Record that a trial has reached its target, here and in its study's history."""
        given: dict[str, Any] = {
            "objectives": objectives,
            "violation": violation,
            "standard_errors": standard_errors,
        }
        super().record_scores(number, scores, **given)
        if self[number].state == "failed":
            return  # not finite: recorded as a failure in both histories
        study, own = self._places[number]
        self.parts[study].record_scores(own, scores, **given)

    def record_failure(self, number: int) -> None:
        """Record that a trial will not reach its target, here and in its study's history."""
        super().record_failure(number)
        study, own = self._places[number]
        self.parts[study].record_failure(own)


class JointAlgorithm(Algorithm):
    """Several algorithms as one: each study is asked for its share of the free workers.

    Each study sees only its own history and has its own random stream.
    """

    def __init__(self, studies: Sequence[SimulatedStudy]) -> None:
        self.max_epochs = studies[0].algorithm.max_epochs
        self._studies = tuple(studies)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return the decisions of all studies."""
        assert isinstance(history, JointHistory)
        share = -(-num // len(self._studies))
        out: list[Decision] = []
        for number, study in enumerate(self._studies):
            own = history.parts[number]
            decisions = study.algorithm.ask(
                own, study.space, num=share, rng=ask_rng(study.seed, own)
            )
            out += [history.joint(number, decision) for decision in decisions]
        return out


def _study_and_group(group: Any) -> tuple[int, Any]:
    study, own = group
    return study, own


def simulate(  # noqa: PLR0913 (one argument for each part of a study and a cluster)
    algorithm: Algorithm | Sequence[Algorithm],
    space: Space | Sequence[Space],
    *,
    metric: str = "score",
    mode: Mode = "max",
    workers: int,
    epoch_s: EpochSeconds,
    outcome: Outcome | None = None,
    start_s: float = 0.0,
    checkpoint_bytes: int = 0,
    faults: Faults | None = None,
    share: bool = True,
    seed: int = 0,
    seeds: int = 1,
    storage: str = "sqlite://",
) -> Simulation:
    """Simulate a study on ``workers`` workers; everything except the training is real.

    The algorithm, the plan, the loop and the database are those of a real run; time is virtual. The
    same arguments give the same simulation, except for what is measured in real time.

    Args:
        algorithm: The algorithm of the study. A list simulates several studies at once on one plan,
            which share what they train.
        space: The hyper-parameters. A list gives one space for each study.
        metric: The metric by which the algorithm compares trials.
        mode: ``"max"`` or ``"min"``.
        workers: The number of workers, each training one trial at a time.
        epoch_s: Seconds of an epoch, or a function of the hyper-parameters' values in that epoch.
        outcome: ``outcome(timeline, epoch, seed)`` gives the metrics after ``epoch`` epochs. It may
            use only the timeline's values in these epochs. By default, the metrics are made up.
        start_s: Seconds until a worker has loaded the state for an assignment.
        checkpoint_bytes: Size of one checkpoint.
        faults: Failures, stragglers and preemptions.
        share: Whether equal prefixes are trained once. If False, each trial trains all of its
            epochs itself, as if each trial had its own worker (a promoted trial continues from its
            own checkpoint).
        seed: Seed of all random draws, by the study and by faults.
        seeds: How many seeds each configuration is trained with; see ``Study``. Made-up results
            differ between seeds by about a fifth as much as between configurations.
        storage: The address of an empty database.

    Raises:
        UsageError: There are no workers, a time is invalid, the studies cannot share a plan, or the
            database is in use.

    >>> import thrifty as th
    >>> space = th.Space(
    ...     lr=th.Choice([0.1, th.Step(0.1, [60]), th.Step(0.1, [30]), th.Step(0.1, [30, 60])])
    ... )
    >>> grid = th.GridSearch(max_epochs=90)
    >>> shared, alone = (
    ...     simulate(grid, space, workers=4, epoch_s=60.0, share=share) for share in (True, False)
    ... )
    >>> shared.busy_s / 3600, alone.busy_s / 3600
    (3.5, 6.0)
    >>> shared.end_to_end_s == alone.end_to_end_s == shared.bound_s == 90 * 60
    True
    """
    goals = Goals.of(metric, mode)
    studies = [
        replace(each, algorithm=each.algorithm.chosen(each.space, workers=workers).algorithm)
        if isinstance(each.algorithm, Auto)
        else each
        for each in _studies_of(algorithm, space, seed=seed)
    ]
    for study in studies:
        check_horizons(study.algorithm, study.space)
        study.space.check(max_epochs=study.algorithm.max_epochs)
    averages = tuple({name: None for study in studies for name in study.space.averages})
    script = _script(studies, share=share, num_seeds=checked_seeds(seeds))
    config = Simulated(
        workers=workers,
        epoch_s=epoch_s,
        outcome=outcome or MadeUpCurve(metric=metric, mode=mode, averages=averages),
        start_s=start_s,
        checkpoint_bytes=checkpoint_bytes,
        faults=faults or Faults(),
        seed=seed,
        shown=script.shown,
    )
    executor = config.open()
    began = time.perf_counter()
    ledger = _play(script, goals, executor=executor, seed=seed, storage=storage)
    driver_s = time.perf_counter() - began
    return _report(ledger, config, executor=executor, share=share, driver_s=driver_s)


def _studies_of(
    algorithm: Algorithm | Sequence[Algorithm], space: Space | Sequence[Space], *, seed: int
) -> list[SimulatedStudy]:
    algorithms = [algorithm] if isinstance(algorithm, Algorithm) else list(algorithm)
    spaces = [space] * len(algorithms) if isinstance(space, Space) else list(space)
    if not algorithms or len(spaces) != len(algorithms):
        raise UsageError(
            f"{len(algorithms)} algorithms and {len(spaces)} spaces: give at least one algorithm, "
            "and one space for "
            "each of them, or one for all"
        )
    if len({each.max_epochs for each in algorithms}) > 1:
        raise UsageError(
            "several studies are simulated on one plan only if they have the same max_epochs; "
            "these have "
            f"{', '.join(str(each.max_epochs) for each in algorithms)}"
        )
    seeds = [seed, *(derive_seed(seed, "study", i) for i in range(1, len(algorithms)))]
    return [
        SimulatedStudy(algorithm=a, space=s, seed=n)
        for a, s, n in zip(algorithms, spaces, seeds, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """What the loop runs on; ``shown`` maps a timeline of the plan to what workers see."""

    algorithm: Algorithm
    space: Space
    history: History
    plan: SearchPlan
    shown: Callable[[Timeline], Timeline]
    num_seeds: int


def _script(studies: Sequence[SimulatedStudy], *, share: bool, num_seeds: int) -> _Script:
    epochs = studies[0].algorithm.max_epochs
    if len(studies) == 1:  # a single algorithm needs no joint layer
        algorithm, history = studies[0].algorithm, History(max_epochs=epochs)
    else:
        algorithm = JointAlgorithm(studies)
        history = JointHistory(len(studies), max_epochs=epochs)
    spaces = [study.space.branches(max_epochs=epochs) for study in studies]
    cuts = sorted({epoch for each in spaces for epoch in each.epochs})
    intervals = tuple(dict.fromkeys(i for each in spaces for i in each.intervals))
    alone = UnsharedPlan(history, num_seeds=num_seeds)
    return _Script(
        algorithm=algorithm,
        space=studies[0].space,
        history=history,
        plan=SearchPlan(cuts=cuts, intervals=intervals) if share else alone,
        shown=as_it_is if share else alone.original,
        num_seeds=num_seeds,
    )


def _play(
    script: _Script, goals: Goals, *, executor: SimulatedExecutor, seed: int, storage: str
) -> Ledger:
    """Run a study's loop on real parts; no other function assembles a simulated study."""
    max_epochs = script.algorithm.max_epochs
    clock = executor.clock
    # No state is ever written, so the folder is never created.
    with Store.open(storage, checkpoints="memory://simulated", clock=clock) as store:
        plan = store.plans.open("simulated", task="simulated")
        info = store.studies.create(
            "simulated",
            plan=plan.id,
            spec={"metric": goals.metrics[0], "mode": goals.modes[0], "max_epochs": max_epochs},
        )
        ledger = Ledger(
            script.plan,
            goals=goals,
            max_epochs=max_epochs,
            clock=clock,
            num_seeds=script.num_seeds,
            study_id=info.id,
            plan_id=plan.id,
        )
        ledger.history = script.history
        with store.lease(info) as lease, _quiet():
            driver = store.drive(lease)
            loop = RunLoop(
                ledger=ledger,
                algorithm=script.algorithm,
                space=script.space,
                executor=executor,
                store=store,
                lease=lease,
                driver=driver,
                clock=SystemClock(),  # writes as many records at once as an equally busy real run
                seed=seed,
                plan_id=plan.id,
                budget=DiskBudget(math.inf),
                observers=(),
                packing=Packing(num_workers=1, fixed_size=1),
                passed=PassedStates(store, clock=clock, shared=False),
                steering=Steering(),
                stop_requested=lambda: False,
            )
            loop.run()
            driver.record([StudyMoved(study=info.id, state="done")])
    return ledger


def _report(
    ledger: Ledger, config: Simulated, *, executor: SimulatedExecutor, share: bool, driver_s: float
) -> Simulation:
    counts, plan = executor.counts, ledger.plan
    return Simulation(
        workers=config.workers,
        shared=share,
        end_to_end_s=executor.clock.monotonic(),
        busy_s=counts.busy_s,
        bound_s=least_s(plan, seconds_of=config.seconds_of, slowdowns=config.slowdowns()),
        num_trials=len(ledger.history),
        num_failed=len(ledger.errors),
        trial_epochs=ledger.trial_epochs,
        unique_epochs=plan.num_epochs_done,
        epochs_redone=counts.epochs - plan.num_epochs_done,
        failures=counts.failures,
        preemptions=counts.preemptions,
        kept_bytes=ledger.kept_bytes,
        best_value=ledger.best_value,
        decision_s=DecisionTimes.of(counts.decisions_s),
        driver_s=driver_s,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of simulated failures, which are counted; other threads log as usual."""
    mine = threading.get_ident()

    def is_real(record: logging.LogRecord) -> bool:
        return record.thread != mine

    loggers = [logging.getLogger(each.__module__) for each in (Ledger, FailureLog)]
    for logger in loggers:
        logger.addFilter(is_real)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_real)
