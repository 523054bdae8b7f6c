"""The rule of sub-sampling by its definition, trial by trial."""

from __future__ import annotations

import math

from bench.search.literal_sub_sampling import is_good
from thrifty.search import Proposal
from thrifty.search._sub_sampling_rule import difference, threshold


def slow_decisions(trials, *, rungs, algorithm):
    """Return proposals for the trials that train further, the most deserving first."""
    leader = slow_leader(trials)
    deserving = slow_deserving(trials, leader, rungs=rungs, algorithm=algorithm) if leader else []
    return [further(t, rungs) for t in deserving]


def slow_ahead(trials, *, rungs):
    """Return a proposal for the trial that is furthest ahead of the leader, if any is."""
    leader = slow_leader(trials)
    ahead = slow_challengers(trials, leader)[:1] if leader else []
    return [further(t, rungs) for t in ahead if difference(t.scores, leader.scores) > 0]


def slow_deserving(trials, leader, *, rungs, algorithm):
    ranked = slow_challengers(trials, leader)
    n = sum(t.target if t.state == "failed" else t.reached for t in trials)
    c = threshold(n, algorithm.threshold)
    out = sorted((t for t in ranked if t.reached < c), key=lambda t: t.reached)
    rest = [t for t in ranked if t.reached >= c]
    out += [t for t in rest if is_good(t.scores, leader.scores, c=c)]
    num_asked = [sum(t.target >= rung for t in trials) for rung in rungs]
    for t in out:
        num_asked[rungs.index(slow_next(rungs, t))] += 1
    for t in rest:
        level = rungs.index(slow_next(rungs, t))
        if t not in out and num_asked[level] < math.ceil(len(trials) / algorithm.eta**level):
            num_asked[level] += 1
            out.append(t)
    goes_on = leader.state == "waiting" and leader.reached < rungs[-1]
    return [*out, leader] if goes_on else out


def slow_leader(trials):
    alive = (t for t in trials if t.reached and t.state != "failed")
    return max(alive, key=lambda t: (t.reached, t.scores[-1], -t.number), default=None)


def slow_challengers(trials, leader):
    waiting = (t for t in trials if t.state == "waiting" and t.reached < leader.reached)
    return sorted(waiting, key=lambda t: (-difference(t.scores, leader.scores), t.number))


def slow_next(rungs, trial):
    return next(rung for rung in rungs if rung > trial.reached)


def further(trial, rungs):
    return Proposal(target=slow_next(rungs, trial), trial=trial.number, group=trial.group)
