"""The forest of a history's timelines: what is trained, what is known, what costs nothing."""

import numpy as np
import pytest

from thrifty.search import History, Proposal
from thrifty.search._curve_view import Prefix, StageForest
from thrifty.space import (
    WSD,
    Choice,
    Constant,
    Cosine,
    Float,
    MultiStep,
    Space,
    Step,
    Timeline,
    common_prefix,
)


CONSTANT, STEP = {"lr": Constant(0.1)}, {"lr": Step(0.1, [5])}


def history_of(*trials):
    """Return a history of ``(config, target, whether it has reported)``."""
    history = History()
    for config, target, reported in trials:
        number = history.record_decision(Proposal(target=target, config=config))
        if reported:
            history.record_scores(number, [number + 0.1 * e for e in range(target)])
    return history


@pytest.mark.parametrize(
    ("trials", "num_epochs", "prefix"),
    [
        ([], 0, Prefix(0, 0, -1)),
        ([(CONSTANT, 3, True)], 3, Prefix(3, 3, 0)),
        ([(CONSTANT, 9, True)], 9, Prefix(5, 5, 0)),
        ([(CONSTANT, 9, False)], 9, Prefix(5, 0, -1)),
        ([(CONSTANT, 9, True), (STEP, 7, False)], 11, Prefix(7, 5, 0)),
        ([(CONSTANT, 2, True), (STEP, 7, True)], 7, Prefix(7, 7, 1)),
        ([({"lr": Constant(0.2)}, 9, True)], 9, Prefix(0, 0, -1)),
    ],
)
def test_prefix_of_a_step(trials, num_epochs, prefix):
    forest = StageForest.of(history_of(*trials), epochs=9)
    assert (forest.num_epochs, forest.prefix(STEP)) == (num_epochs, prefix)


def test_failed_trials_are_paid_for_and_report_nothing():
    history = history_of((CONSTANT, 9, False))
    history.record_failure(0)
    forest = StageForest.of(history, epochs=9)
    assert (forest.num_epochs, forest.prefix(STEP).reported) == (9, 0)


SPACE = Space(
    lr=Choice([Constant(0.1), Step(0.1, [3]), MultiStep([0.1, 0.2], milestones=[4])]),
    batch=Choice([32, MultiStep([32, 64], milestones=[5])]),
    width=Choice([1, 2]),
)


# Values that are equal in some ways and not in others, and schedules that begin like them.
MIXED = Space(
    lr=Choice([0.1, Constant(0.1), Step(0.1, [3]), Cosine(0.1), Cosine(0.2), WSD(0.1, cooldown=4)]),
    batch=Choice([1, 1.0, True, "1", (1, 2), MultiStep([1, 2], milestones=[5])]),
)


@pytest.mark.parametrize("space", [SPACE, MIXED], ids=["schedules", "mixed"])
@pytest.mark.parametrize("seed", range(20))
def test_is_the_longest_common_prefix_with_any_trial(seed, space):
    rng = np.random.default_rng(seed)
    history = History()
    for _ in range(6):
        target = int(rng.integers(1, 10))
        number = history.record_decision(Proposal(target=target, config=space.sample(rng)))
        if rng.random() < 0.6:
            history.record_scores(number, [0.5] * target)
        forest = StageForest.of(history, epochs=9)  # it is kept up to date
        if rng.random() < 0.3:
            forest.prefix(space.sample(rng))  # which changes nothing
    timelines = [Timeline(trial.config, epochs=9) for trial in history]
    for config in space.grid():
        mine = Timeline(config, epochs=9)
        shared = [common_prefix(mine, other) for other in timelines]
        requested = max(min(s, t.target) for s, t in zip(shared, history, strict=True))
        reported = max(min(s, t.reached) for s, t in zip(shared, history, strict=True))
        found = forest.prefix(config)
        assert (found.requested, found.reported) == (requested, reported)
        if reported:
            assert min(shared[found.trial], history[found.trial].reached) == reported
    trained = set()
    for trial, timeline in zip(history, timelines, strict=True):
        path = [next(r.key for r in timeline.runs if r.start <= e < r.stop) for e in range(9)]
        trained |= {tuple(path[: e + 1]) for e in range(trial.target)}
    assert forest.num_epochs == len(trained)


def test_plain_values_share_only_with_equal_ones():
    space = Space(lr=Float(0.0, 1.0))
    rng = np.random.default_rng(0)
    history = history_of(*((space.sample(rng), 3, True) for _ in range(5)))
    forest = StageForest.of(history, epochs=9)
    assert forest.num_epochs == 15
    assert forest.prefix(history[2].config) == Prefix(3, 3, 2)
    assert forest.prefix({"lr": 2.0}) == Prefix(0, 0, -1)
