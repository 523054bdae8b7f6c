import numpy as np

from tests.search._drive import ask, follow, to_the_end
from thrifty.search import (
    GridSampler,
    GridSearch,
    History,
    Hyperband,
    Proposal,
    QuantizedSampler,
    RandomSampler,
    RandomSearch,
)
from thrifty.space import Choice, Float, Space


SPACE = Space(lr=Float(0.1, 0.4), kind=Choice(["a", "b"]))


def sample(sampler, *, num=1, drawn=0, seed=0, space=SPACE):
    history = History()
    for _ in range(drawn):
        history.record_decision(Proposal(target=1, config={}))
    return list(sampler.sample(history, space, num=num, rng=np.random.default_rng(seed)))


def test_grid_sampler_walks_the_grid():
    assert sample(GridSampler(levels=4), num=8) == list(SPACE.grid(levels=4))
    assert sample(GridSampler(levels=4), num=2, drawn=8) == []


def test_grid_sampler_gives_what_is_left():
    assert sample(GridSampler(levels=4), num=3, drawn=6) == list(SPACE.grid(levels=4))[6:]


def test_grid_sampler_has_no_order_of_asking():
    backwards = [sample(GridSampler(levels=3), drawn=n)[0] for n in reversed(range(6))]
    assert backwards[::-1] == list(SPACE.grid(levels=3))


def test_grid_sampler_keeps_spaces_apart():
    other = Space(lr=Float(0.5, 0.6))
    assert sample(GridSampler(levels=2), space=other) == [{"lr": 0.5}]
    assert sample(GridSampler(levels=2), space=SPACE) == [{"lr": 0.1, "kind": "a"}]


def test_random_sampler_depends_on_the_stream_alone():
    assert sample(RandomSampler(), seed=1) == sample(RandomSampler(), seed=1, drawn=5)
    assert sample(RandomSampler(), seed=1) != sample(RandomSampler(), seed=2)
    assert sample(RandomSampler(), seed=1, num=2) != sample(RandomSampler(), seed=1) * 2


def test_gridded_sampler_draws_few_values():
    drawn = {config["lr"] for config in sample(QuantizedSampler(levels=4), num=50)}
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
    walked = sample(GridSampler(levels=4, shuffle_seed=1), num=9)
    again = sample(GridSampler(levels=4, shuffle_seed=1), num=9, seed=5)
    assert walked == again
    assert walked != list(SPACE.grid(levels=4))
    assert sorted(map(repr, walked)) == sorted(map(repr, SPACE.grid(levels=4)))


class Learner(RandomSampler):
    """Sampler that claims to learn."""

    adapts = True


def test_a_sampler_that_learns_is_asked_for_no_more_than_can_start():
    for sampler, expected in [(RandomSampler(), 20), (Learner(), 3)]:
        algorithm = RandomSearch(max_epochs=2, num_trials=20, sampler=sampler)
        assert len(ask(algorithm, space=SPACE, num=3)) == expected


def test_verdicts_go_before_draws_of_a_sampler_that_learns():
    algorithm = Hyperband(max_epochs=9, sampler=Learner())
    history = History()
    while len(history.in_group(0)) < 9:
        follow(history, ask(algorithm, history, space=SPACE, num=4)[:1])
    decisions = ask(algorithm, history, space=SPACE, num=4)
    assert decisions
    assert all(decision.trial is not None for decision in decisions)


def test_what_is_enqueued_is_tried_first():
    history = History()
    wanted = [{"lr": 0.25, "kind": "b"}, {"lr": 0.35, "kind": "b"}]
    for config in wanted:
        history.record_enqueued(config)
    algorithm = RandomSearch(max_epochs=2, num_trials=4, sampler=GridSampler(levels=4))
    configs = [p.config for p in ask(algorithm, history, space=SPACE)]
    assert configs == [*wanted, *list(SPACE.grid(levels=4))[:2]]


def test_what_is_enqueued_takes_nothing_from_the_grid():
    history = History()
    history.record_enqueued({"lr": 0.25, "kind": "b"})
    algorithm = GridSearch(max_epochs=2, levels=2)
    follow(history, ask(algorithm, history, space=SPACE)[:2])
    follow(history, ask(algorithm, history, space=SPACE))
    assert [trial.config for trial in history][1:] == list(SPACE.grid(levels=2))
    assert not ask(algorithm, history, space=SPACE)


def test_enqueued_trials_beyond_what_can_start_wait():
    history = History()
    for lr in (0.1, 0.2, 0.3):
        history.record_enqueued({"lr": lr, "kind": "a"})
    algorithm = RandomSearch(max_epochs=2, num_trials=9, sampler=Learner())
    follow(history, ask(algorithm, history, space=SPACE, num=2))
    assert history.enqueued == ({"lr": 0.3, "kind": "a"},)
