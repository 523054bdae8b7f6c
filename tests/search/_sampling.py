"""Histories for samplers, and measures of how well a sampler does on a function."""

from __future__ import annotations

import math

import numpy as np

from thrifty.search import History, Proposal
from thrifty.space import Choice, Constant, Float, Int, MultiStep, Space, Step, Timeline


FLAT = Space(
    x=Float(0.0, 1.0), y=Float(0.0, 1.0), z=Float(1e-4, 1.0, log=True), kind=Choice(["a", "b", "c"])
)
NESTED = Space(
    lr=Choice([
        Constant(Float(0.01, 1.0, log=True)),
        Step(Float(0.01, 1.0, log=True), [Int(2, 5)]),
    ]),
    kind=Choice(["sgd", "adam"]),
    momentum=Float(0.0, 1.0).when(kind="sgd"),
    width=Int(1, 4),
    depth=Choice([1, 2]).when(width=[1, 2]),
)
SCHEDULES = Space(
    lr=Choice([
        MultiStep((first, second, 0.01), milestones=(3, 6))
        for first in (0.1, 0.2, 0.4)
        for second in (0.03, 0.02, 0.04)
    ]),
    width=Choice([1, 2, 3, 4, 5]),
)


def bowl(config):
    """Score highest, with 0, somewhere inside ``FLAT``."""
    z = math.log10(config["z"]) / 4 + 0.5
    off = (config["x"] - 0.3) ** 2 + (config["y"] - 0.7) ** 2 + z**2
    return -off - 0.1 * (config["kind"] != "b")


def sample(sampler, history=None, space=FLAT, *, num=1, seed=0):
    history = History() if history is None else history
    return list(sampler.sample(history, space, num=num, rng=np.random.default_rng(seed)))


def filled(space=FLAT, *, num=40, running=0, score=None, target=9, seed=0, prior=()):
    """Return a history of random configurations, the last ``running`` of which still run."""
    history, rng = History(prior=prior), np.random.default_rng(seed)
    for index in range(num + running):
        proposal = Proposal(target=target, config=space.sample(rng))
        number = history.record_decision(proposal)
        if index < num:
            value = rng.random() if score is None else score(proposal.config)
            history.record_scores(number, [value] * target)
    return history


def best_found(sampler, score, space=FLAT, *, num_trials=40, batch=5, seed=0):
    """Return the best score of a study on a function."""
    history = History()
    while len(history) < num_trials:
        for config in sample(sampler, history, space, num=batch, seed=derived(seed, len(history))):
            number = history.record_decision(Proposal(target=1, config=config))
            history.record_scores(number, [score(config)])
    return max(trial.scores[-1] for trial in history)


def derived(seed, step):
    return 10_000 * seed + step


def mean_epochs_shared(sampler, history, space, *, num_seeds=20):
    """Return how many epochs a draw shares with its closest trial, compared epoch by epoch."""
    drawn = [sample(sampler, history, space, seed=seed)[0] for seed in range(num_seeds)]
    return np.mean([
        max(_same_epochs(config, trial.config) for trial in history) for config in drawn
    ])


def _same_epochs(one, other):
    a, b = Timeline(one, epochs=9), Timeline(other, epochs=9)
    return [*(a.at(epoch) == b.at(epoch) for epoch in range(9)), False].index(False)


def mean_best(sampler, score, *, num_seeds=12, **options):
    return np.mean([best_found(sampler, score, seed=seed, **options) for seed in range(num_seeds)])
