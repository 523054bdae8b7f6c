"""What a study will cost, said before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from thrifty.core import (
    CheckpointRef,
    EpochDone,
    StageDone,
    SystemClock,
    derive_seed,
)
from thrifty.plan import Chain, ForestStage, SearchPlan, stage_forest
from thrifty.search import Algorithm, Trial
from thrifty.space import Config, Space

from ._goals import Goals
from ._ledger import Ledger


NUM_SIMULATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The size of a study, with sharing and without.

    An adaptive algorithm promotes who does well, which is not known yet: it is run on made-up results a few
    times; ``unique_epochs`` is the mean and ``unique_range`` the least and the most. ``exact`` is True where all agree.
    ``seconds`` is what the unique epochs take, known once epochs of this task have been timed by an
    earlier run (None before).

    Of the unique epochs, ``known_epochs`` are known already, from this study or another one of its
    plan, and ``evaluated_epochs`` are only evaluated again: their states are kept, the metrics have
    changed. The rest is trained.
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

    @property
    def epochs_to_train(self) -> float:
        """Unique epochs that are neither known nor only evaluated again."""
        return self.unique_epochs - self.known_epochs - self.evaluated_epochs

    @property
    def seconds_to_train(self) -> float | None:
        """The seconds of those epochs, where ``seconds`` is known."""
        if self.seconds is None:
            return None
        return self.seconds * self.epochs_to_train / max(self.unique_epochs, 1)

    @property
    def merge_rate(self) -> float:
        """Trial-epochs for each epoch that is really trained; at least 1."""
        return self.trial_epochs / max(self.unique_epochs, 1)

    def __str__(self) -> str:
        low, high = self.unique_range
        span = "" if self.exact else f" ({low:,} to {high:,}, depending on the results)"
        about = "" if self.exact else "about "
        left_s = self.seconds_to_train
        time = "" if left_s is None else f"\nforecast: {left_s:,.1f} s of training"
        known = ""
        if self.known_epochs or self.evaluated_epochs:
            known = (
                f"\n{self.known_epochs:,.0f} epochs known already, {self.evaluated_epochs:,.0f} "
                f"evaluated again with kept states: {about}{self.epochs_to_train:,.0f} "
                "left to train"
            )
        return (
            f"{self.num_trials:,} trials, {about}{self.trial_epochs:,.0f} trial-epochs\n"
            f"{about}{self.unique_epochs:,.0f} unique epochs to train{span}\n"
            f"merge rate {self.merge_rate:.2f}: {1 - 1 / max(self.merge_rate, 1):.0%} of the epochs are never "
            f"trained twice{known}{time}"
        )


def forecast(
    algorithm: Algorithm,
    space: Space,
    *,
    goals: Goals,
    seed: int,
    epoch_seconds: float | None = None,
    enqueued: Sequence[Config] = (),
    prior: Sequence[Trial] = (),
    known: SearchPlan | None = None,
) -> Forecast:
    """Play the study through on made-up results, without any training.

    ``known`` is what the store knows of its plan; timelines of the forecast are added to it.
    """
    # nothing is known of how often constraints will be kept: as if always
    goals = replace(goals, constraints=())
    ledgers = []
    for round_ in range(NUM_SIMULATIONS):
        ledger = Ledger(
            SearchPlan(),
            goals=goals,
            max_epochs=algorithm.max_epochs,
            clock=SystemClock(),
            prior=prior,
        )
        for config in enqueued:
            ledger.history.record_enqueued(config)
        _simulate(ledger, algorithm, space, seed=seed, round_=round_)
        ledgers.append(ledger)
    unique = [ledger.plan.num_epochs_needed for ledger in ledgers]
    counts = [_count_known(ledger.plan, known) for ledger in ledgers] if known else []
    known_epochs, evaluated = (mean(c) for c in zip(*counts, strict=True)) if counts else (0, 0)
    trial_epochs = [sum(t.target for t in _trials(ledger)) for ledger in ledgers]
    ends: dict[tuple[int, int], int] = {}
    for trial in _trials(ledgers[0]):
        end = (ledgers[0].node_of[trial.number], trial.target)
        ends[end] = ends.get(end, 0) + 1
    return Forecast(
        num_trials=len(ledgers[0].history),
        trial_epochs=mean(trial_epochs),
        unique_epochs=mean(unique),
        unique_range=(min(unique), max(unique)),
        exact=min(unique) == max(unique) and min(trial_epochs) == max(trial_epochs),
        seconds=None if epoch_seconds is None else mean(unique) * epoch_seconds,
        forest=tuple(stage_forest(ledgers[0].plan, ends=ends)),
        known_epochs=known_epochs,
        evaluated_epochs=evaluated,
    )


def _count_known(plan: SearchPlan, known: SearchPlan) -> tuple[int, int]:
    """How many epochs of a plan another one knows, and how many it has only states of."""
    num_known = num_kept = 0
    for node in plan.nodes:
        place = known.insert(node.timeline)
        for epoch in range(node.start + 1, node.farthest + 1):
            owner = known.owner(place, epoch)
            num_known += epoch in owner.metrics
            num_kept += epoch in owner.kept
    return num_known, num_kept


def ask_rng(seed: int, ledger: Ledger) -> np.random.Generator:
    """The random stream of one ask: named by the seed and by how much was decided before."""
    return np.random.default_rng(derive_seed(seed, "ask", ledger.history.num_decisions))


def _simulate(
    ledger: Ledger, algorithm: Algorithm, space: Space, *, seed: int, round_: int
) -> None:
    while True:
        chain = ledger.plan.next_chain()
        if chain is not None:
            _pretend(ledger, chain, round_=round_)
            continue
        decisions = algorithm.ask(ledger.history, space, num=1, rng=ask_rng(seed, ledger))
        if not decisions:
            return
        ledger.decide(decisions)
        ledger.outbox.clear()
        ledger.news.clear()


def _pretend(ledger: Ledger, chain: Chain, *, round_: int) -> None:
    goals = ledger.goals
    for stage in chain.stages:
        quality = [
            derive_seed(round_ + NUM_SIMULATIONS * index, "quality", stage.node) / 2**63
            for index in range(len(goals.metrics))
        ]
        for epoch in range(stage.start + 1, stage.stop + 1):
            ledger.handle(
                EpochDone(
                    node=stage.node,
                    epoch=epoch,
                    metrics={
                        name: (q + epoch) * (1 if mode == "max" else -1)
                        for name, mode, q in zip(
                            goals.metrics, goals.modes, quality, strict=True
                        )
                    },
                    seconds=0.0,
                    worker="",
                )
            )
        ref = CheckpointRef(node=stage.node, epoch=stage.stop, path="", num_bytes=0, digest="")
        ledger.handle(
            StageDone(
                node=stage.node, start=stage.start, stop=stage.stop, worker="", checkpoint=ref
            )
        )


def _trials(ledger: Ledger) -> list:  # type: ignore[type-arg]
    return [ledger.history[number] for number in range(len(ledger.history))]
