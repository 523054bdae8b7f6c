import numpy as np

from tests.search._drive import ask, follow, to_the_end
from thrifty.search import GriddedSampler, GridSampler, History, RandomSampler, RandomSearch
from thrifty.space import Choice, Float, Space


SPACE = Space(lr=Float(0.1, 0.4), kind=Choice(["a", "b"]))


def sample(sampler, *, number=0, seed=0, space=SPACE):
    return sampler.sample(History(), space, number=number, rng=np.random.default_rng(seed))


def test_grid_sampler_walks_the_grid():
    walked = [sample(GridSampler(levels=4), number=n) for n in range(8)]
    assert walked == list(SPACE.grid(levels=4))
    assert sample(GridSampler(levels=4), number=8) is None


def test_grid_sampler_has_no_order_of_asking():
    backwards = [sample(GridSampler(levels=3), number=n) for n in reversed(range(6))]
    assert backwards[::-1] == list(SPACE.grid(levels=3))


def test_grid_sampler_keeps_spaces_apart():
    other = Space(lr=Float(0.5, 0.6))
    assert sample(GridSampler(levels=2), space=other) == {"lr": 0.5}
    assert sample(GridSampler(levels=2), space=SPACE) == {"lr": 0.1, "kind": "a"}


def test_random_sampler_depends_on_the_stream_alone():
    assert sample(RandomSampler(), seed=1) == sample(RandomSampler(), seed=1, number=5)
    assert sample(RandomSampler(), seed=1) != sample(RandomSampler(), seed=2)


def test_gridded_sampler_draws_few_values():
    drawn = {sample(GriddedSampler(levels=4), seed=seed)["lr"] for seed in range(50)}
    assert drawn == {0.1, 0.2, 0.3, 0.4}


def test_exhausted_sampler_ends_the_drawing():
    algorithm = RandomSearch(max_epochs=2, num_trials=99, sampler=GridSampler(levels=2))
    history = to_the_end(algorithm, space=SPACE)
    assert [trial.config for trial in history] == list(SPACE.grid(levels=2))


def test_numbers_go_on_after_what_is_in_the_history():
    algorithm = RandomSearch(max_epochs=2, num_trials=3, sampler=GridSampler(levels=2))
    history = History()
    follow(history, ask(algorithm, history, space=SPACE)[:1])
    rest = ask(algorithm, history, space=SPACE)
    assert [p.config for p in rest] == list(SPACE.grid(levels=2))[1:3]


def test_shuffled_grid_is_the_grid_in_another_order():
    walked = [sample(GridSampler(levels=4, shuffle_seed=1), number=n) for n in range(9)]
    again = [sample(GridSampler(levels=4, shuffle_seed=1), number=n, seed=5) for n in range(9)]
    assert walked == again
    assert walked[:8] != list(SPACE.grid(levels=4))
    assert sorted(map(repr, walked[:8])) == sorted(map(repr, SPACE.grid(levels=4)))
    assert walked[8] is None
