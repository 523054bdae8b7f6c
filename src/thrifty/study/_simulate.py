"""A study on made-up workers and a virtual clock: how long, how much, with how many workers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thrifty.core import SystemClock, UsageError, derive_seed
from thrifty.plan import SearchPlan
from thrifty.run import Faults
from thrifty.run._simulated import EpochSeconds, Outcome, Simulated, SimulatedExecutor
from thrifty.search import Algorithm, History
from thrifty.space import Space, Timeline
from thrifty.store import Store, StudyMoved

from ._budget import DiskBudget
from ._goals import Goals, Mode
from ._ledger import Ledger
from ._loop import Parts, run_loop
from ._packing import Packing
from ._passed_states import PassedStates
from ._simulation_alone import UnsharedPlan
from ._simulation_bound import least_s
from ._simulation_curves import MadeUpCurve
from ._simulation_joint import JointAlgorithm, JointHistory, Member
from ._simulation_report import DecisionTimes, Simulation


def simulate(  # noqa: PLR0913 (all that a study and a cluster are made of)
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
    storage: str = "sqlite://",
) -> Simulation:
    """Plays a study through as it would run on so many workers: all is real but the training.

    The algorithm, the plan, the loop and the database are those of a real run; time is virtual. The same arguments give the same
    simulation, but for what is measured in real time.

    Args:
        algorithm: what to try; a list: that many studies at once on one plan, which share what they train.
        space: the hyper-parameters; a list: one for each study.
        metric: what the algorithm compares trials by.
        mode: ``"max"`` or ``"min"``.
        workers: how many, each training one trial at a time.
        epoch_s: seconds of an epoch, or a function of the values of the hyper-parameters in that epoch.
        outcome: ``outcome(timeline, epoch, seed)`` gives the metrics after so many epochs; it may look only at what the
            timeline does in these. By default they are made up.
        start_s: until a worker that was given something has loaded its state.
        checkpoint_bytes: of one state.
        faults: failures, stragglers, preemptions.
        share: trains equal prefixes once; False: each trial trains all of its epochs itself, as where each trial has a
            worker (from its own checkpoint where it is promoted).
        seed: of what is drawn, by the study and by faults.
        storage: the address of an empty database.

    Raises:
        UsageError: no workers, a time that makes no sense, studies that cannot share a plan, a database that is in use.

    >>> import thrifty as th
    >>> space = th.Space(lr=th.Choice([0.1, th.Step(0.1, [60]), th.Step(0.1, [30]), th.Step(0.1, [30, 60])]))
    >>> grid = th.GridSearch(max_epochs=90)
    >>> shared, alone = (simulate(grid, space, workers=4, epoch_s=60.0, share=share) for share in (True, False))
    >>> shared.busy_s / 3600, alone.busy_s / 3600
    (3.5, 6.0)
    >>> shared.end_to_end_s == alone.end_to_end_s == shared.bound_s == 90 * 60
    True
    """
    members = _members(algorithm, space, seed=seed)
    goals = Goals.of(metric, mode)
    for member in members:
        member.space.check(max_epochs=member.algorithm.max_epochs)
    script = _script(members, share=share)
    config = Simulated(
        workers=workers,
        epoch_s=epoch_s,
        outcome=outcome or MadeUpCurve(metric=metric, mode=mode),
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


def _members(
    algorithm: Algorithm | Sequence[Algorithm], space: Space | Sequence[Space], *, seed: int
) -> list[Member]:
    algorithms = [algorithm] if isinstance(algorithm, Algorithm) else list(algorithm)
    spaces = [space] * len(algorithms) if isinstance(space, Space) else list(space)
    if not algorithms or len(spaces) != len(algorithms):
        raise UsageError(
            f"{len(algorithms)} algorithms and {len(spaces)} spaces: give at least one algorithm, and one space for "
            "each of them, or one for all"
        )
    if len({each.max_epochs for each in algorithms}) > 1:
        raise UsageError(
            "several studies are simulated on one plan only if they have the same max_epochs; these have "
            f"{', '.join(str(each.max_epochs) for each in algorithms)}"
        )
    seeds = [seed, *(derive_seed(seed, "study", i) for i in range(1, len(algorithms)))]
    return [
        Member(algorithm=a, space=s, seed=n)
        for a, s, n in zip(algorithms, spaces, seeds, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """What the loop is to play; ``shown`` is what workers see of a timeline of the plan."""

    algorithm: Algorithm
    space: Space
    history: History
    plan: SearchPlan
    shown: Callable[[Timeline], Timeline]


def _script(members: Sequence[Member], *, share: bool) -> _Script:
    epochs = members[0].algorithm.max_epochs
    if len(members) == 1:  # there is no need to ask it through another layer
        algorithm, history = members[0].algorithm, History(max_epochs=epochs)
    else:
        algorithm = JointAlgorithm(members)
        history = JointHistory(len(members), max_epochs=epochs)
    spaces = [member.space.branches(max_epochs=epochs) for member in members]
    cuts = sorted({epoch for each in spaces for epoch in each.epochs})
    intervals = tuple(dict.fromkeys(i for each in spaces for i in each.intervals))
    alone = UnsharedPlan(history)
    return _Script(
        algorithm=algorithm,
        space=members[0].space,
        history=history,
        plan=SearchPlan(cuts=cuts, intervals=intervals) if share else alone,
        shown=_as_it_is if share else alone.original,
    )


def _as_it_is(timeline: Timeline) -> Timeline:
    return timeline


def _play(
    script: _Script,
    goals: Goals,
    *,
    executor: SimulatedExecutor,
    seed: int,
    storage: str,
) -> Ledger:
    """Runs the loop of a study on real parts; the one place that knows what it is made of."""
    max_epochs = script.algorithm.max_epochs
    clock = executor.clock
    # no state is ever written, so the folder is never made
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
            study_id=info.id,
            plan_id=plan.id,
        )
        ledger.history = script.history
        with store.lease(info) as lease, _quiet():
            driver = store.drive(lease)
            parts = Parts(
                ledger=ledger,
                algorithm=script.algorithm,
                space=script.space,
                executor=executor,
                store=store,
                lease=lease,
                driver=driver,
                clock=SystemClock(),  # writes in groups as large as in a run that is as busy
                seed=seed,
                plan_id=plan.id,
                budget=DiskBudget(math.inf),
                observers=(),
                packing=Packing(num_workers=1, fixed_size=1),
                passed=PassedStates(store, clock=clock, shared=False),
            )
            run_loop(parts, stop_requested=lambda: False)
            driver.record([StudyMoved(study=info.id, state="done")])
    return ledger


def _report(
    ledger: Ledger,
    config: Simulated,
    *,
    executor: SimulatedExecutor,
    share: bool,
    driver_s: float,
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
    """Made-up failures are counted, not logged; whatever else runs in this process is logged as ever."""
    mine = threading.get_ident()

    def is_real(record: logging.LogRecord) -> bool:
        return record.thread != mine

    logger = logging.getLogger(Ledger.__module__)
    logger.addFilter(is_real)
    try:
        yield
    finally:
        logger.removeFilter(is_real)
