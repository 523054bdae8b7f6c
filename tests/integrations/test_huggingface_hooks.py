"""What a run of a Trainer does once is done once in a trial: begin, end, be stopped."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import thrifty as th
from tests.integrations._drive import resumed, train
from tests.integrations.test_huggingface import TRAIN, VALID, bert, fixed, task
from thrifty.core import TaskError, derive_seed
from thrifty.pack._state import seed_everything


pytestmark = pytest.mark.slow

EPOCHS = 4
BEST = {"metric_for_best_model": "eval_loss", "greater_is_better": False}


def one_run(path, *, args, callbacks=(), trainer_class=Trainer):
    """Return the curve of a plain ``Trainer.train`` over all epochs, and the loss of its model."""
    seed_everything(derive_seed(3, "model"))
    trainer = trainer_class(
        bert(),
        transformers.TrainingArguments(
            str(path),
            use_cpu=True,
            learning_rate=0.01,
            per_device_train_batch_size=8,
            num_train_epochs=EPOCHS,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{"lr_scheduler_type": "constant", **args},
        ),
        train_dataset=TRAIN,
        eval_dataset=VALID,
        callbacks=deepcopy(list(callbacks)),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    curve = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    return curve, loss_of(trainer.model)


def loss_of(model):
    tokens = torch.stack([row["input_ids"] for row in VALID])
    labels = torch.tensor([row["labels"] for row in VALID])
    with torch.no_grad():
        return model.eval()(input_ids=tokens, labels=labels).loss.item()


def of_bert(*, args, callbacks=(), trainer_class=Trainer):
    given = {"num_train_epochs": EPOCHS, **args}
    return task(given, trainer={"callbacks": list(callbacks)}, trainer_class=trainer_class)


def trained(one):
    """Return the curve of a trial, and the loss of its model."""
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    curve = []
    for epoch in range(EPOCHS):
        one.train(epoch, th.HyperParameters(fixed(epoch)))
        curve.append(one.evaluate()["eval_loss"])
    return curve, loss_of(one.model)


def curve_when_resumed(given):
    metrics = resumed(lambda: of_bert(**given), fixed, epochs=EPOCHS)
    return [m["eval_loss"] for m in metrics]


SEQUENTIAL = {"train_sampling_strategy": "sequential"}


class Rounding(TrainerCallback):
    """Rounds the weights when training ends."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        assert state.log_history
        with torch.no_grad():
            for each in model.parameters():
                each.copy_((each * 8).round() / 8)


class Forgetting(TrainerCallback):
    """Clears the optimizer's moments when training ends."""

    def on_train_end(self, args, state, control, optimizer=None, **kwargs):
        for held in optimizer.state.values():
            held["exp_avg"].zero_()


class Around(Trainer):
    """Scales weights before and after training."""

    def train(self, *args, **kwargs):
        with torch.no_grad():
            self.model.classifier.weight.mul_(2)
        result = super().train(*args, **kwargs)
        with torch.no_grad():
            self.model.classifier.weight.mul_(2)
        return result


class Biased(TrainerCallback):
    """Begins with a bias."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.classifier.bias.copy_(torch.tensor([0.3, -0.3]))


class Slowed(TrainerCallback):
    """Halves the learning rate when training begins."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] /= 2


class Referring(Trainer):
    """Stays near the weights that the model had when the Trainer was made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reference = [each.detach().clone() for each in self.model.parameters()]

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        pairs = zip(model.parameters(), self.reference, strict=True)
        loss = loss + sum((one - other).square().sum() for one, other in pairs)
        return (loss, outputs) if return_outputs else loss


class StopsTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        if self.state.global_step >= 4:
            self.control.should_training_stop = True
        return super().training_step(*args, **kwargs)


class StopsInStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == 5


class StopsInLastStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == 6


class StopsAfterEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop |= state.epoch >= 2


class EndsEpochs(TrainerCallback):
    """Ends some epochs after the second of their three steps."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop |= state.global_step in self.steps


ONCE = {
    "end": {"callbacks": [Rounding()]},
    "optimizer at the end": {"callbacks": [Forgetting()]},
    "around": {"trainer_class": Around},
    "begin": {"callbacks": [Biased()]},
    "optimizer at the beginning": {"callbacks": [Slowed()]},
    "reference": {"trainer_class": Referring},
}

STOPS = {
    "early": {"callbacks": [EarlyStoppingCallback(2, 0.2)], "args": BEST},
    "linear": {
        "callbacks": [EarlyStoppingCallback(2, 0.2)],
        "args": {**BEST, "lr_scheduler_type": "linear"},
    },
    "two": {
        "callbacks": [EarlyStoppingCallback(2, 0.2), EarlyStoppingCallback(3, 0.2)],
        "args": BEST,
    },
    "on_evaluate": {"callbacks": [StopsAfterEvaluation()]},
    "trainer": {"trainer_class": StopsTrainer},
    "step": {"callbacks": [StopsInStep()]},
    "last step": {"callbacks": [StopsInLastStep()]},
}


def case_of(case):
    return {**case, "args": {**SEQUENTIAL, **case.get("args", {})}}


@pytest.mark.parametrize("case", ONCE)
def test_what_is_done_once_in_a_run_is_done_once_in_a_trial(case, tmp_path):
    given = case_of(ONCE[case])
    assert trained(of_bert(**given)) == one_run(tmp_path, **given)


@pytest.mark.parametrize("case", ["end", "around", "begin"])
def test_a_trial_with_hooks_of_a_run_resumes(case, tmp_path):
    given = case_of(ONCE[case])
    assert curve_when_resumed(given) == one_run(tmp_path, **given)[0]


@pytest.mark.parametrize("steps", [(2, 4, 6, 8), (5,)])
def test_an_epoch_that_a_callback_ends_early_is_as_short_in_a_trial(steps, tmp_path):
    given = case_of({"callbacks": [EndsEpochs(*steps)]})
    wanted = one_run(tmp_path / "short", **given)
    assert trained(of_bert(**given)) == wanted != one_run(tmp_path / "whole", **case_of({}))
    assert curve_when_resumed(given) == wanted[0]


def test_a_pass_that_a_callback_ends_early_is_refused_if_epochs_count_steps():
    one = task({}, steps_per_epoch=2, trainer={"callbacks": [EndsEpochs(2)]})
    with pytest.raises(TaskError, match=r"ends a pass over the data early.*leave steps_per_epoch"):
        train(one, fixed, epochs=2)


@pytest.mark.parametrize("case", STOPS)
def test_a_trial_ends_where_the_users_code_stops_training(case, tmp_path):
    given = case_of(STOPS[case])
    wanted, loss = one_run(tmp_path, **given)
    assert len(wanted) < EPOCHS
    held = [*wanted, *[wanted[-1]] * (EPOCHS - len(wanted))]
    assert trained(of_bert(**given)) == (held, loss)


@pytest.mark.parametrize("case", STOPS)
def test_a_trial_that_has_ended_stays_so_when_it_is_resumed(case, tmp_path):
    given = case_of(STOPS[case])
    wanted, _ = one_run(tmp_path, **given)
    assert curve_when_resumed(given) == [*wanted, *[wanted[-1]] * (EPOCHS - len(wanted))]


def test_epochs_of_a_trial_that_has_ended_train_nothing():
    steps = []

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    given = {"args": SEQUENTIAL, "callbacks": [StopsAfterEvaluation(), Noting()]}
    train(of_bert(**given), fixed, epochs=EPOCHS)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_stop_within_an_epoch_of_steps_keeps_the_last_evaluation():
    one = task({}, steps_per_epoch=3, trainer={"callbacks": [StopsInStep()]})
    metrics, _ = train(one, fixed, epochs=4)
    assert len({m["eval_loss"] for m in metrics}) == 1
    assert metrics[0]["train_loss"] != metrics[1]["train_loss"] == metrics[3]["train_loss"]


def test_callbacks_do_not_see_the_end_of_an_epoch_as_the_end_of_training():
    seen = []

    class Watching(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            seen.append(control.should_training_stop)

        def on_evaluate(self, args, state, control, **kwargs):
            seen.append(control.should_training_stop)

    train(task(SEQUENTIAL, trainer={"callbacks": [Watching()]}), fixed, epochs=2)
    assert seen == [False] * 4


def test_the_log_of_a_whole_run_stops_nothing():
    class StopsAfterTraining(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            control.should_training_stop |= "train_loss" in logs

    metrics, _ = train(task(trainer={"callbacks": [StopsAfterTraining()]}), fixed, epochs=3)
    assert len({m["eval_loss"] for m in metrics}) == 3


def test_callbacks_stay_in_their_order_when_a_trainer_makes_some_anew():
    order = []

    class First(TrainerCallback, transformers.trainer_callback.ExportableState):
        def on_epoch_end(self, args, state, control, **kwargs):
            order.append("first")

        def state(self):
            return {"args": {}, "attributes": {}}

    class Second(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            order.append("second")

    train(task(trainer={"callbacks": [First(), Second()]}), fixed, epochs=2)
    assert order == ["first", "second"] * 2


def test_an_evaluation_at_the_start_of_training_comes_once():
    num = []

    class Counting(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            num.append(state.global_step)

    one = task({"eval_on_start": True}, trainer={"callbacks": [Counting()]})
    train(one, fixed, epochs=2)
    assert num == [0, 3, 6]


def test_a_study_goes_on_with_a_trial_that_has_ended_in_silence(tmp_path, caplog):
    given = case_of(STOPS["early"])
    study = th.Study(
        of_bert(**given),
        th.Space(lr=th.Choice([0.01, th.Step(0.01, [3], gamma=0.5)])),
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="eval_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="bert",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    wanted, loss = one_run(tmp_path, **given)
    held = [*wanted, *[wanted[-1]] * (EPOCHS - len(wanted))]
    assert [list(trial.curve) for trial in study.trials] == [held, held]
    assert loss_of(study.trials[0].load_model()) == loss
    assert "checkpoint" not in caplog.text
