"""The schedules of ``bench_rex``, as functions of the learning rate and the budget in epochs.

Decay on plateau is a plain loop, because the rule needs to see the loss. Its trials are those of a
study in every other respect (initial weights, batches). One long run serves all budgets, as what it
does at epoch 10 depends on nothing after. ``torch.optim.lr_scheduler.ReduceLROnPlateau`` watches
the validation loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import thrifty as th
from thrifty.pack import AutoBackend, EpochPlan, Member, borrowed_streams


Make = Callable[[float, int], th.Schedule]

SCHEDULES: Mapping[str, Make] = {
    "REX": lambda lr, _: th.REX(lr),
    "linear": lambda lr, _: th.Linear(lr),
    "cosine": lambda lr, _: th.Cosine(lr),
    "step": lambda lr, epochs: th.Step(lr, [epochs / 2, 3 * epochs / 4]),
    "exponential": lambda lr, epochs: th.Exponential(lr, gamma=math.exp(-3 / epochs)),
    "OneCycle": lambda lr, _: th.OneCycle(lr, warmup=0.5, div=10.0, final_div=10.0, shape="linear"),
    "WSD": lambda lr, epochs: th.WSD(lr, cooldown=0.2 * epochs),
    "constant": lambda lr, _: th.Constant(lr),
}
"""The schedules of Chen et al., section 4, with their settings; WSD is our addition.

Decay on plateau follows no clock and is a plain loop, below.
"""

PLATEAU = "plateau"
NAMES = (*SCHEDULES, PLATEAU)

PAPER: Mapping[str, str] = {
    "REX": "70 / 92",
    "linear": "11 / 70",
    "cosine": "6 / 64",
    "OneCycle": "13 / 45",
    "step": "5 / 25",
}
"""Results of Chen et al., Table 1.

The percentages of all settings and budgets where a schedule was the best / among the three best.
"""


def space_of(named_rates: Sequence[tuple[str, float]], epochs: int) -> th.Space:
    """Return a space of one configuration for each schedule and learning rate.

    OneCycle moves the momentum, too (0.95, 0.85, 0.95).
    """
    schedules = [SCHEDULES[name](lr, epochs) for name, lr in named_rates]
    cycles = [s for s in schedules if isinstance(s, th.OneCycle)]
    if not cycles:
        return th.Space(lr=th.Choice(schedules))
    # The momentum is a cycle upside down.
    share = 0.85 / 0.95
    swing = th.OneCycle(0.85, warmup=0.5, div=share, final_div=share, shape="linear")
    return th.Space(lr=th.Choice(schedules), momentum=th.Choice([swing]).when(lr=cycles))


# -- decay on plateau --------------------------------------------------------------------


FACTOR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: learning rate, epochs of patience, seed and length in epochs."""

    rate: float
    patience: int
    seed: int
    epochs: int


@dataclass(slots=True)
class Watched:
    """State of the plateau rule for one run."""

    rule: ReduceLROnPlateau
    curve: list[Mapping[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> Watched:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.rate)
        return cls(ReduceLROnPlateau(optimizer, factor=FACTOR, patience=run.patience))

    def plan(self) -> EpochPlan:
        (group,) = self.rule.optimizer.param_groups
        return EpochPlan(epoch=len(self.curve), values={"lr": group["lr"]})

    def note(self, metrics: Mapping[str, float]) -> None:
        self.curve.append(metrics)
        self.rule.step(metrics["valid_loss"])


def train(task: th.Task, runs: Sequence[Run]) -> list[list[Mapping[str, float]]]:
    """Train all runs; return the metrics of each after epochs 1, 2, ..., fewer if it failed."""
    watched = [Watched.of(run) for run in runs]
    with borrowed_streams():
        backend = AutoBackend(task)
        for slot, run in enumerate(runs):
            backend.put(slot, Member(values={"lr": run.rate}, seed=run.seed))
        under_way = waiting = set(range(len(runs)))
        while under_way:
            outcomes = backend.step({slot: watched[slot].plan() for slot in waiting})
            failed = {slot for slot, o in outcomes.items() if isinstance(o, Exception)}
            for slot in outcomes.keys() - failed:
                watched[slot].note(outcomes[slot])
            ended = {s for s in outcomes if len(watched[s].curve) >= runs[s].epochs} | failed
            for slot in ended:
                backend.release(slot)
            under_way = under_way - ended
            waiting = set(outcomes) - ended
    return [one.curve for one in watched]


def plateau(
    task: th.Task,
    *,
    rates: Sequence[float],
    patiences: Sequence[int],
    budgets: Sequence[int],
    seeds: tuple[int, Sequence[int]],
) -> dict[int, tuple[float, list[float]]]:
    """Return the best rate and the test metrics for each budget, in epochs.

    The rate is the best at the first seed, and the metrics are those at each of the other seeds.
    """
    tuning_seed, test_seeds = seeds
    longest = max(budgets)
    options = [(rate, patience) for rate in rates for patience in patiences]
    tuned = train(
        task, [Run(rate=r, patience=p, seed=tuning_seed, epochs=longest) for r, p in options]
    )
    chosen = {}
    for epochs in budgets:
        values = [_at(curve, epochs, "valid") for curve in tuned]
        chosen[epochs] = options[values.index(min(values))]
    runs = [
        Run(
            rate=rate,
            patience=patience,
            seed=seed,
            epochs=max(e for e, option in chosen.items() if option == (rate, patience)),
        )
        for rate, patience in dict.fromkeys(chosen.values())
        for seed in test_seeds
    ]
    curves = dict(zip(((r.rate, r.patience, r.seed) for r in runs), train(task, runs), strict=True))
    return {
        epochs: (option[0], [_at(curves[*option, seed], epochs, "test") for seed in test_seeds])
        for epochs, option in chosen.items()
    }


def _at(curve: Sequence[Mapping[str, float]], epochs: int, metric: str) -> float:
    return worst_if_failed(curve[epochs - 1][metric]) if len(curve) >= epochs else math.inf


def worst_if_failed(value: float | None) -> float:
    """Return a metric that can be compared: infinity if it failed."""
    return math.inf if value is None or not math.isfinite(value) else value
