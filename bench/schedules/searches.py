"""Searches for the best configuration of a table: ours on a plan with shared stages, and peers.

Ours run in ``thrifty.simulate``: algorithm, plan, loop and database are those of a study, and
curves come from the table. Peers have no shared stages, so each of their trials trains all of its
epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import thrifty as th
from bench.schedules.workloads import Table, key_of
from thrifty.search import Algorithm, Auto, Decision, History, Proposal
from thrifty.space import Space, Timeline


ROUNDING = 1e-9


class Found(NamedTuple):
    """What a search has cost, and whether it has found a configuration as good as asked for.

    ``seconds`` are simulated: an epoch takes one. ``decisions_ms`` is the mean time of a decision.
    """

    epochs: int
    seconds: float
    is_found: bool
    decisions_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilFound(Algorithm):
    """Asks another algorithm until a trial ends as good as ``target``.

    If that one ends before, the trials that wait go on to their ends, the deepest first and then
    the best: what a user would do who knows that there is a better one.
    """

    max_epochs: int
    inner: Algorithm
    target: float

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what to train next, or nothing once the target is reached."""
        ended = history.leaderboard(self.max_epochs)
        if len(ended) and ended[0][0] >= self.target:
            return []
        decisions = self.inner.ask(history, space, num=num, rng=rng)
        if decisions or history.num_running:
            return decisions
        waiting = [t for t in history if t.state == "waiting" and t.reached < self.max_epochs]
        waiting.sort(key=lambda t: (-t.reached, -t.scores[-1], t.number))
        return [Proposal(target=self.max_epochs, trial=trial.number) for trial in waiting[:num]]


def algorithms(epochs: int, num: int) -> dict[str, Algorithm]:
    """Return our algorithms for a grid of ``num`` configurations."""
    sampler = th.GridSampler(levels=num)
    options: dict[str, Any] = {"max_epochs": epochs, "num_trials": num, "sampler": sampler}
    return {
        "freeze-thaw": th.FreezeThaw(**options, budget_epochs=epochs * num),
        "Auto": Auto(max_epochs=epochs, num_trials=num),
        "ASHA": th.ASHA(**options),
        "Hyperband": th.Hyperband(**options),
        "random order": th.RandomSearch(**options),
    }


def ours(name: str, table: Table, *, regret: float, order: int, workers: int = 1) -> Found:
    """Search by one of our algorithms, with the options of each choice in a random order."""
    epochs, num = table.workload.epochs, len(table.curves)
    space, algorithm = table.workload.space(order), algorithms(epochs, num)[name]
    if isinstance(algorithm, Auto):
        algorithm = algorithm.chosen(space, workers=workers).algorithm
    target = -(table.target(regret) + ROUNDING)
    search = UntilFound(inner=algorithm, max_epochs=epochs, target=target)
    ends, report = _simulated(search, table, order=order, workers=workers)
    return Found(
        epochs=report.unique_epochs,
        seconds=report.end_to_end_s,
        is_found=bool(ends) and min(ends) <= -target,
        decisions_ms=1e3 * report.decision_s.median,
    )


class Ended(NamedTuple):
    """What a search has cost that ended by itself, and the regret of the best trial that ended.

    ``seconds`` are simulated: an epoch takes one.
    """

    epochs: int
    seconds: float
    regret: float


def ended(name: str, table: Table, *, order: int, workers: int = 1) -> Ended:
    """Run one of our algorithms with its own budget until it ends; see ``OWN_BUDGETS``."""
    algorithm = OWN_BUDGETS[name](table.workload.epochs, len(table.curves))
    if isinstance(algorithm, Auto):
        space = table.workload.space(order)
        algorithm = algorithm.chosen(space, workers=workers).algorithm
    return until_its_end(algorithm, table, order=order, workers=workers)


def until_its_end(algorithm: Algorithm, table: Table, *, order: int, workers: int = 1) -> Ended:
    """Run an algorithm on a table until it ends."""
    ends, report = _simulated(algorithm, table, order=order, workers=workers)
    regret = table.regret(min(ends)) if ends else 1.0
    return Ended(report.unique_epochs, report.end_to_end_s, regret)


OWN_BUDGETS: dict[str, Callable[[int, int], Algorithm]] = {
    "Auto": lambda epochs, num: Auto(max_epochs=epochs, num_trials=num),
    "ASHA": lambda epochs, num: th.ASHA(
        max_epochs=epochs, num_trials=num, sampler=th.GridSampler(levels=num)
    ),
    "freeze-thaw": lambda epochs, num: th.FreezeThaw(
        max_epochs=epochs, num_trials=num, sampler=th.GridSampler(levels=num)
    ),
}


def _simulated(
    algorithm: Algorithm, table: Table, *, order: int, workers: int
) -> tuple[list[float], th.Simulation]:
    """Return the losses of the trials that end, in a study of table look-ups, and its report."""
    ends: list[float] = []

    def outcome(timeline: Timeline, epoch: int, _: int) -> dict[str, float]:
        loss = table.curves[key_of(timeline.config)][epoch - 1]
        if epoch == table.workload.epochs:
            ends.append(loss)
        return {"loss": loss}

    report = th.simulate(
        algorithm,
        table.workload.space(order),
        metric="loss",
        mode="min",
        workers=workers,
        epoch_s=1.0,
        outcome=outcome,
        seed=order,
    )
    return ends, report


def optuna(pruner: str, table: Table, *, regret: float, order: int) -> Found:
    """Search by Optuna's TPE with a pruner: one suggestion for each choice, one trial at a time.

    A pruned trial cannot go on, and the sampler may suggest a configuration again. The search ends
    after as many epochs as all configurations have together.
    """
    import optuna as library  # noqa: PLC0415 - an optional peer

    library.logging.set_verbosity(library.logging.WARNING)
    epochs, target = table.workload.epochs, table.target(regret) + ROUNDING
    pruners = {
        "Hyperband": lambda: library.pruners.HyperbandPruner(
            min_resource=1, max_resource=epochs, reduction_factor=3
        ),
        "halving": lambda: library.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=3
        ),
    }
    choices = _choices(table, order)
    study = library.create_study(
        direction="minimize",
        sampler=library.samplers.TPESampler(seed=order),
        pruner=pruners[pruner](),
    )
    spent, decisions_s, num = 0, 0.0, 0
    while spent < epochs * len(table.curves):
        began = time.perf_counter()
        trial = study.ask()
        picked = {
            name: options[trial.suggest_categorical(name, list(range(len(options))))]
            for name, options in choices.items()
        }
        decisions_s, num = decisions_s + time.perf_counter() - began, num + 1
        curve = table.curves[key_of({**table.workload.params, **picked})]
        for epoch, loss in enumerate(curve, start=1):
            spent += 1
            trial.report(loss, epoch)
            if epoch < epochs and trial.should_prune():
                study.tell(trial, state=library.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, curve[-1])
            if curve[-1] <= target:
                return Found(spent, float(spent), True, 1e3 * decisions_s / num)
    return Found(spent, float(spent), False, 1e3 * decisions_s / num)


def ray_asha(table: Table, *, regret: float, order: int) -> Found:
    """Search the grid by Ray Tune's ASHA, one trial at a time.

    The scheduler is asked as Ray's loop asks it, without its processes. It stops trials for good.
    """
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler  # noqa: PLC0415

    epochs, target = table.workload.epochs, table.target(regret) + ROUNDING
    scheduler: Any = AsyncHyperBandScheduler(
        metric="loss", mode="min", max_t=epochs, grace_period=1, reduction_factor=3
    )
    spent = 0
    for number, config in enumerate(_in_order(table, order)):
        trial: Any = _RayTrial(str(number))
        scheduler.on_trial_add(None, trial)
        curve = table.curves[key_of(config)]
        for epoch, loss in enumerate(curve, start=1):
            spent += 1
            result = {"training_iteration": epoch, "loss": loss}
            if epoch == epochs:
                scheduler.on_trial_complete(None, trial, result)
                if loss <= target:
                    return Found(spent, float(spent), True)
            elif scheduler.on_trial_result(None, trial, result) != TrialScheduler.CONTINUE:
                break
    return Found(spent, float(spent), False)


class _RayTrial:
    """What Ray's scheduler reads of a trial."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


def _choices(table: Table, order: int) -> dict[str, Sequence[Any]]:
    space = table.workload.space(order)
    names = [n for n, value in table.workload.params.items() if isinstance(value, th.Choice)]
    return {name: space[name].options for name in names}


def _in_order(table: Table, order: int) -> list[dict[str, Any]]:
    """Return all configurations in a random order."""
    configs = list(table.workload.space().grid())
    return [dict(configs[i]) for i in np.random.default_rng(order).permutation(len(configs))]


Search = Callable[..., Found]


def peers() -> tuple[dict[str, Search], dict[str, str]]:
    """Return the searches of peers that are installed, and why the others are missing."""
    found: dict[str, Search] = {}
    missing: dict[str, str] = {}
    try:
        import_module("optuna")
    except ImportError as error:
        missing["Optuna"] = str(error)
    else:
        for name in ("Hyperband", "halving"):
            found[f"Optuna TPE + {name}"] = _bound(name)
    try:
        import_module("ray.tune")
    except ImportError as error:
        missing["Ray Tune"] = str(error)
    else:
        found["Ray Tune ASHA"] = ray_asha
    return found, missing


def _bound(pruner: str) -> Search:
    def search(table: Table, *, regret: float, order: int) -> Found:
        return optuna(pruner, table, regret=regret, order=order)

    return search
