"""Branches share the epochs before them exactly, and are then trained as if alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import thrifty as th
from tests.depth import draws
from tests.study.helpers import SOLO, make_study, trained
from thrifty.core import ScheduleError, SpaceError, UsageError
from thrifty.search import GridSearch
from thrifty.space import (
    REX,
    Branched,
    Choice,
    Constant,
    Cosine,
    Linear,
    Space,
    Step,
    Timeline,
    common_prefix,
    config_from_json,
    config_to_json,
)


pytestmark = pytest.mark.slow

SCHEDULES = [
    Constant(0.1),
    Linear(0.1),
    Cosine(0.1, epochs=5),
    REX(0.2),
    REX(0.2, sample=0.25),
    Step(0.4, [2, 5]),
    Linear(0.1).then(Cosine(0.4), at=3),
]


@pytest.mark.parametrize("before", SCHEDULES, ids=repr)
@pytest.mark.parametrize("at", [1, 3, 4])
def test_values_are_the_same_until_the_branch_and_multiples_after_it(before, at):
    branch = Branched(before, at=at, factor=0.5)
    one, other = (s.values(0, 8, epochs=8, steps_per_epoch=4) for s in (before, branch))
    assert (one[: 4 * at] == other[: 4 * at]).all()
    np.testing.assert_allclose(other[4 * at :], 0.5 * one[4 * at :], rtol=1e-12, atol=1e-15)
    shared = common_prefix(Timeline({"lr": before}, epochs=8), Timeline({"lr": branch}, epochs=8))
    assert shared == at


@pytest.mark.parametrize("before", SCHEDULES, ids=repr)
@pytest.mark.parametrize("after", [0.01, Linear(0.3), Step(0.2, [2])], ids=repr)
def test_another_schedule_begins_at_the_branch(before, after):
    branch = Branched(before, after, at=3)
    values = branch.values(0, 8, epochs=8, steps_per_epoch=2)
    assert (values[:6] == before.values(0, 3, epochs=8, steps_per_epoch=2)).all()
    alone = after if isinstance(after, th.Schedule) else Constant(after)
    np.testing.assert_allclose(
        values[6:], alone.values(0, 5, epochs=5, steps_per_epoch=2), rtol=1e-12, atol=1e-15
    )


def test_branches_of_branches_are_stored():
    branch = Branched(Branched(Linear(0.1), at=2, factor=2.0), Constant(1), at=4)
    config = {"lr": branch, "kind": Branched(Constant("a"), Constant("b"), at=3)}
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Branched(0.1, at=0), "at must"),
        (lambda: Branched(0.1, at=2, factor=math.nan), "finite"),
        (lambda: Branched(0.1, at=2, factor=10**400), "finite"),
        (lambda: Branched(0.1, 0.2, at=2, factor=0.5), "multiplies what goes on"),
        (lambda: Branched("adam", at=2, factor=0.5).segments(4), "cannot be multiplied"),
        (lambda: Branched(True, at=2, factor=0.5).segments(4), "cannot be multiplied"),
        (lambda: Branched(0.1, Step(0.1, [9]), at=2).segments(4), "needs at least"),
    ],
)
def test_branches_that_cannot_be(make, told):
    with pytest.raises((ScheduleError, SpaceError), match=told):
        make()


def grid(folder, **options):
    space = Space(lr=Choice([0.1, Linear(0.1), REX(0.2), Step(0.1, [3])]), width=Choice([0, 3]))
    return make_study(folder, algorithm=GridSearch(max_epochs=6), space=space, **options)


@settings(max_examples=draws(6, 60), deadline=None)
@given(number=st.integers(0, 7), epoch=st.integers(1, 5), factor=st.sampled_from([0.3, 2.0, None]))
def test_a_branch_is_as_if_trained_alone_and_its_prefix_is_free(
    tmp_path_factory, number, epoch, factor
):
    folder = tmp_path_factory.mktemp("branch")
    study = grid(folder).run(progress=False, executor=SOLO)
    change = {"lr": Linear(0.05)} if factor is None else None
    branch = study.branch(
        number, after=epoch, scale=None if change else {"lr": factor}, change=change
    )
    study.enqueue_trial(branch)
    assert trained(study) == branch.epochs_to_train == branch.epochs_again + 6 - epoch
    trial = study.trials[-1]
    assert trial.config == branch.config
    assert trial.curve[:epoch] == study.trials[number].curve[:epoch]
    alone = folder / "alone"
    alone.mkdir()
    (other,) = (
        make_study(alone, algorithm=GridSearch(max_epochs=6), space=Space(**branch.config))
        .run(progress=False, executor=SOLO)
        .trials
    )
    assert other.curve == trial.curve


def test_a_branch_of_a_state_that_is_not_kept_says_what_is_trained_again(tmp_path):
    study = grid(tmp_path).run(progress=False, executor=SOLO)
    kept = [known.epoch for known in study.known(study.trials[0].config) if known.kept]
    branch = study.branch(0, after=5, scale={"lr": 0.5})
    nearest = max(epoch for epoch in [0, *kept] if epoch <= 5)
    assert (branch.kept_epoch, branch.epochs_again) == (nearest, 5 - nearest)
    assert "1 to train" not in str(branch) or nearest == 5
    assert ("trained again" in str(branch)) == (nearest < 5)
    study.enqueue_trial(branch)
    assert trained(study) == branch.epochs_to_train
    assert study.branch(0, after=5, scale={"lr": 0.5}).epochs_to_train == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("executor", [SOLO, th.Local(workers=2)])
def test_states_that_are_kept_on_purpose_make_branches_free(tmp_path, executor):
    storage = th.Storage(url=f"sqlite:///{tmp_path}/t.db", checkpoint_every=2)
    study = grid(tmp_path, storage=storage).run(progress=False, executor=executor)
    plain = grid(tmp_path / "plain").run(progress=False, executor=SOLO)
    assert [t.curve for t in study.trials] == [t.curve for t in plain.trials]
    assert study.savings.unique_epochs == plain.savings.unique_epochs
    for number in range(8):
        for epoch in (2, 4):
            branch = study.branch(number, after=epoch, scale={"lr": 0.5})
            assert (branch.epochs_again, branch.epochs_to_train) == (0, 6 - epoch)
        assert study.branch(number, after=5, scale={"lr": 0.5}).epochs_again <= 1
    branch = study.branch(3, after=4, scale={"lr": 0.5})
    study.enqueue_trial(branch)
    assert trained(study) == 2


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_epochs_between_states_are_a_number(every):
    with pytest.raises(UsageError, match="checkpoint_every"):
        th.Storage(checkpoint_every=every)


def test_acts_say_who_has_enqueued_what(tmp_path):
    study = grid(tmp_path)
    study.enqueue_trial(study.space.sample(np.random.default_rng(0)))  # before it exists
    study.run(progress=False, executor=SOLO)
    assert not study.acts
    branch = study.branch(1, after=2, scale={"lr": 0.5})
    again = grid(tmp_path)
    for each in (branch, branch, study.branch(1, after=3, change={"lr": 0.05})):
        again.enqueue_trial(each)  # a branch that is enqueued already is not enqueued again
    config = dict(again.space.sample(np.random.default_rng(1)))
    again.enqueue_trial(config)
    first, second, third = study.acts
    assert [act.kind for act in (first, second, third)] == ["branch", "branch", "enqueue"]
    assert [act.trial for act in (first, second, third)] == [1, 1, None]
    assert first.text == "after epoch 2: lr times 0.5"
    assert second.text == "after epoch 3: lr = Constant(0.05)"
    assert all(f"{name}=" in third.text for name in config)
    assert all(act.who and not act.is_queued for act in study.acts)


def test_several_seeds_branch_together(tmp_path):
    study = grid(tmp_path, seeds=2).run(progress=False, executor=SOLO)
    branch = study.branch(1, after=2, scale={"lr": 0.5})
    study.enqueue_trial(branch)
    assert trained(study) == branch.epochs_to_train
    assert study.trials[-1].num_seeds == 2


def test_branches_branch(tmp_path):
    study = grid(tmp_path).run(progress=False, executor=SOLO)
    study.enqueue_trial(study.branch(0, after=2, scale={"lr": 0.5}))
    trained(study)
    twig = study.branch(len(study.trials) - 1, after=4, change={"lr": 0.01})
    study.enqueue_trial(twig)
    assert trained(study) == twig.epochs_to_train
    assert study.trials[-1].curve[:4] == study.trials[-2].curve[:4]


def test_a_hyperparameter_that_is_read_once_cannot_change(tmp_path):
    study = grid(tmp_path).run(progress=False, executor=SOLO)
    study.enqueue_trial(study.branch(0, after=2, change={"width": 3}))
    trained(study)
    assert study.trials[-1].state == "failed"
    assert "reads it only once" in study.trials[-1].error


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("finished")).run(progress=False, executor=SOLO)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"trial": 99, "after": 2, "scale": {"lr": 0.5}}, "has no trial 99; it has 8"),
        ({"trial": True, "after": 2, "scale": {"lr": 0.5}}, "has no trial True"),
        ({"trial": 1.0, "after": 2, "scale": {"lr": 0.5}}, "has no trial 1.0"),
        ({"trial": 0, "after": 6, "scale": {"lr": 0.5}}, "after 1 to 5"),
        ({"trial": 0, "after": 0, "scale": {"lr": 0.5}}, "after 1 to 5"),
        ({"trial": 0, "after": 1.5, "scale": {"lr": 0.5}}, "after 1 to 5"),
        ({"trial": 0, "after": 2, "scale": {"rate": 0.5}}, "has no 'rate'; it has: lr, width"),
        ({"trial": 0, "after": 2, "scale": 0.5}, "is a dict such as"),
        ({"trial": 0, "after": 2, "change": "lr"}, "is a dict such as"),
        ({"trial": 0, "after": 2}, "nothing changes"),
        ({"trial": 0, "after": 2, "scale": {"lr": 1.0}}, "nothing changes"),
        ({"trial": 0, "after": 2, "change": {"lr": 0.1}}, "nothing changes"),
        (
            {"trial": 0, "after": 2, "scale": {"lr": 0.5}, "change": {"lr": 0.1}},
            "in scale and in change",
        ),
    ],
)
def test_branches_that_mean_nothing(finished, options, told):
    trial = options["trial"]
    with pytest.raises(UsageError, match=told):
        finished.branch(trial, **{key: options[key] for key in options.keys() - {"trial"}})


@pytest.mark.parametrize("config", ["lr", None, 3, [("lr", 0.1)]])
def test_what_is_enqueued_is_a_dict(tmp_path, config):
    with pytest.raises(UsageError, match="is a dict such as"):
        grid(tmp_path).enqueue_trial(config)


def test_trials_of_a_ladder_do_not_branch(tmp_path):
    ladder = th.Ladder(horizons=[4, 8], rates=[0.1], cooldown=0.25)
    study = make_study(tmp_path, space=ladder, algorithm=GridSearch(max_epochs=8))
    with pytest.raises(UsageError, match="cannot branch"):
        study.run(progress=False, executor=SOLO).branch(0, after=2, scale={"lr": 0.5})


def test_a_study_that_was_never_run_has_no_trial_to_branch(tmp_path):
    study = grid(tmp_path)
    with study._repository().open() as store:
        repository = study._repository()
        repository.make(
            store, plan=repository.open_plan(store).id, file=None, enqueued=[], sources=[]
        )
    with pytest.raises(UsageError, match="study 's' has no trials yet; run it first"):
        study.branch(0, after=2, scale={"lr": 0.5})
