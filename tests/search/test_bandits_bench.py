"""The bench's rule, vectorised over problems, makes the same pulls as the library's functions."""

import numpy as np
import pytest

from bench.bandits.rules import means_of, puller, random_blocks, sub_samples, thompson
from bench.search.literal_sub_sampling import is_good, leader
from thrifty.search._sub_sampling_rule import threshold


HORIZON = 150


def pulls_of(table, kind):
    """Play one problem by the library: all good challengers of a round, or the leader alone."""
    seen = {k: [rewards[0]] for k, rewards in enumerate(table)}
    pulls, first = list(seen), None
    while len(pulls) < HORIZON:
        first = leader(seen, previous=first)
        c = threshold(len(pulls), kind)
        good = [k for k in seen if k != first and is_good(seen[k], seen[first], c=c)]
        for k in good or [first]:
            seen[k].append(table[k][len(seen[k])])
            pulls.append(k)
    return pulls[:HORIZON]


@pytest.mark.parametrize("family", ["Bernoulli", "Gaussian"])
@pytest.mark.parametrize("kind", ["sqrt-log", "log", 1])
def test_same_pulls(family, kind):
    rng = np.random.default_rng(0)
    num, num_arms = 12, 4
    means = means_of(family, num=num, num_arms=num_arms, rng=rng)
    table = rng.standard_normal((num, num_arms, HORIZON + num_arms)) + means[:, :, None]
    if family == "Bernoulli":
        table = np.round(1 / (1 + np.exp(-2 * table)))  # creates many ties
    pulls = [[] for _ in range(num)]

    def pull(problems, arms, counts):
        for p, k in zip(problems, arms, strict=True):
            pulls[p].append(int(k))
        return table[problems, arms, counts]

    regret = sub_samples(pull, means, horizons=(20, HORIZON), kind=kind)
    for p in range(num):
        expected = pulls_of(table[p].tolist(), kind)
        assert pulls[p][:HORIZON] == expected
        gaps = means[p].max() - means[p]
        assert regret[p] == pytest.approx([gaps[expected[:20]].sum(), gaps[expected].sum()])


def test_rules_beside_it_learn():
    means = np.tile([0.9, 0.1, 0.1], (50, 1))
    rng = np.random.default_rng(0)
    pull = puller("Bernoulli", means, rng)
    chance = 200 * 0.8 * 2 / 3
    for regret in (
        random_blocks(pull, means, horizons=(200,), rng=rng),
        thompson("Bernoulli", pull, means, horizons=(200,), rng=rng),
        thompson("Gaussian", puller("Gaussian", means, rng), means, horizons=(200,), rng=rng),
    ):
        assert regret.mean() < chance / 2
