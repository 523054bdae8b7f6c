"""A study refuses a schedule that no code follows, and trains one that is followed."""

from __future__ import annotations

import pytest
import torch

import thrifty as th
from tests.study.helpers import Count, make_study
from thrifty.core import SpaceError, TaskError
from thrifty.pack import SGD, AdamW, times
from thrifty.run import Local, train_alone
from thrifty.search import GridSearch, PopulationBasedTraining, RandomSearch
from thrifty.space import Choice, Constant, Cosine, Float, Int, Linear, MultiStep, Space, Timeline
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


GROWS = MultiStep([2, 4], milestones=[1])


def refuses(tmp_path, error, message, **changes):
    count = Count()
    with pytest.raises(error, match=message):
        make_study(tmp_path, **changes).run(progress=False, observers=[count])
    assert count.epochs == 0


# -- before any training ---------------------------------------------------------------------


def test_overriding_adapt_does_not_switch_the_check_off(tmp_path):
    """An override of ``adapt`` keeps the check on.

    ``LineTask.adapt`` follows ``dropout``, not ``width``.
    """
    refuses(
        tmp_path,
        TaskError,
        r"'width' has a schedule, but LineTask\.model reads it only once",
        task=LineTask(),
        space=Space(lr=0.1, width=GROWS),
    )


def test_a_population_that_varies_what_is_read_once(tmp_path):
    refuses(
        tmp_path,
        TaskError,
        r"'width' has a schedule, but LineTask\.model reads it only once",
        space=Space(lr=Float(0.01, 0.1), width=Int(2, 4)),
        algorithm=PopulationBasedTraining(
            max_epochs=4, population=2, interval=2, explore=("lr", "width")
        ),
    )


def test_a_pattern_that_no_parameter_has(tmp_path):
    class Task(LineTask):
        optimizer = SGD(lr="lr", groups={"head.*": {"lr": 0.0}})

    refuses(tmp_path, TaskError, r"'head\.\*'.*weight, bias", task=Task(), space=Space(lr=0.1))


def test_a_hyper_parameter_of_a_group_that_is_not_in_the_space(tmp_path):
    class Task(LineTask):
        optimizer = SGD(lr=0.1, groups={"*": {"lr": times("head", 0.1)}})

    refuses(tmp_path, TaskError, "follows hyper-parameter 'head'", task=Task(), space=Space(lr=0.1))


def test_a_relation_that_cannot_be_kept(tmp_path):
    class Task(LineTask):
        optimizer = th.Optimizer(
            lambda parameters, rate: torch.optim.SGD(parameters, lr=rate), rate="lr"
        )

    refuses(
        tmp_path, TaskError, "no ratio that could be kept", task=Task(), space=Space(lr=Cosine(0.1))
    )


def test_a_schedule_that_nobody_reads_is_told(tmp_path, caplog):
    space = Space(lr=0.1, decay=Linear(0.1))
    make_study(tmp_path, space=space).run(progress=False)
    assert "'decay' has a schedule, but LineTask does not read it" in caplog.text


class Optional(LineTask):
    """Reads one hyper-parameter under a condition, and another by a wrong name."""

    def model(self, hp):
        if hp.kind == "wide":
            assert hp.times > 0
        hp.get("widht", 1)
        return super().model(hp)


class Later(Optional):
    def model(self, hp):
        self.hp = hp
        return super().model(hp)


ONCE = RandomSearch(max_epochs=1, num_trials=2)
CHOICES = {
    "lr": 0.1,
    "width": Choice([1, 2]),
    "kind": Choice(["narrow", "plain", "wide"]),
    "times": Int(1, 9),
    "extra": Float(0, 1).when(kind="plain"),
    "fixed": 3,
}


def test_a_tuned_hyper_parameter_that_nobody_reads_is_told(tmp_path, caplog):
    space = Space(**CHOICES, widths=Choice([3, 4]))
    make_study(tmp_path, task=Optional(), space=space, algorithm=ONCE).run(progress=False)
    (said,) = [r.getMessage() for r in caplog.records if "configurations" in r.getMessage()]
    assert said.startswith("Optional reads 'widths' in none of")
    assert "take it out of the space" in said


@pytest.mark.parametrize("task", [Optional(), Later()])
def test_what_may_be_read_elsewhere_or_later_is_not_told(tmp_path, caplog, task):
    more = {"widths": Choice([3, 4])} if isinstance(task, Later) else {}
    space = Space(**CHOICES, **more)
    make_study(tmp_path, task=task, space=space, algorithm=ONCE).run(progress=False)
    assert "configurations" not in caplog.text


def test_models_that_take_long_to_make_are_not_tried_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("thrifty.study._preflight._MAX_SECONDS", -1.0)
    space = Space(**CHOICES, widths=Choice([3, 4]))
    make_study(tmp_path, task=Optional(), space=space, algorithm=ONCE).run(progress=False)
    assert "configurations" not in caplog.text


def test_options_that_are_too_many_to_try_are_not_told(tmp_path, caplog):
    kinds = ["plain", *(f"v{number}" for number in range(40))]
    space = Space(**{**CHOICES, "kind": Choice(kinds)})
    make_study(tmp_path, task=Optional(), space=space, algorithm=ONCE).run(progress=False)
    assert "configurations" not in caplog.text


def test_a_list_that_holds_a_schedule():
    with pytest.raises(SpaceError, match=r"betas=.*a list cannot hold a schedule"):
        Space(betas=Choice([(0.9, 0.99), (Cosine(0.9), 0.999)]))


def test_a_hyper_parameter_that_is_named_like_a_method():
    with pytest.raises(SpaceError, match="cannot be called 'items'"):
        Space(lr=0.1, items=Int(1, 3))


# -- while it trains -------------------------------------------------------------------------


class Conditional(LineTask):
    """Task in which only one kind of model has a width; the dry run may see the other kind."""

    def model(self, hp):
        return torch.nn.Linear(1, hp.width if hp.kind == "wide" else 1)

    def loss(self, model, batch):
        x, y = batch
        return (model(x).mean(1, keepdim=True) - y).square().mean()


def test_what_the_dry_run_could_not_foresee_fails_where_it_begins_to_move(tmp_path, monkeypatch):
    """What the dry run could not predict fails when the width begins to move.

    Its first epoch is also that of a trial whose width stays, which must not fail.
    """
    space = Space(lr=0.1, kind=Choice(["wide", "plain"]), width=GROWS)
    monkeypatch.setattr(Space, "sample", lambda self, rng: {"lr": 0.1, "kind": "plain", "width": 2})
    count = Count()
    study = make_study(tmp_path, task=Conditional(), space=space)
    study.run(progress=False, observers=[count], executor=Local(pack="solo"))
    failed, plain = sorted(study.trials, key=lambda trial: trial.config["kind"], reverse=True)
    assert failed.state == "failed"
    assert "'width' has a schedule, but Conditional.model reads it" in failed.error
    assert plain.state == "done"
    assert count.epochs == 6 + 1


class Grouped(LineTask):
    optimizer = AdamW(
        lr="lr", weight_decay="wd", groups={"*.bias": {"weight_decay": 0, "lr": times("lr", 2)}}
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("pack", ["solo", "concatenated", "fused", "auto"])
def test_groups_in_a_study(tmp_path, pack):
    space = Space(lr=Choice([Constant(0.1), Cosine(0.1)]), wd=Choice([0.0, Linear(0.1)]), width=3)
    study = make_study(tmp_path, task=Grouped(), space=space, algorithm=GridSearch(max_epochs=6))
    study.run(progress=False, executor=Local(pack=pack))
    assert len(study.trials) == 4
    for trial in study.trials:
        _, alone = train_alone(
            Grouped(), Timeline(trial.config, epochs=6), seed=study.seed, epochs=6
        )
        assert trial.value == pytest.approx(alone[-1]["mse"], rel=1e-4)


# -- options that go off and on again --------------------------------------------------------------


class Momentum(LineTask):
    optimizer = th.RMSprop(lr="lr", momentum="momentum")


class Centered(LineTask):
    def optimizer(self, hp):
        return th.RMSprop(lr=hp.lr, centered=hp.on)


class Largest(LineTask):
    def optimizer(self, hp):
        return th.Adam(lr=hp.lr, amsgrad=hp.on)


OFF_AND_ON = {
    "momentum of RMSprop": (Momentum, {"momentum": MultiStep([0.9, 0.0, 0.9], milestones=[2, 3])}),
    "centred RMSprop": (Centered, {"on": MultiStep([True, False, True], milestones=[2, 3])}),
    "AMSGrad": (Largest, {"on": MultiStep([True, False, True], milestones=[2, 3])}),
}


@pytest.mark.parametrize("name", OFF_AND_ON)
def test_what_an_optimizer_has_made_stays_when_its_options_change(name, tmp_path):
    """torch keeps a buffer that its options do not need, and goes on from it later."""
    task, values = OFF_AND_ON[name]
    curves = []
    for pack in ("solo", "fused"):
        study = make_study(
            tmp_path / pack,
            task=task(),
            space=Space(lr=Choice([0.02, 0.01]), **values),
            algorithm=GridSearch(max_epochs=5),
        )
        study.run(progress=False, executor=Local(pack=pack))
        assert [trial.state for trial in study.trials] == ["done"] * 2
        curves.append([trial.curve for trial in study.trials])
    assert curves[1] == [pytest.approx(curve, rel=1e-4) for curve in curves[0]]


def test_momentum_that_begins_later_fails_as_it_does_alone(tmp_path):
    """torch's RMSprop makes its buffer at the first step only."""
    errors = []
    for pack in ("solo", "fused"):
        study = make_study(
            tmp_path / pack,
            task=Momentum(),
            space=Space(lr=Choice([0.02, 0.01]), momentum=MultiStep([0.0, 0.9], milestones=[2])),
            algorithm=GridSearch(max_epochs=4),
        )
        study.run(progress=False, executor=Local(pack=pack))
        errors.append([trial.error.splitlines()[-1] for trial in study.trials])
    assert errors[0] == errors[1]
    assert "momentum_buffer" in errors[0][0]
