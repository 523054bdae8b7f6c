"""Studies of some configurations alone, and what is known of a configuration."""

from __future__ import annotations

import pytest

import thrifty as th
from tests.study.helpers import SOLO, make_study
from tests.study.test_units import in_steps
from thrifty.core import AlgorithmError, SpaceError, UsageError
from thrifty.study import Savings
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow

SPACE = th.Space(lr=th.Choice([0.1, 0.2, th.Step(0.1, [2])]), width=8)


def made(folder, **options):
    algorithm = options.pop("algorithm", th.GridSearch(max_epochs=4))
    return make_study(folder, space=SPACE, algorithm=algorithm, name="line", **options)


def test_only_what_is_asked_for_is_trained_and_nothing_twice(tmp_path):
    study = made(tmp_path)
    one = study.only([{"lr": 0.1}])
    assert one.plan().epochs_to_train == 4
    one.run(progress=False)
    assert [trial.config for trial in one.trials] == [{"lr": 0.1, "width": 8}]
    two = study.only([{"lr": th.Step(0.1, [2])}, {"lr": 0.1, "width": 8}])
    found = two.plan()
    assert (found.known_epochs, found.epochs_to_train) == (4, 2)
    assert len(study.only([{"lr": 0.1}]).trials) == 1  # a plan leaves nothing behind
    two.run(progress=False)
    assert len(two.trials) == 2  # the first is the trial of before
    assert study.plan().epochs_to_train == 4  # that of the whole study: lr = 0.2 is left
    whole = study.run(progress=False)
    for trial in two.trials:
        (same,) = (each for each in whole.trials if each.config == trial.config)
        assert same.curve == trial.curve


def test_a_configuration_trains_as_in_its_study(tmp_path):
    study = made(tmp_path).run(progress=False)
    only = study.only([{"lr": 0.2}], epochs=3).run(progress=False)
    assert only.trials[0].curve == study.trials[1].curve[:3]
    assert only.plan().epochs_to_train == 0


def test_what_is_known_says_who_trained_it(tmp_path):
    study = made(tmp_path)
    assert study.known({"lr": 0.1}) == []
    study.only([{"lr": 0.1}], epochs=2).run(progress=False)
    study.only([{"lr": th.Step(0.1, [2])}]).run(progress=False)
    found = study.known({"lr": th.Step(0.1, [2])})
    assert [(each.epoch, each.studies) for each in found] == [
        (1, ("line-only-2",)),
        (2, ("line-only-2",)),
        (3, ("line-only-4",)),
        (4, ("line-only-4",)),
    ]
    assert found[-1].kept
    assert len(study.known({"lr": th.Step(0.1, [2])}, epochs=3)) == 3
    assert [each.epoch for each in study.known({"lr": 0.1})] == [1, 2]
    study.only([{"lr": 0.1}]).run(progress=False)
    assert len(study.known({"lr": 0.1})) == 4
    curve = study.only([{"lr": th.Step(0.1, [2])}]).run(progress=False).trials[0].curve
    assert tuple(each.metrics["mse"] for each in found) == curve


def test_units_objectives_constraints_and_seeds_are_those_of_the_study(tmp_path):
    study = in_steps(tmp_path, seeds=2)
    only = study.only([{"lr": 0.1}], epochs=2)
    assert (only.unit, only.seeds) == (study.unit, 2)
    assert (only.algorithm.max_epochs, only.algorithm.target) == (4, 2)
    assert study.only([{"lr": th.Step(0.1, [th.steps(15)])}]).enqueued == [
        {"lr": th.Step(0.1, [2.5])}
    ]
    two = make_study(
        tmp_path,
        space=SPACE,
        name="two",
        metric=["mse", "train_loss"],
        mode=["min", "min"],
        constraints={"train_loss": th.at_most(9.0)},
        task=LineTask(),
        algorithm=th.GridSearch(max_epochs=4),
    )
    assert two.only([{"lr": 0.1}]).goals == two.goals


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, r"lacks lr; give all"),
        ({"lr": 0.3}, r"lr=0\.3 is not in"),
        ({"lr": 0.1, "rate": 1}, r"'rate' is not in the space"),
        ({"lr": 0.1, "width": 9}, r"width=9"),
    ],
)
def test_a_configuration_must_be_one_of_the_space(tmp_path, config, told):
    study = made(tmp_path)
    for refused in (study.known, lambda given: study.only([given])):
        with pytest.raises(SpaceError, match=told):
            refused(config)


def test_a_ladder_keeps_its_horizons(tmp_path):
    ladder = th.Ladder(horizons=[4, 8], cooldown=0.5, rates=[0.1])
    study = make_study(
        tmp_path, space=ladder, algorithm=th.GridSearch(max_epochs=8), name="ladder"
    ).run(progress=False)
    for trial in study.trials:
        known = study.known(trial.config)
        assert len(known) == trial.epochs
        assert known[-1].metrics["mse"] == trial.value
        assert study.only([trial.config]).plan().epochs_to_train == 0


class Other(LineTask):
    """A task that trains something else."""

    def loss(self, model, batch):
        return 3 * super().loss(model, batch)


def test_nothing_is_known_of_another_task_in_a_study_of_the_same_name(tmp_path):
    made(tmp_path).run(progress=False)
    edited = made(tmp_path, task=Other())
    assert edited.known({"lr": 0.1}) == []
    assert edited.only([{"lr": 0.1}]).plan().epochs_to_train == 4


def test_with_several_seeds_all_must_be_known(tmp_path):
    made(tmp_path).only([{"lr": 0.1}]).run(progress=False)
    study = made(tmp_path, seeds=3)
    assert study.known({"lr": 0.1}) == []  # one seed is
    only = study.only([{"lr": 0.1}], name="three")
    assert only.plan().epochs_to_train == 8
    only.run(progress=False)
    found = study.known({"lr": 0.1})
    assert [each.metrics["mse"] for each in found] == list(only.trials[0].curve)
    assert set(found[0].studies) == {"line-only-4", "three"}


def test_epochs_in_the_units_of_a_study(tmp_path):
    study = in_steps(tmp_path)
    only = study.only([{"lr": 0.1}], epochs=th.steps(12))
    assert (only.name, only.algorithm.target) == ("steps-only-2", 2)


@pytest.mark.parametrize(
    ("configs", "told"),
    [
        ({"lr": 0.1}, "give a list of configurations"),
        ("lr", "give a list of configurations"),
        (5, "give a list of configurations"),
        ([None], "a configuration is a dict"),
        ([5], "a configuration is a dict"),
    ],
)
def test_what_is_no_list_of_configurations(tmp_path, configs, told):
    with pytest.raises(UsageError, match=told):
        made(tmp_path).only(configs)


@pytest.mark.parametrize("epochs", [0, -1, True, 2.0, "3", 5])
def test_what_is_no_number_of_epochs(tmp_path, epochs):
    study = made(tmp_path)
    for refused in (study.known, lambda given, **options: study.only([given], **options)):
        with pytest.raises(AlgorithmError, match="epochs"):
            refused({"lr": 0.1}, epochs=epochs)
    with pytest.raises(UsageError, match="a configuration is a dict"):
        study.known(5)


def test_the_summary_tells_what_it_trained_from_what_was_known(tmp_path):
    study = make_study(tmp_path, space=th.Space(lr=th.Choice([0.1, 0.05])))
    study.only([{"lr": 0.1}], epochs=3, name="first").run(progress=False, executor=SOLO)
    both = study.only([{"lr": 0.1}, {"lr": 0.05}], epochs=3, name="both")
    both.run(progress=False, executor=SOLO)
    savings = both.savings
    assert (savings.unique_epochs, savings.known_epochs) == (6, 3)
    said = "3 epochs trained, 3 known before, for 6 trial-epochs: 3 saved; training 0."
    assert str(savings).startswith(said)
    assert str(study.only([{"lr": 0.1}], epochs=3, name="first").savings).startswith(
        "3 epochs trained for 3 trial-epochs: 0 saved; "
    )


@pytest.mark.parametrize(
    ("alone", "shared", "packed", "checks", "gain"),
    [
        (2.0, 1.0, 0, 0.0, "training 1.0 s instead of 2.0 s (2.00x by sharing)"),
        (0.04, 0.04, 0, 0.0, "training 1.0 s"),
        (0.8, 0.4, 0, 0.0, "training 1.0 s, 2.00x by sharing"),
        (
            0.8,
            0.8,
            3,
            0.5,
            (
                "training 1.0 s, 0.5 s (50.0 %) of it for checks, 1.00x by sharing, "
                "0.80x by packing (0.70 to 0.90)"
            ),
        ),
        (
            0.8,
            0.4,
            3,
            0.0,
            "training 1.0 s, 2.00x by sharing, packing made no measurable difference",
        ),
        (
            3.6,
            0.5,
            3,
            0.0,
            (
                "training 1.0 s instead of 3.6 s (3.60x by sharing, "
                "packing made no measurable difference)"
            ),
        ),
        (
            2.0,
            1.0,
            0,
            0.5,
            "training 1.0 s, 0.5 s (50.0 %) of it for checks, instead of 2.0 s (2.00x by sharing)",
        ),
    ],
)
def test_a_time_that_is_not_longer_is_not_compared(alone, shared, packed, checks, gain):
    savings = Savings(
        trial_epochs=6,
        unique_epochs=6,
        seconds_alone=alone,
        seconds_shared=shared,
        seconds=1.0,
        seconds_checks=checks,
        seconds_shared_low=0.7,
        seconds_shared_high=0.9 if checks else 1.1,
        packed_epochs=packed,
    )
    assert str(savings) == f"6 epochs trained for 6 trial-epochs: 0 saved; {gain}"


def test_a_study_that_trained_nothing_itself_has_factors():
    savings = Savings(
        trial_epochs=6,
        unique_epochs=6,
        known_epochs=6,
        seconds_alone=2.0,
        seconds_shared=1.0,
        seconds=0.0,
        seconds_shared_low=0.7,
        seconds_shared_high=1.1,
    )
    assert "instead of 2.0 s (2.00x by sharing)" in str(savings)
