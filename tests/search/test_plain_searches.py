"""Grid, random and enqueued trials: all are proposed at once, and trained fully."""

import numpy as np

from tests.search._drive import SPACE, ask, follow, to_the_end
from thrifty.search import Enqueued, GridSearch, History, RandomSearch


def test_grid_search_asks_for_the_whole_grid_at_once():
    asked = ask(GridSearch(max_epochs=9, levels=3))
    assert [proposal.config for proposal in asked] == list(SPACE.grid(levels=3))
    assert {proposal.target for proposal in asked} == {9}


def test_random_search_asks_for_all_trials_at_once():
    asked = ask(RandomSearch(max_epochs=9, num_trials=20))
    assert len({proposal.config["lr"] for proposal in asked}) == 20


def test_they_end_when_all_is_trained():
    for algorithm in (GridSearch(max_epochs=3), RandomSearch(max_epochs=3, num_trials=4)):
        assert all(trial.reached == 3 for trial in to_the_end(algorithm))


def test_what_was_recorded_is_not_asked_again():
    algorithm, history = RandomSearch(max_epochs=3, num_trials=10), History()
    follow(history, ask(algorithm)[:4])
    assert len(ask(algorithm, history)) == 6


def test_draws_come_from_the_stream():
    algorithm = RandomSearch(max_epochs=1, num_trials=3)
    rng = np.random.default_rng(5)
    expected = [SPACE.sample(rng) for _ in range(3)]
    assert [proposal.config for proposal in ask(algorithm, seed=5)] == expected


def test_only_enqueued_trials_are_asked_for_each_once():
    algorithm, history = Enqueued(max_epochs=9, epochs=3), History()
    assert ask(algorithm, history) == []
    for lr in (0.1, 0.2):
        history.record_enqueued({"lr": lr, "kind": "a"})
    asked = follow(history, ask(algorithm, history))
    assert [(each.config["lr"], each.target) for each in asked] == [(0.1, 3), (0.2, 3)]
    assert ask(algorithm, history) == []
    history.record_enqueued({"lr": 0.3, "kind": "b"})
    assert [each.config["lr"] for each in ask(algorithm, history)] == [0.3]
