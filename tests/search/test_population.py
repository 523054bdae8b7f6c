import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.search._drive import ask, follow, to_the_end, with_scores
from thrifty.core import AlgorithmError
from thrifty.search import History, PopulationBasedTraining, Proposal, Stop
from thrifty.search._population import perturbed
from thrifty.space import Choice, Float, Int, Space, Step, Timeline, common_prefix


SPACE = Space(
    lr=Float(0.01, 1.0, log=True),
    batch_size=Choice([64, 16, 32]),
    width=Int(2, 9),
    decay=Choice([Step(0.1, [3]), 0.0]),
)


def kind(**options):
    given = {"max_epochs": 12, "population": 4, "interval": 3, "explore": ("lr",), **options}
    return PopulationBasedTraining(**given)


def timeline(trial):
    return Timeline(trial.config, epochs=12)


def play(algorithm=None, **options):
    return to_the_end(algorithm or kind(), space=SPACE, **options)


def test_first_the_population_for_one_interval():
    asked = ask(kind(), space=SPACE)
    assert [(p.trial, p.target, p.group) for p in asked] == [(None, 3, 0)] * 4


def test_then_the_worst_is_replaced_by_a_branch_of_the_best():
    history = History()
    follow(history, ask(kind(), history, space=SPACE))
    *others, fresh = ask(kind(), history, space=SPACE)
    assert [d.trial for d in others if isinstance(d, Proposal)] == [3, 2, 1]
    assert Stop(trial=0) in others
    assert (fresh.parent, fresh.target, fresh.group) == ((3, 3), 6, 1)


def test_waits_for_the_whole_generation():
    history = History()
    decisions = ask(kind(), space=SPACE)
    follow(history, decisions[:3])
    history.record_decision(decisions[3])
    assert ask(kind(), history, space=SPACE) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.25, 1.0]))
def test_branches_share_all_up_to_the_branch(seed, resample):
    algorithm = kind(explore=("lr", "batch_size", "width"), resample=resample)
    scores = np.random.default_rng(seed).random((99, 13))
    history = play(algorithm, score=lambda number, epoch: scores[number, epoch])
    for trial in (t for t in history if t.parent):
        donor, epoch = trial.parent
        assert common_prefix(timeline(trial), timeline(history[donor])) >= epoch


def test_branches_of_branches_keep_all_that_came_before():
    history = play(score=lambda number, epoch: number + epoch)
    *_, youngest = (t for t in history if t.parent)
    donor = history[youngest.parent[0]]
    assert donor.parent, "later trials are better here: the donor is a branch itself"
    mine, donors = ([timeline(t).at(e)["lr"] for e in range(12)] for t in (youngest, donor))
    assert mine[:9] == donors[:9]
    assert len(set(mine)) >= 3
    assert mine[9] != donors[9]


def test_only_what_is_explored_changes():
    history = play(kind(explore=("width",)))
    for trial in (t for t in history if t.parent):
        donor = history[trial.parent[0]].config
        assert {n for n in SPACE.names if trial.config[n] != donor[n]} <= {"width"}


def test_population_keeps_its_size_when_trials_fail():
    history = play(failing=(0, 1, 3, 5))
    assert sum(t.reached == 12 for t in history) >= 2
    assert len(history.leaderboard(3)) == 4
    assert all(history[t.parent[0]].state != "failed" for t in history if t.parent)


def test_ends_when_all_have_failed():
    assert len(play(failing=range(99))) == 4


def test_generation_recorded_in_part_is_completed():
    history = History()
    follow(history, ask(kind(), history, space=SPACE))
    follow(history, ask(kind(), history, space=SPACE)[:3])
    rest = ask(kind(), history, space=SPACE)
    assert len(rest) == 2
    assert rest[-1].parent == (3, 3)


def test_inactive_hyper_parameters_are_left_out():
    space = Space(kind=Choice(["a", "b"]), lr=Float(0.1, 1.0).when(kind="b"))
    history = to_the_end(kind(), space=space)
    assert {trial.config["kind"] for trial in history} == {"a", "b"}
    assert all(("lr" in t.config) == (t.config["kind"] == "b") for t in history)


def test_whole_numbers_stay_whole():
    history = play(kind(explore=("batch_size", "width"), resample=0.0))
    for trial in history:
        values = [timeline(trial).at(epoch) for epoch in range(12)]
        assert {type(v[name]) for v in values for name in ("batch_size", "width")} == {int}


@pytest.mark.parametrize(
    ("domain", "value", "factor", "moved"),
    [
        (Float(0.01, 1.0), 0.5, 1.2, 0.6),
        (Float(0.01, 1.0), 0.9, 1.2, 1.0),
        (Float(0.0, 1.0, step=0.25), 0.5, 1.2, 0.75),
        (Float(0.0, 1.0, step=0.25), 0.0, 0.8, 0.0),
        (Int(1, 100), 50, 0.8, 40),
        (Int(1, 100), 2, 1.2, 3),
        (Int(1, 100), 1, 0.8, 1),
        (Int(0, 100, step=10), 50, 1.2, 60),
        (Choice([64, 16, 32]), 32, 1.2, 64),
        (Choice([64, 16, 32]), 16, 0.8, 16),
    ],
)
def test_a_value_is_moved_by_a_factor_within_its_domain(domain, value, factor, moved):
    assert perturbed(domain, value, factor) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Space(width=Int(1, 2)), "which the space does not have"),
        (Space(lr=0.1), "only Float, Int and a Choice of numbers"),
        (Space(lr=Choice([0.1, Step(0.1, [3])])), "only Float, Int and a Choice of numbers"),
        (Space(lr=Choice([True, False])), "only Float, Int and a Choice of numbers"),
        (Space(lr=Choice([1, 2]), width=Int(1, 2).when(lr=1)), "'width' depends on"),
    ],
)
def test_space_that_cannot_be_explored(space, message):
    with pytest.raises(AlgorithmError, match=message):
        ask(kind(), space=space)


def test_what_is_no_member_yet_is_no_matter():
    assert ask(kind(population=2), with_scores(1.0, target=3), space=SPACE)[0].group == 0
