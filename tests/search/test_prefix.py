import numpy as np
import pytest

from thrifty.search import History, Proposal
from thrifty.search.samplers._base_sampler import Picker
from thrifty.space import Choice, Constant, Cosine, MultiStep, Space, Step


def trained(*trials):
    """Return a history of ``(config, target, reached)``; without ``reached`` a trial is running."""
    history = History()
    for config, target, reached in trials:
        number = history.record_decision(Proposal(target=reached or target, config=config))
        if reached:
            history.record_scores(number, [0.5] * reached)
        if reached and target > reached:
            history.record_decision(Proposal(target=target, trial=number))
    return history


def pick(history, candidates, *, share):
    """Return the acquisition of the picked candidate; candidates are ``(acquisition, config)``."""
    acquisition = np.array([score for score, _ in candidates])
    picked = Picker(history, share=share).pick(acquisition, lambda i: candidates[i][1])
    return None if picked is None else acquisition[picked[0]]


STEPS = [{"lr": Step(0.1, (k,))} for k in (2, 4, 6, 8)]
OTHERS = [{"lr": Constant(x)} for x in (0.2, 0.3, 0.4, 0.5)]


def test_within_the_share_the_longest_prefix_wins():
    history = trained((STEPS[3], 9, 9))
    candidates = [(10.0, OTHERS[0]), (9.8, STEPS[0]), (9.6, STEPS[1]), (9.0, STEPS[2])]
    candidates += [(0.0, {"lr": Constant(1.0 + i)}) for i in range(9)]
    chosen = [pick(history, candidates, share=s) for s in (0.0, 0.01, 0.02, 0.05, 0.1, 1.0)]
    assert chosen == [10.0, 10.0, 9.8, 9.6, 9.0, 9.0]


@pytest.mark.parametrize("seed", range(30))
def test_never_takes_one_that_is_too_bad(seed):
    rng = np.random.default_rng(seed)
    history = trained((STEPS[2], 9, 9))
    candidates = [(float(rng.normal()), {"lr": Step(0.1, (k,))}) for k in range(1, 9)]
    candidates += [(float(rng.normal()), config) for config in OTHERS]
    scores = np.array([score for score, config in candidates])
    new = [score for score, config in candidates if config != STEPS[2]]
    share = rng.random()
    picked = pick(history, candidates, share=share)
    assert picked >= max(new) - share * (max(new) - np.median(scores)) or picked == max(new)


def test_of_equal_prefixes_the_better_wins():
    history = trained((STEPS[0], 9, 9))
    candidates = [
        (3.0, OTHERS[0]),
        (2.9, STEPS[2]),
        (2.8, STEPS[3]),
        (0.0, OTHERS[1]),
        (0.0, OTHERS[2]),
    ]
    assert pick(history, candidates, share=1.0) == 2.9


STEPS_BEHIND = [
    (3.0, OTHERS[0]),
    (2.9, STEPS[1]),
    (2.8, STEPS[2]),
    (0.0, OTHERS[1]),
    (0.0, OTHERS[2]),
]


def test_what_was_not_trained_is_not_shared():
    history = trained((STEPS[3], 2, 2), (OTHERS[3], 9, 9))
    # Both share two epochs only, because the other trial went no further.
    assert pick(history, STEPS_BEHIND, share=1.0) == 2.9


def test_what_is_being_trained_is_shared():
    history = trained((STEPS[3], 9, 2))
    assert pick(history, STEPS_BEHIND, share=1.0) == 2.8


def test_schedules_longer_than_any_trial_so_far():
    history = trained(({"lr": Step(0.1, (30,))}, 1, 1), ({"lr": Cosine(0.1)}, 1, 1))
    long = {"lr": MultiStep((0.1, 0.2), milestones=(60,))}
    assert pick(history, [(1.0, OTHERS[0]), (0.9, long), (0.0, OTHERS[1])], share=1.0) == 0.9


def test_without_history_the_best_wins():
    assert pick(History(), [(1.0, OTHERS[0]), (2.0, STEPS[0])], share=1.0) == 2.0


def test_nothing_new():
    history = trained((STEPS[0], 1, 1), (STEPS[1], 1, None))
    assert pick(history, [(1.0, STEPS[0]), (2.0, STEPS[1])], share=0.5) is None


def test_nothing_is_picked_twice():
    picker = Picker(History(), share=0.0)
    acquisition = np.array([1.0, 2.0])
    picked = [picker.pick(acquisition, OTHERS.__getitem__) for _ in range(3)]
    assert picked == [(1, OTHERS[1]), (0, OTHERS[0]), None]


def test_options_that_are_equal_but_not_the_same_are_told_apart():
    history = trained(({"x": 1}, 1, 1))
    assert pick(history, [(2.0, {"x": 1}), (1.0, {"x": True})], share=0.0) == 1.0


def test_random_draws_are_new_as_long_as_there_are_any():
    picker, rng = Picker(History(), share=0.0), np.random.default_rng(0)
    space = Space(x=Choice([1, 2, 3]))
    drawn = [picker.draw(space, rng)["x"] for _ in range(4)]
    assert sorted(drawn[:3]) == [1, 2, 3]
