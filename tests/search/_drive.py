"""Helpers to ask algorithms and to build histories."""

from __future__ import annotations

import numpy as np

from thrifty.search import History, Proposal, Stop
from thrifty.space import Choice, Float, Space


SPACE = Space(lr=Float(0.01, 1.0, log=True), kind=Choice(["a", "b"]))


def ask(algorithm, history=None, *, space=SPACE, num=1, seed=0):
    history = History() if history is None else history
    return list(algorithm.ask(history, space, num=num, rng=np.random.default_rng(seed)))


def follow(history, decisions, *, score=None, failing=()):
    """Carry decisions out: proposals reach their target with ``score(trial, epoch)``, or fail."""
    for decision in decisions:
        number = history.record_decision(decision)
        if isinstance(decision, Stop):
            continue
        if number in failing:
            history.record_failure(number)
        else:
            epochs = range(1, decision.target + 1)
            history.record_scores(number, [(score or by_number)(number, e) for e in epochs])
    return decisions


def by_number(number, epoch):
    """Score so that later trials are better, and all improve with the epoch."""
    return number + epoch / 1000


def to_the_end(algorithm, *, space=SPACE, num=1, score=None, failing=()):
    """Run a study one decision after the other; return its history."""
    history = History()
    while decisions := ask(algorithm, history, space=space, num=num, seed=len(history)):
        follow(history, decisions, score=score, failing=failing)
    return history


def ends(history, *, group=None):
    """Return how many trials ended at each epoch, as a dict with ascending epochs."""
    reached = [t.reached for t in history if group is None or t.group == group]
    return {epoch: reached.count(epoch) for epoch in sorted(set(reached))}


def with_scores(*scores, target=1):
    """Return a history of trials that wait at ``target``, with these scores there."""
    history = History()
    for score in scores:
        number = history.record_decision(Proposal(target=target, config={"lr": 0.1}))
        history.record_scores(number, [score] * target)
    return history
