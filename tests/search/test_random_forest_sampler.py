import sys

import numpy as np
import pytest

from tests.search._sampling import FLAT, NESTED, SCHEDULES, bowl, filled, mean_best, sample
from thrifty.core import AlgorithmError, MissingExtraError
from thrifty.search import History, Hyperband, Proposal, RandomForestSampler, RandomSampler
from thrifty.search._scores import coordinates_of
from thrifty.search.samplers._random_forest import Forest, _neighbours, _random_points
from thrifty.space import Choice, Float, Int, Space
from thrifty.testing import check_algorithm


pytestmark = pytest.mark.slow


ALWAYS = RandomForestSampler(random_share=0.0, num_trees=20, num_candidates=200)
LINE = Space(x=Float(0.0, 1.0))


def grown(*, num=60, seed=0, num_trees=20):
    rng = np.random.default_rng(seed)
    points = rng.random((num, 3))
    points[rng.random(num) < 0.3, 2] = np.nan
    scores = -((points[:, 0] - 0.3) ** 2) - np.isnan(points[:, 2])
    return points, scores, Forest.grow(points, scores, num_trees=num_trees, rng=rng)


def test_forest_learns():
    points, scores, forest = grown(num=200)
    guesses = forest.values[forest.leaves(points)].mean(axis=0)
    assert np.corrcoef(guesses, scores)[0, 1] > 0.98


def test_leaves_hold_the_means_of_their_trees():
    points, _, forest = grown()
    leaves, filled_in = forest.leaves(points), np.nan_to_num(points, nan=-1.0)
    for row, tree in zip(forest.values[leaves], forest.trees, strict=True):
        expected = tree.predict(filled_in.astype(np.float32)).ravel()
        np.testing.assert_array_equal(row, expected)


def test_believing_is_the_mean_with_one_more_score():
    points, _, forest = grown()
    leaves = forest.leaves(points[:2])
    told = forest.believing(leaves, -5.0)
    for tree in range(len(forest.trees)):
        one, other = leaves[tree]
        num_lies = 2 if one == other else 1
        total = forest.values[one] * forest.weights[one] - 5.0 * num_lies
        expected = total / (forest.weights[one] + num_lies)
        assert told.values[one] == pytest.approx(expected)
    untouched = np.setdiff1d(np.arange(len(forest.values)), leaves)
    np.testing.assert_allclose(told.values[untouched], forest.values[untouched])
    assert (forest.leaves(points[:2]) == leaves).all()


def test_expected_improvement_is_its_integral():
    points, _, forest = grown()
    leaves = forest.leaves(points[:5])
    guesses = forest.values[leaves]
    draws = np.random.default_rng(0).standard_normal(200_000)
    for index, gain in enumerate(forest.expected_improvement(leaves, best=-0.1)):
        mean, deviation = guesses[:, index].mean(), guesses[:, index].std()
        expected = np.maximum(mean + deviation * draws + 0.1, 0.0).mean()
        assert gain == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("space", [FLAT, NESTED, SCHEDULES])
def test_candidates_are_points_of_configurations(space):
    coordinates, rng = coordinates_of(space), np.random.default_rng(0)
    history = filled(space, num=12)
    best = np.array([coordinates.to_unit(trial.config) for trial in history])
    # Numbers that are conditions of others may be drawn at odds with them; those are filled up
    # later.
    odd = [i for i, name in enumerate(coordinates.names) if name in {"width", "depth"}]
    for points in (_random_points(space, 100, rng=rng), _neighbours(space, best, 100, rng=rng)):
        assert points.shape == (100, len(coordinates))
        inside = np.nan_to_num(points, nan=0.5)
        assert ((inside >= 0.0) & (inside <= 1.0)).all()
        for point in points:
            whole = np.where(np.isnan(point), 0.5, point)
            again = coordinates.to_unit(coordinates.from_unit(whole))
            there = np.delete(~np.isnan(point), odd)
            assert (there == np.delete(~np.isnan(again), odd)).all()


def test_neighbours_differ_in_one_coordinate():
    coordinates = coordinates_of(FLAT)
    best = np.array([coordinates.to_unit(t.config) for t in filled(num=1)])
    points = _neighbours(FLAT, best, 200, rng=np.random.default_rng(0))
    differ = points != best
    assert (differ.sum(axis=1) == 1).all()
    assert (differ.sum(axis=0) > 20).all()


def test_random_points_are_like_random_configurations():
    drawn = _random_points(NESTED, 4000, rng=np.random.default_rng(0))
    coordinates, rng = coordinates_of(NESTED), np.random.default_rng(1)
    slow = np.array([coordinates.to_unit(NESTED.sample(rng)) for _ in range(1000)])
    np.testing.assert_allclose(np.isnan(drawn).mean(0), np.isnan(slow).mean(0), atol=0.06)
    np.testing.assert_allclose(np.nanmean(drawn, 0), np.nanmean(slow, 0), atol=0.08)


def test_depends_on_the_stream_alone():
    history = filled(running=3)
    assert sample(ALWAYS, history, num=4) == sample(ALWAYS, history, num=4)
    assert sample(ALWAYS, history, num=4) != sample(ALWAYS, history, num=4, seed=1)


def test_it_finds_better_trials_than_random_sampling():
    options = {"num_trials": 40, "num_seeds": 10}
    assert mean_best(ALWAYS, bowl, **options) > 0.8 * mean_best(RandomSampler(), bowl, **options)


def test_diverged_trials_do_no_harm():
    def score(config):
        return -1e30 if config["x"] > 0.8 else bowl(config)

    def gentle(config):
        return -10.0 if config["x"] > 0.8 else bowl(config)

    assert sample(ALWAYS, filled(score=score), num=4) == sample(ALWAYS, filled(score=gentle), num=4)


@pytest.mark.parametrize("space", [FLAT, NESTED, SCHEDULES, Space(x=1, y=Choice(["a"]))])
def test_configurations_are_of_the_space(space):
    for config in sample(ALWAYS, filled(space, running=2), space, num=30):
        coordinates_of(space).to_unit(config)


def test_a_number_that_is_a_condition_makes_no_gap():
    space = Space(width=Int(1, 4), depth=Float(0.0, 1.0).when(width=[1, 2]))
    history = filled(space, score=lambda config: config["width"] + config.get("depth", 0))
    for seed in range(5):
        for config in sample(ALWAYS, history, space, num=4, seed=seed):
            assert ("depth" in config) == (config["width"] <= 2)


def test_without_data_it_is_random():
    few = filled(num=len(coordinates_of(FLAT)))
    for history in (History(), few):
        drawn = sample(ALWAYS, history, num=200)
        assert 0.3 < np.mean([config["x"] for config in drawn]) < 0.7


def test_min_points_are_enough():
    history = filled(score=lambda config: config["x"], num=3)
    eager = RandomForestSampler(random_share=0.0, min_points=3, num_trees=20)
    patient = RandomForestSampler(random_share=0.0, min_points=4, num_trees=20)
    assert sample(eager, history) != sample(patient, history)


def test_a_space_without_a_choice_to_make():
    assert sample(ALWAYS, filled(Space(x=1)), Space(x=1), num=2) == [{"x": 1}, {"x": 1}]


def test_random_share_of_one_is_random():
    history = filled(score=lambda config: config["x"])
    drawn = sample(RandomForestSampler(random_share=1.0), history, num=200)
    assert 0.4 < np.mean([config["x"] for config in drawn]) < 0.6


def test_a_batch_has_no_configuration_twice():
    space = Space(a=Choice(list(range(6))), b=Choice(list(range(6))))
    history = filled(space, num=10, running=2, score=lambda config: -config["a"] - config["b"])
    drawn = [tuple(c.values()) for c in sample(ALWAYS, history, space, num=12)]
    tried = {tuple(trial.config.values()) for trial in history}
    assert len(set(drawn)) == 12
    assert not set(drawn) & tried


def test_a_batch_spreads():
    history = filled(LINE, score=lambda config: -abs(config["x"] - 0.5))
    batch = [config["x"] for config in sample(ALWAYS, history, LINE, num=8)]
    alone = [sample(ALWAYS, history, LINE, seed=seed)[0]["x"] for seed in range(8)]
    assert np.std(batch) > 1.5 * np.std(alone)


def test_keeps_away_from_trials_in_training():
    def distance(*, lying):
        history = filled(LINE, score=lambda config: -abs(config["x"] - 0.5))
        before = sample(ALWAYS, history, LINE)[0]["x"]
        proposal = Proposal(target=9, config={"x": before})
        number = history.record_decision(proposal)
        if not lying:
            history.record_scores(number, [0.0] * 9)
        return np.mean([
            abs(sample(ALWAYS, history, LINE, seed=seed)[0]["x"] - before) for seed in range(8)
        ])

    assert distance(lying=True) > 2 * distance(lying=False)


def test_failed_and_infeasible_trials_are_bad():
    history = History()
    for index, config in enumerate(FLAT.sample(np.random.default_rng(i)) for i in range(60)):
        number = history.record_decision(Proposal(target=1, config=config))
        if config["kind"] == "a":
            history.record_failure(number)
        else:
            violation = float(config["kind"] == "b")
            history.record_scores(number, [float(index)], violation=violation)
    kinds = [config["kind"] for config in sample(ALWAYS, history, num=10)]
    assert kinds.count("c") >= 8


def test_all_failed_is_no_reason_to_stop():
    history = History()
    for seed in range(8):
        config = FLAT.sample(np.random.default_rng(seed))
        history.record_failure(history.record_decision(Proposal(target=1, config=config)))
    assert len(sample(ALWAYS, history, num=3)) == 3


def test_tells_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    with pytest.raises(MissingExtraError, match=r"\.\[search\]"):
        sample(RandomForestSampler())


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_hyperband_with_it_conforms(share):
    sampler = RandomForestSampler(num_trees=3, num_candidates=40, min_points=2, share=share)
    check_algorithm(Hyperband(max_epochs=9, sampler=sampler))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_trees": 0}, "num_trees must be a whole number"),
        ({"num_candidates": 1.5}, "num_candidates must be a whole number"),
        ({"min_points": 0}, "min_points must be a whole number"),
        ({"random_share": -0.1}, "random_share must be a number from 0 to 1"),
        ({"share": 2}, "share must be a number from 0 to 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(AlgorithmError, match=message):
        RandomForestSampler(**options)
