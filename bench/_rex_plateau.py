"""Decay on plateau for ``bench_rex``: a plain loop, because the rule needs to see the loss.

Its trials are those of a study in every other respect (initial weights, batches). One long run
serves all budgets, as what it does at epoch 10 depends on nothing after.
``torch.optim.lr_scheduler.ReduceLROnPlateau`` watches the validation loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import thrifty as th
from bench._rex_ranks import worst_if_failed
from thrifty.pack import AutoBackend, EpochPlan, Member, borrowed_streams


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
            backend.stack(slot, Member(values={"lr": run.rate}, seed=run.seed))
        under_way = waiting = set(range(len(runs)))
        while under_way:
            outcomes = backend.step({slot: watched[slot].plan() for slot in waiting})
            failed = {slot for slot, o in outcomes.items() if isinstance(o, Exception)}
            for slot in outcomes.keys() - failed:
                watched[slot].note(outcomes[slot])  # type: ignore[arg-type]
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
    curves = dict(
        zip(((r.rate, r.patience, r.seed) for r in runs), train(task, runs), strict=True)
    )
    return {
        epochs: (option[0], [_at(curves[*option, seed], epochs, "test") for seed in test_seeds])
        for epochs, option in chosen.items()
    }


def _at(curve: Sequence[Mapping[str, float]], epochs: int, metric: str) -> float:
    return worst_if_failed(curve[epochs - 1][metric]) if len(curve) >= epochs else math.inf
