"""Bandit rules with one pull a step, played on many problems side by side.

``sub_samples`` plays the rule of ``thrifty.search._sub_sampling`` and makes the same pulls
as its functions do (a test compares them). It works from running sums and never looks twice at a
block of the leader's history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from thrifty.search._sub_sampling_rule import Threshold, threshold


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Pull = Callable[[Ints, Ints, Ints], Floats]
"""Return rewards of ``arms`` of ``problems``, each for the ``counts``-th pull (from 0)."""
Family = Literal["Bernoulli", "Gaussian"]
UNKNOWN = -1


def means_of(family: Family, *, num: int, num_arms: int, rng: np.random.Generator) -> Floats:
    """Draw random problems: means uniform on [0, 1], or standard normal."""
    if family == "Bernoulli":
        return rng.random((num, num_arms))
    return rng.standard_normal((num, num_arms))


def puller(family: Family, means: Floats, rng: np.random.Generator) -> Pull:
    def pull(problems: Ints, arms: Ints, counts: Ints) -> Floats:  # noqa: ARG001
        mu = means[problems, arms]
        if family == "Bernoulli":
            return (rng.random(len(mu)) < mu).astype(float)
        return mu + rng.standard_normal(len(mu))

    return pull


class Regret:
    """Cumulative regret of every problem at each horizon, a number of pulls."""

    def __init__(self, means: Floats, horizons: Sequence[int]) -> None:
        self._gaps = means.max(axis=1, keepdims=True) - means
        self._now = np.zeros(len(means))
        self._time = np.zeros(len(means), dtype=np.int64)
        self._horizons = sorted(horizons)
        self._crossed = [0] * len(means)
        self._next = np.full(len(means), self._horizons[0])
        self.at = np.zeros((len(means), len(horizons)))

    def add(self, pulled: npt.NDArray[np.bool_]) -> None:
        """Record one round, whose pulls are made in the order of the arms."""
        times = self._time + pulled.sum(axis=1)
        for p in np.flatnonzero(times >= self._next).tolist():
            costs = np.cumsum([0.0, *self._gaps[p, pulled[p]]])
            while self._crossed[p] < len(self._horizons) and times[p] >= self._next[p]:
                in_time = int(self._next[p] - self._time[p])
                self.at[p, self._crossed[p]] = self._now[p] + costs[in_time]
                self._crossed[p] += 1
                left = self._horizons[self._crossed[p] :]
                self._next[p] = left[0] if left else np.iinfo(np.int64).max
        self._now += (self._gaps * pulled).sum(axis=1)
        self._time = times


@dataclass
class Arms:
    """Observations so far: counts, totals and running sums of every arm of every problem."""

    num: Ints
    total: Floats
    sums: Floats
    leader: Ints

    @classmethod
    def after_one_pull_each(cls, pull: Pull, *, num: int, num_arms: int, horizon: int) -> Arms:
        sums = np.zeros((num, num_arms, horizon + num_arms + 1))
        problems, arms = (x.ravel() for x in np.indices((num, num_arms)))
        first = pull(problems, arms, np.zeros_like(problems)).reshape(num, num_arms)
        sums[:, :, 1] = first
        ones = np.ones((num, num_arms), dtype=np.int64)
        return cls(ones, first.copy(), sums, np.full(num, UNKNOWN))

    def pull(self, pull: Pull, pulled: npt.NDArray[np.bool_]) -> None:
        p, k = np.nonzero(pulled)
        n = self.num[p, k]
        total = self.total[p, k] + pull(p, k, n)
        self.total[p, k] = total
        self.sums[p, k, n + 1] = total
        self.num[p, k] = n + 1

    def elect(self) -> Ints:
        """Elect a leader for each problem; return where the leader has changed.

        The arm with the most observations leads. Ties go to the better mean, then to the previous
        leader, then to the lowest number.
        """
        top = self.num.max(axis=1)
        first = self.num == top[:, None]
        tied = np.flatnonzero(first.sum(axis=1) > 1)
        old = self.leader[tied]
        total = np.where(first[tied], self.total[tied], -np.inf)
        best = total == total.max(axis=1, keepdims=True)
        stays = (old != UNKNOWN) & best[np.arange(len(tied)), old]
        new = np.where(stays, old, best.argmax(axis=1))
        self.leader[tied] = new
        return tied[new != old]

    def block(self, p: Ints, start: Ints, length: Ints) -> Floats:
        """Return sums of ``length`` consecutive observations of the leaders."""
        leader = self.leader[p]
        return self.sums[p, leader, start + length] - self.sums[p, leader, start]


def play(
    challengers: Callable[[Arms, Ints], npt.NDArray[np.bool_]],
    pull: Pull,
    means: Floats,
    *,
    horizons: Sequence[int],
) -> Floats:
    """Play the rounds of a duelling rule; return the regret at the horizons.

    Each round pulls all challengers that win, or the leader alone if none does.
    """
    num, num_arms = means.shape
    horizon = max(horizons)
    regret = Regret(means, horizons)
    arms = Arms.after_one_pull_each(pull, num=num, num_arms=num_arms, horizon=horizon)
    regret.add(np.ones((num, num_arms), dtype=bool))
    time = np.full(num, num_arms)
    rows = np.arange(num)
    while (time < horizon).any():
        pulled = challengers(arms, time)
        none = ~pulled.any(axis=1)
        pulled[rows[none], arms.leader[none]] = True
        pulled[time >= horizon] = False
        arms.pull(pull, pulled)
        regret.add(pulled)
        time += pulled.sum(axis=1)
    return regret.at


def sub_samples(pull: Pull, means: Floats, *, horizons: Sequence[int], kind: Threshold) -> Floats:
    """Play SSMC (Chan, Annals of Statistics 2020).

    The threshold 1 means no forced exploration.
    """
    shape = means.shape
    thresholds = np.array([threshold(n, kind) for n in range(max(horizons) + shape[1])])
    # ``seen``: how many observations of the leader a challenger is known to lose against.
    # ``witness``: where it won last.
    seen = np.full(shape, UNKNOWN)
    witness = np.full(shape, UNKNOWN)

    def challengers(arms: Arms, time: Ints) -> npt.NDArray[np.bool_]:
        changed = arms.elect()
        seen[changed] = witness[changed] = UNKNOWN
        rows = np.arange(len(time))
        top = arms.num[rows, arms.leader][:, None]
        behind = arms.num < top
        wins: npt.NDArray[np.bool_] = behind & (arms.num < thresholds[time][:, None])
        p, k = np.nonzero(behind & ~wins & (seen < top))
        wins[p, k] = duel(arms, p, k)
        seen[wins] = UNKNOWN
        return wins

    def duel(arms: Arms, p: Ints, k: Ints) -> npt.NDArray[np.bool_]:
        n, total, top = arms.num[p, k], arms.total[p, k], arms.num[p, arms.leader[p]]
        newest = top - n
        out: npt.NDArray[np.bool_] = total >= arms.block(p, newest, n)
        witness[p[out], k[out]] = newest[out]
        # The challenger has been pulled since: where it won last it probably wins again.
        open_ = np.flatnonzero(~out & (seen[p, k] == UNKNOWN))
        start = witness[p[open_], k[open_]]
        there = (start != UNKNOWN) & (start + n[open_] <= top[open_])
        tried = open_[there]
        out[tried] = total[tried] >= arms.block(p[tried], start[there], n[tried])
        for i in open_[~out[open_]].tolist():
            sums = arms.sums[p[i], arms.leader[p[i]], : top[i] + 1]
            blocks = sums[n[i] :] - sums[: -n[i]]
            first = int(blocks.argmin())
            out[i] = total[i] >= blocks[first]
            witness[p[i], k[i]] = first
        seen[p[~out], k[~out]] = top[~out]
        return out

    return play(challengers, pull, means, horizons=horizons)


def random_blocks(
    pull: Pull, means: Floats, *, horizons: Sequence[int], rng: np.random.Generator
) -> Floats:
    """Play RB-SDA (Baudry et al., NeurIPS 2020).

    A challenger meets one random block of the leader, without forced exploration.
    """

    def challengers(arms: Arms, time: Ints) -> npt.NDArray[np.bool_]:
        arms.elect()
        top = arms.num[np.arange(len(time)), arms.leader][:, None]
        wins = arms.num < top
        p, k = np.nonzero(wins)
        n = arms.num[p, k]
        start = (rng.random(len(p)) * (top[p, 0] - n + 1)).astype(np.int64)
        wins[p, k] = arms.total[p, k] >= arms.block(p, start, n)
        return wins

    return play(challengers, pull, means, horizons=horizons)


def thompson(
    family: Family, pull: Pull, means: Floats, *, horizons: Sequence[int], rng: np.random.Generator
) -> Floats:
    """Play Thompson sampling.

    The prior is uniform for Bernoulli rewards and flat, after one pull of each arm, for Gaussian
    ones.
    """
    num, num_arms = means.shape
    regret = Regret(means, horizons)
    count, total = np.zeros(means.shape), np.zeros(means.shape)
    rows = np.arange(num)
    for time in range(max(horizons)):
        if family == "Bernoulli":
            arm = rng.beta(1.0 + total, 1.0 + count - total).argmax(axis=1)
        elif time < num_arms:
            arm = np.full(num, time)
        else:
            drawn = total / count + rng.standard_normal(means.shape) / np.sqrt(count)
            arm = drawn.argmax(axis=1)
        total[rows, arm] += pull(rows, arm, count[rows, arm].astype(np.int64))
        count[rows, arm] += 1
        pulled = np.zeros(means.shape, dtype=bool)
        pulled[rows, arm] = True
        regret.add(pulled)
    return regret.at
