import math

import numpy as np
import pytest

from tests.search._sampling import FLAT, NESTED, SCHEDULES, bowl, filled, mean_best, sample
from thrifty.core import AlgorithmError
from thrifty.search import BOHB, History, Hyperband, KDESampler, Proposal, RandomSampler
from thrifty.search._scores import coordinates_of
from thrifty.search.samplers._kde import Density, cdf, impute, normal_scores
from thrifty.space import Choice, Float, Space
from thrifty.testing import check_algorithm


pytestmark = pytest.mark.slow


ALWAYS = KDESampler(random_share=0.0)
NUM_OPTIONS = np.array([0, 3, 0, 2, 1])


def mixed_points(num, *, seed=0):
    rng = np.random.default_rng(seed)
    points = rng.random((num, len(NUM_OPTIONS)))
    for column, options in enumerate(NUM_OPTIONS):
        if options:
            points[:, column] = rng.integers(options, size=num) / max(options - 1, 1)
    return points


def density_twin(density, at):
    """Compute the density by its definition, one kernel after the other."""
    total = 0.0
    for point in density.points:
        product = 1.0
        for x, centre, width, options in zip(
            at, point, density.bandwidths, density.num_options, strict=True
        ):
            if options == 0:
                phi = [
                    0.5 * (1 + math.erf((end - centre) / width / math.sqrt(2)))
                    for end in (0.0, 1.0)
                ]
                product *= math.exp(-0.5 * ((x - centre) / width) ** 2)
                product /= width * math.sqrt(2 * math.pi) * (phi[1] - phi[0])
            elif x == centre:
                product *= 1 - width
            else:
                product *= width / (options - 1)
        total += product
    return total / len(density.points)


def test_density_is_its_slow_twin():
    density = Density.fit(mixed_points(12), NUM_OPTIONS, min_bandwidth=1e-3)
    at = mixed_points(30, seed=2)
    slow = [math.log(max(density_twin(density, x), 1e-32)) for x in at]
    np.testing.assert_allclose(density.log_density(at), slow, rtol=1e-9)


def test_density_is_one_in_all():
    density = Density.fit(mixed_points(9)[:, :2], NUM_OPTIONS[:2], min_bandwidth=1e-3)
    x = (np.arange(2000) + 0.5) / 2000
    at = np.array([(a, option / 2) for option in range(3) for a in x])
    assert np.exp(density.log_density(at)).sum() / 2000 == pytest.approx(1.0, abs=1e-5)


def test_bandwidths_follow_the_normal_reference_rule():
    points = mixed_points(50)
    density = Density.fit(points, NUM_OPTIONS, min_bandwidth=1e-3)
    factor = 1.06 * 50 ** (-1 / 9)
    np.testing.assert_allclose(density.bandwidths[[0, 2]], factor * points[:, [0, 2]].std(axis=0))
    # The bandwidth of two options is the standard deviation of their index.
    assert density.bandwidths[3] == pytest.approx(min(factor * points[:, 3].std(), 0.5))
    assert density.bandwidths[4] == 0.0


def test_bandwidths_have_a_least_and_a_largest():
    same = np.full((6, 2), 0.5)
    density = Density.fit(same, np.array([0, 3]), min_bandwidth=0.9)
    np.testing.assert_allclose(density.bandwidths, [0.9, 2 / 3])


def test_draws_are_in_the_unit_cube():
    density = Density.fit(mixed_points(8), NUM_OPTIONS, min_bandwidth=1e-3)
    drawn = density.draw(500, factor=100.0, rng=np.random.default_rng(0))
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert set(drawn[:, 1]) == {0.0, 0.5, 1.0}
    assert 0.4 < drawn[:, 0].mean() < 0.6


def test_draws_are_from_the_density():
    points = np.array([[0.1], [0.12], [0.9]])
    density = Density.fit(points, np.array([0]), min_bandwidth=1e-3)
    drawn = density.draw(4000, factor=1.0, rng=np.random.default_rng(0))[:, 0]
    x = (np.arange(1000) + 0.5) / 1000
    mean = (np.exp(density.log_density(x[:, None])) * x).mean()
    assert drawn.mean() == pytest.approx(mean, abs=0.02)


def test_gaps_are_filled_by_one_donor():
    gap = np.nan
    points = np.array([[0.1, gap, gap], [0.2, 0.3, 0.4], [0.5, 0.6, 0.7]])
    for seed in range(8):
        filled_in = impute(points, points, np.array([0, 0, 0]), rng=np.random.default_rng(seed))
        assert tuple(filled_in[0, 1:]) in {(0.3, 0.4), (0.6, 0.7)}
        np.testing.assert_equal(filled_in[1:], points[1:])


def test_gaps_that_nobody_fills_are_random():
    points = np.full((50, 2), np.nan)
    filled_in = impute(points, points, np.array([0, 3]), rng=np.random.default_rng(0))
    assert len(set(filled_in[:, 0])) == 50
    assert set(filled_in[:, 1]) == {0.0, 0.5, 1.0}


def test_normal_scores_mind_the_order_alone():
    scores = np.array([0.3, 0.1, 0.2, 0.1])
    np.testing.assert_equal(normal_scores(scores), normal_scores(np.exp(50 * scores)))
    assert normal_scores(scores)[1] == normal_scores(scores)[3]
    np.testing.assert_allclose(cdf(normal_scores(scores)), [0.875, 0.25, 0.625, 0.25])


def test_depends_on_the_stream_alone():
    history = filled(running=3)
    assert sample(ALWAYS, history, num=4) == sample(ALWAYS, history, num=4)
    assert sample(ALWAYS, history, num=4) != sample(ALWAYS, history, num=4, seed=1)


def test_it_finds_better_trials_than_random_sampling():
    options = {"num_trials": 80, "num_seeds": 12}
    sampler = KDESampler()
    assert mean_best(sampler, bowl, **options) > 0.5 * mean_best(RandomSampler(), bowl, **options)


def test_draws_near_good_trials():
    history = filled(score=lambda config: config["x"] + (config["kind"] == "b"), num=60)
    drawn = [sample(ALWAYS, history, seed=seed)[0] for seed in range(20)]
    assert np.mean([config["x"] for config in drawn]) > 0.7
    assert [config["kind"] for config in drawn].count("b") > 14


@pytest.mark.parametrize("space", [FLAT, NESTED, SCHEDULES, Space(x=1, y=Choice(["a"]))])
def test_configurations_are_of_the_space(space):
    history = filled(space, running=2)
    for config in sample(KDESampler(), history, space, num=30):
        coordinates_of(space).to_unit(config)


def test_without_data_it_is_random():
    few = filled(num=2 * (len(coordinates_of(FLAT)) + 1) - 1)
    for history in (History(), few):
        drawn = sample(ALWAYS, history, num=200)
        assert 0.3 < np.mean([config["x"] for config in drawn]) < 0.7
        assert max(config["x"] for config in drawn) > 0.97


def test_min_points_are_enough():
    history = filled(score=lambda config: config["x"], num=8)
    eager = KDESampler(random_share=0.0, min_points=4)
    assert np.mean([config["x"] for config in sample(eager, history, num=50)]) > 0.55


def test_random_share_of_one_is_random():
    history = filled(score=lambda config: config["x"])
    drawn = sample(KDESampler(random_share=1.0), history, num=200)
    assert 0.4 < np.mean([config["x"] for config in drawn]) < 0.6


def test_a_batch_has_no_configuration_twice():
    space = Space(a=Choice(list(range(6))), b=Choice(list(range(6))))
    history = filled(space, num=10, running=2, score=lambda config: -config["a"] - config["b"])
    drawn = [tuple(c.values()) for c in sample(ALWAYS, history, space, num=12)]
    tried = {tuple(trial.config.values()) for trial in history}
    assert len(set(drawn)) == 12
    assert not set(drawn) & tried


def test_goes_on_where_all_has_been_tried():
    space = Space(a=Choice([1, 2]), b=Choice([1, 2]))
    assert len(sample(ALWAYS, filled(space), space, num=9)) == 9


def test_a_batch_spreads():
    space = Space(x=Float(0.0, 1.0))
    history = filled(space, score=lambda config: -abs(config["x"] - 0.5))
    batch = [config["x"] for config in sample(ALWAYS, history, space, num=8)]
    alone = [sample(ALWAYS, history, space, seed=seed)[0]["x"] for seed in range(8)]
    assert np.std(batch) > 2 * np.std(alone)


def test_keeps_away_from_trials_in_training():
    space = Space(x=Float(0.0, 1.0))
    history = filled(space, score=lambda config: -abs(config["x"] - 0.5))
    before = sample(ALWAYS, history, space)[0]["x"]
    history.record_decision(Proposal(target=9, config={"x": before}))
    after = sample(ALWAYS, history, space)[0]["x"]
    assert abs(after - before) > 0.02


def test_distance_is_to_what_is_taken():
    density = Density.fit(mixed_points(8), NUM_OPTIONS, min_bandwidth=1e-3)
    at = mixed_points(5, seed=1)
    assert (density.log_distance(at, at[:0]) == 0.0).all()
    near = density.log_distance(at, at[:1])
    assert near[0] == pytest.approx(math.log(1e-32))
    assert (near[1:] > math.log(0.01)).all()
    far = np.array([[0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]])
    assert density.log_distance(far[:1], far[1:])[0] > -0.1


def test_failed_and_infeasible_trials_are_bad():
    history = History()
    for index, config in enumerate(FLAT.sample(np.random.default_rng(i)) for i in range(60)):
        number = history.record_decision(Proposal(target=1, config=config))
        if config["kind"] == "a":
            history.record_failure(number)
        else:
            violation = float(config["kind"] == "b")
            history.record_scores(number, [float(index)], violation=violation)
    assert {config["kind"] for config in sample(ALWAYS, history, num=10)} == {"c"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampler", [KDESampler(), KDESampler(min_points=2, share=0.1)])
def test_hyperband_with_it_conforms(sampler):
    check_algorithm(Hyperband(max_epochs=9, sampler=sampler))


def test_bohb_is_hyperband_with_the_model():
    bohb = BOHB(max_epochs=9, eta=2, num_trials=20, random_share=0.5, share=0.1)
    sampler = KDESampler(min_bandwidth=1e-3, random_share=0.5, share=0.1)
    assert bohb == Hyperband(max_epochs=9, eta=2, num_trials=20, sampler=sampler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_share": 1.5}, "top_share must be a number from 0 to 1"),
        ({"random_share": True}, "random_share must be a number"),
        ({"share": "much"}, "share must be a number"),
        ({"num_candidates": 0}, "num_candidates must be a whole number"),
        ({"min_points": 0}, "min_points must be a whole number"),
        ({"min_bandwidth": 0.0}, "min_bandwidth must be a positive number"),
        ({"bandwidth_factor": -1}, "bandwidth_factor must be a positive number"),
        ({"bandwidth_factor": None}, "bandwidth_factor must be a positive number"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(AlgorithmError, match=message):
        KDESampler(**options)
