"""Studies in steps and tokens: what they train, what they share, and what they show."""

from __future__ import annotations

import json

import pytest
import torch

import thrifty as th
from tests.cli.test_cli import thrifty
from tests.study.helpers import make_study, trained
from thrifty.core import AlgorithmError, SpaceError, UsageError
from thrifty.store import Store
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


class Stepped(LineTask):
    """A task whose epochs have 6 steps, which is one and a half passes over its data."""

    steps_per_epoch = 6
    tokens_per_sample = 10


LATE = th.Step(0.1, [th.steps(15)])


def in_steps(folder, name="steps", *, task=None, **options):
    space = options.pop("space", th.Space(lr=th.Choice([0.1, LATE])))
    algorithm = options.pop("algorithm", th.GridSearch(max_epochs=th.steps(24)))
    task = Stepped() if task is None else task
    return make_study(folder, name=name, task=task, space=space, algorithm=algorithm, **options)


def test_steps_tokens_and_epochs_are_one_study_that_trains_once(tmp_path):
    first = in_steps(tmp_path)
    assert (first.algorithm.max_epochs, repr(first.space["lr"])) == (
        4,
        "Choice(options=(0.1, Step(0.1, (2.5,))), conditions=())",
    )
    assert trained(first) == 6  # 4 epochs, and again from epoch 2 on
    in_epochs = make_study(
        tmp_path,
        name="epochs",
        task=Stepped(),
        space=th.Space(lr=th.Choice([0.1, th.Step(0.1, [2.5])])),
        algorithm=th.GridSearch(max_epochs=4),
    )
    in_tokens = in_steps(
        tmp_path,
        name="tokens",
        space=th.Space(lr=th.Choice([0.1, th.Step(0.1, [th.tokens(15 * 80)])])),
        algorithm=th.GridSearch(max_epochs=th.tokens(24 * 80)),
    )
    assert trained(in_epochs) == trained(in_tokens) == 0
    curves = [[t.curve for t in study.trials] for study in (first, in_epochs, in_tokens)]
    assert curves[0] == curves[1] == curves[2]


def test_a_study_of_epochs_is_resumed_in_steps(tmp_path):
    space = th.Space(lr=th.Choice([0.1, th.Step(0.1, [2.5])]))
    before = make_study(
        tmp_path, task=Stepped(), space=space, algorithm=th.GridSearch(max_epochs=4)
    )
    assert trained(before) == 6
    assert trained(in_steps(tmp_path, name="s")) == 0
    assert in_steps(tmp_path, name="s").best_trial.unit.text(4) == "24 steps (4 epochs)"


class Rates(Stepped):
    """A task that records the rate of every step."""

    used: list[float] = []  # noqa: RUF012 (for all copies of the task)
    not_state = ("used",)

    def identity(self):
        return {"task": "rates"}

    def step(self, model, batch):
        optimizer = self.optimizers["optimizer"]
        self.used.append(optimizer.param_groups[0]["lr"])
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)


def test_each_step_is_trained_with_the_rate_of_a_plain_loop(tmp_path):
    space = th.Space(lr=th.Warmup(th.steps(4), th.Step(0.1, [th.steps(9)])))
    study = in_steps(tmp_path, task=Rates(), space=space)
    Rates.used.clear()
    study.run(progress=False, executor=th.Local(pack="solo"))
    warmup = [0.1 * ((step // 6 + step % 6 / 6) / (4 / 6)) for step in range(4)]
    assert Rates.used[-24:] == warmup + [0.1] * 9 + [0.1 * 0.1] * 11


def test_batches_of_the_data_are_counted_if_the_task_does_not_say(tmp_path):
    study = in_steps(tmp_path, task=LineTask(), algorithm=th.GridSearch(max_epochs=th.steps(20)))
    assert (study.algorithm.max_epochs, study.unit.text(5)) == (5, "20 steps (5 epochs)")
    assert "an epoch is 4 steps" in str(study.plan())


class Varying(LineTask):
    batch_size = "batch_size"  # type: ignore[assignment]


class Reading(LineTask):
    def data(self, hp):
        return super().data(hp) if hp.lr else None


class Broken(LineTask):
    def data(self, hp):
        raise OSError("no such file")


@pytest.mark.parametrize(
    ("task", "unit", "message"),
    [
        (Varying(), th.steps, "batch size follows hyper-parameter 'batch_size'; set Varying.steps"),
        (Varying(), th.tokens, "so the tokens of a step vary; write steps"),
        (Reading(), th.steps, "depend on hyper-parameter 'lr'.*set Reading.steps_per_epoch"),
        (Broken(), th.steps, "cannot be loaded before training .*no such file.*steps_per_epoch"),
        (LineTask(), th.tokens, "set LineTask.tokens_per_sample; if samples vary in length"),
    ],
)
def test_an_epoch_of_unknown_size_is_an_error_before_training(tmp_path, task, unit, message):
    space = th.Space(lr=th.Choice([0.1, th.Step(0.1, [unit(8)])]), batch_size=th.Choice([8, 16]))
    study = in_steps(tmp_path, task=task, space=space, algorithm=th.GridSearch(max_epochs=unit(80)))
    with pytest.raises(UsageError, match=message):
        study.run(progress=False)


def test_a_fixed_batch_size_counts_tokens(tmp_path):
    class Tokens(Varying):
        tokens_per_sample = 2

    space = th.Space(lr=0.1, batch_size=16)
    algorithm = th.GridSearch(max_epochs=th.tokens(320))
    study = in_steps(tmp_path, task=Tokens(), space=space, algorithm=algorithm)
    assert (study.algorithm.max_epochs, study.unit.text(1)) == (5, "64 tokens (1 epoch)")


def test_horizons_and_rungs_are_whole_epochs(tmp_path):
    with pytest.raises(UsageError) as caught:
        in_steps(tmp_path, algorithm=th.GridSearch(max_epochs=th.steps(21)))
    assert str(caught.value) == (
        "GridSearch: max_epochs steps(21) is 3.5 epochs of 6 steps; use steps(18) or steps(24), or "
        "choose steps_per_epoch=3"
    )
    with pytest.raises(UsageError, match=r"min_epochs steps\(3\) is 0.5 epochs of 6 steps; use"):
        in_steps(
            tmp_path,
            algorithm=th.ASHA(max_epochs=th.steps(24), min_epochs=th.steps(3), num_trials=2),
        )
    with pytest.raises(AlgorithmError, match="num_trials is not a time"):
        th.RandomSearch(max_epochs=4, num_trials=th.steps(5))
    with pytest.raises(AlgorithmError, match="num_trials must be a whole number"):
        in_steps(tmp_path, algorithm=th.RandomSearch(max_epochs=th.steps(24), num_trials=0))
    with pytest.raises(SpaceError, match="'batch_size' is steps"):
        th.Space(batch_size=th.steps(5))


@pytest.mark.parametrize(
    "algorithm",
    [
        th.ASHA(max_epochs=th.steps(24), min_epochs=th.steps(6), num_trials=3, eta=2),
        th.Hyperband(max_epochs=th.steps(24), eta=2),
        th.MedianStopping(max_epochs=th.steps(24), interval=th.steps(6), num_trials=3),
        th.FixedWidthSubSampling(max_epochs=th.steps(24), num_trials=3),
        th.SubSampling(max_epochs=th.steps(24), num_trials=3),
        th.FreezeThaw(max_epochs=th.steps(24), num_trials=3),
        th.PopulationBasedTraining(
            max_epochs=th.steps(24), interval=th.steps(12), population=4, explore=("lr",)
        ),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_every_algorithm_takes_steps(tmp_path, algorithm):
    study = in_steps(tmp_path, space=th.Space(lr=th.Float(0.01, 0.1)), algorithm=algorithm)
    assert study.algorithm.max_epochs == 4
    assert not study.algorithm.amounts()
    assert "trial-steps" in str(study.plan())


def test_stop_conditions_and_enqueued_trials_take_steps(tmp_path):
    study = in_steps(tmp_path)
    study.enqueue_trial({"lr": LATE})
    assert trained(study, stop=th.StopWhen(epochs=th.steps(6))) == 1
    assert study.trials[0].config == {"lr": th.Step(0.1, [2.5])}
    with pytest.raises(UsageError, match=r"StopWhen: epochs steps\(7\) is 1.16667 epochs"):
        study.run(stop=th.StopWhen(epochs=th.steps(7)))
    with pytest.raises(UsageError, match="seconds must be a number"):
        th.StopWhen(seconds=th.steps(7))


def test_everything_is_shown_in_the_unit_of_the_study(tmp_path):
    study = in_steps(tmp_path)
    assert str(study.plan()).splitlines() == [
        "2 trials, 48 trial-steps",
        "36 unique steps to train",
        "merge rate 1.33: sharing saves 25% of the trial-steps",
        "an epoch is 6 steps",
    ]
    trained(study)
    assert str(study.savings).startswith("36 steps trained for 48 trial-steps: 12 saved; ")
    assert list(study.trials_dataframe()["steps"]) == [24, 24]
    assert study.plot_learning_curves().axes[0].get_xlabel() == "step"
    assert study.plot_history().axes[0].get_xlabel() == "steps trained, shared ones once"
    assert study.plot_forest().axes[0].get_xlabel() == "step"
    assert "36 steps trained once, 12 not trained again" in study.plot_forest().axes[0].get_title(
        "left"
    )


def test_a_stored_study_is_shown_in_its_unit(tmp_path, monkeypatch, capsys):
    study = in_steps(tmp_path)
    trained(study)
    url = study.storage.url

    def said(*arguments):
        thrifty(*arguments, "--storage", url, monkeypatch=monkeypatch)
        return capsys.readouterr().out

    status = said("status")
    assert "after 24 steps (4 epochs)" in status
    assert "steps       48 requested, 36 trained (an epoch is 6" in status
    assert "after 24 steps (4 epochs)" in said("best", "steps")
    assert json.loads(said("best", "steps", "--json"))["trials"][0]["reached"]["steps"] == 24
    assert (
        said("export", "steps", "--format", "csv")
        .splitlines()[0]
        .startswith("number,state,epochs,steps,value")
    )
    assert json.loads(said("export", "steps", "--format", "json"))[0]["steps"] == 24
    with Store.open(url, create=False) as store:
        assert store.studies.get("steps").spec["unit"] == {"name": "steps", "per_epoch": 6}
