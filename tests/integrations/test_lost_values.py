"""Values that a Trainer's checkpoint does not hold are found, where results depend on them."""

from __future__ import annotations

import copy
import logging
import time

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
import transformers

import thrifty as th
from tests.integrations._drive import resumed, train
from tests.integrations.test_huggingface import (
    LINEAR,
    TRAIN,
    VALID,
    accuracy,
    bert,
    fixed as fixed_bert,
    task as bert_task,
)
from tests.integrations.test_lightning import Net, fixed, loaders, task
from tests.integrations.test_lightning_hooks import EPOCHS, of_net, one_fit as fitted
from thrifty.integrations import HuggingFaceTrainable, LightningTrainable, _lost_values


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]


def one_fit(kind, callbacks=()):
    """Return the curve of a plain ``Trainer.fit`` over all epochs."""
    return fitted(kind, callbacks)[0]


# -- Lightning: what is lost -------------------------------------------------------------------


class Running(Net):
    """Weighs the loss by a running mean in an attribute."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.running = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.running = 0.9 * self.running + 0.1 * loss.item()
        return loss * (1 + self.running)


class Counted(Net):
    """Counts epochs in a hook before the first batch, so each new module has the same count."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.num_started = 0

    def on_train_epoch_start(self):
        self.num_started += 1

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.num_started


class Passing(Net):
    """Keeps a mean in a buffer that is not persistent."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class Helper:
    def __init__(self):
        self.seen = 0


class Helped(Net):
    """Counts batches in an object of a class of its own."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.helper = Helper()

    def training_step(self, batch, batch_idx):
        self.helper.seen += 1
        return super().training_step(batch, batch_idx) / self.helper.seen


class Best(Net):
    """Logs the best loss, which changes no weight but is a metric of the trial."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.most = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.most = max(self.most, loss.item())
        self.log("most", self.most)
        return loss


class FrozenOnce(Net):
    """Freezes a layer in one epoch, and only then."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.body[0].requires_grad_(requires_grad=False)


class DroppedOnce(Net):
    """Changes an attribute of a layer of torch in one epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.body[2].p = 1.0


class Unreset(Net):
    """Has a metric that nothing resets, so it counts over all epochs."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss * self.mean.compute()


class Weighing(pl.Callback):
    """Changes the weight of the module's loss, by a count that no ``state_dict`` holds."""

    def __init__(self):
        self.num = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.num += 1
        pl_module.weight = 1 / self.num


class Averaging(pl.Callback):
    """Validates a moving average of the weights, which no ``state_dict`` holds."""

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.body)

    def on_train_batch_end(self, trainer, pl_module, *batch):
        for mean, weight in zip(
            self.average.parameters(), pl_module.body.parameters(), strict=True
        ):
            mean.data.lerp_(weight.data, 0.1)

    def on_validation_epoch_start(self, trainer, pl_module):
        pl_module.body, self.average = self.average, pl_module.body

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.body, self.average = self.average, pl_module.body


class Weighed(Net):
    weight = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


LOST = {
    "attribute": (Running, (), "'module.running'"),
    "in a hook": (Counted, (), "'module.num_started'"),
    "buffer": (Passing, (), "'module.mean'"),
    "object": (Helped, (), "'module.helper.seen'"),
    "metric": (Best, (), "'module.most'"),
    "frozen": (FrozenOnce, (), r"'module.body.0.weight \(requires_grad\)'"),
    "layer": (DroppedOnce, (), "'module.body.2.p'"),
    "callback": (Weighed, (Weighing(),), "'Weighing.num'"),
    "average": (Net, (Averaging(),), "'Averaging.average'"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_lost_value_is_refused_by_name(case):
    kind, callbacks, name = LOST[case]
    with pytest.raises(th.StateError, match=f"training changes .*{name}.* does not hold"):
        train(of_net(kind, callbacks), fixed, epochs=EPOCHS)


@pytest.mark.parametrize("case", ["attribute", "frozen", "callback"])
def test_a_refused_trial_would_differ_from_one_fit(case, monkeypatch):
    kind, callbacks, _ = LOST[case]
    monkeypatch.setattr(_lost_values.LostValues, "examine", lambda *_: None)
    metrics, _ = train(of_net(kind, callbacks), fixed, epochs=EPOCHS)
    assert [m["val_loss"] for m in metrics] != one_fit(kind, callbacks)


def test_a_message_says_how_to_mend_it():
    with pytest.raises(th.StateError, match=r"Keep tensors in buffers \(self.register_buffer\)"):
        train(of_net(Running), fixed, epochs=2)
    with pytest.raises(th.StateError, match=r"\. Set requires_grad at the start of each epoch"):
        train(of_net(FrozenOnce), fixed, epochs=3)


# -- Lightning: what is not ---------------------------------------------------------------------


class Buffered(Net):
    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.register_buffer("running", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss * (1 + self.running)


class Saved(Running):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["running"] = self.running

    def on_load_checkpoint(self, checkpoint):
        self.running = checkpoint["running"]


class FrozenFrom(Net):
    def on_train_epoch_start(self):
        if self.current_epoch >= 1:
            self.body[0].requires_grad_(requires_grad=False)


class Collecting(Net):
    """Collects outputs, which it clears at the end of validation or before the next one."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.outputs, self.others = [], []

    def on_validation_epoch_start(self):
        self.others = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.body(x) - y).square().mean()
        self.outputs.append(loss)
        self.others.append(loss)

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.outputs).mean())
        self.log("other", torch.stack(self.others).mean())
        self.outputs.clear()


class Plotting(Net):
    """Keeps a history, prints its last entry, and measures time."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.history = []
        self.began = self.took = 0.0

    def on_train_epoch_start(self):
        self.began = time.perf_counter()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.history.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.took = time.perf_counter() - self.began
        self.log("seconds", self.took)
        logging.getLogger("plots").debug("%s", self.history[-1])


class Measured(Net):
    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.mean, self.valid = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.valid.update(batch[0].mean())

    def on_validation_epoch_end(self):
        self.log("valid", self.valid.compute())
        self.valid.reset()


class Manual(Net):
    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Keeping(Weighing):
    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


class Stopping(pl.callbacks.EarlyStopping):
    """Stops after the second epoch."""

    def __init__(self):
        super().__init__("val_loss", patience=0, min_delta=100.0)


KEPT = {
    "a metric that is never reset": (Unreset, ()),
    "buffer": (Buffered, ()),
    "checkpoint": (Saved, ()),
    "frozen": (FrozenFrom, ()),
    "collected": (Collecting, ()),
    "history": (Plotting, ()),
    "torchmetrics": (Measured, ()),
    "manual": (Manual, ()),
    "callback": (Weighed, (Keeping(),)),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_passes_in_silence_and_is_as_one_fit(case, caplog):
    kind, callbacks = KEPT[case]
    metrics, _ = train(of_net(kind, callbacks), fixed, epochs=EPOCHS)
    assert [m["val_loss"] for m in metrics] == one_fit(kind, callbacks)
    assert "checkpoint" not in caplog.text


def test_a_callback_that_stops_training_is_no_lost_value(caplog):
    metrics, _ = train(of_net(Collecting, [Stopping()]), fixed, epochs=EPOCHS)
    first, second = one_fit(Collecting, [Stopping()])
    assert [m["val_loss"] for m in metrics] == [first, second, second, second]
    assert "checkpoint" not in caplog.text


def test_an_examination_changes_no_result():
    """Data come in another order in each epoch, and training draws dropout."""

    def ran(kind):
        one = task(kind=kind)
        return train(one, lambda _: {"lr": 0.05, "dropout": 0.3}, epochs=EPOCHS)[0]

    first, second = ([m["val_loss"] for m in ran(kind)] for kind in (Plotting, Net))
    assert first == second


def test_examinations_are_few(monkeypatch):
    runs = []
    run = _lost_values._Experiment.run
    monkeypatch.setattr(
        _lost_values._Experiment, "run", lambda self: (runs.append(self), run(self))[1]
    )
    one = of_net(Net)
    train(one, fixed, epochs=EPOCHS)
    assert not runs
    for _ in range(2):
        one = of_net(Collecting)
        train(one, fixed, epochs=EPOCHS)
        train(one, fixed, epochs=EPOCHS)
    assert len(runs) == 4  # for each task, of the first epoch and of the second and third


class Late(Net):
    """Counts batches, and does something only after many."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.num = 0

    def training_step(self, batch, batch_idx):
        self.num += 1
        return super().training_step(batch, batch_idx) * (0.5 if self.num > 1000 else 1.0)


def test_an_effect_that_may_come_later_is_warned_of_once(caplog):
    one = of_net(Late)
    train(one, fixed, epochs=EPOCHS)
    train(one, fixed, epochs=EPOCHS)
    (record,) = caplog.records
    assert "'module.num'" in record.getMessage()
    assert "later ones may" in record.getMessage()


def test_a_name_in_not_state_is_excused(caplog):
    one = of_net(Late)
    one.not_state = (*one.not_state, "num")
    train(one, fixed, epochs=EPOCHS)
    assert "checkpoint" not in caplog.text


def test_what_cannot_be_examined_is_warned_of(caplog):
    class Broken(Running):
        def training_step(self, batch, batch_idx):
            if self.trainer.num_training_batches < 4:
                raise ValueError("too short")
            return super().training_step(batch, batch_idx)

    train(of_net(Broken), fixed, epochs=2)
    (record,) = caplog.records
    assert "could not be examined (ValueError: too short)" in record.getMessage()


class Decaying(FrozenOnce):
    """Has a rate that is 0 after all steps of the Trainer, which has few in a rehearsal."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        total = int(self.trainer.estimated_stepping_batches)
        made = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(1 - i / total, 0.0))
        return [optimizer], [{"scheduler": made, "interval": "step"}]


def many(hp):
    train_loader, valid = loaders(shuffle=False)
    rows = torch.utils.data.ConcatDataset([train_loader.dataset] * 5)
    return torch.utils.data.DataLoader(rows, batch_size=8), valid


def test_short_epochs_that_train_nothing_say_nothing(caplog):
    one = task(kind=Decaying, data=many, max_epochs=3)
    train(one, fixed, epochs=3)
    assert "the learning rate of a short epoch is 0" in caplog.text


class WithCount(pl.LightningDataModule):
    """Counts how often it is asked for loaders; a study names such a count in ``not_state``."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def train_dataloader(self):
        self.count += 1
        return loaders(shuffle=False)[0]

    def val_dataloader(self):
        return loaders(shuffle=False)[1]


def test_an_examination_does_not_ask_the_data_module_itself():
    made = []
    one = task(kind=Collecting, data=lambda hp: (made.append(WithCount()), made[-1])[1])
    train(one, fixed, epochs=3)
    assert [each.count for each in made] == [3]


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize(("kind", "is_lost"), [(Running, True), (Collecting, False)])
def test_a_study_refuses_what_is_lost(kind, is_lost, steps, tmp_path, caplog):
    study = th.Study(
        LightningTrainable(lambda hp: kind(hp.lr), lambda hp: loaders(), steps_per_epoch=steps),
        th.Space(lr=th.Choice([0.05, th.Step(0.05, [2])])),
        algorithm=th.GridSearch(max_epochs=3),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="net",
    )
    if is_lost:
        with pytest.raises(th.StateError, match=r"module\.running"):
            study.run(progress=False, executor=th.Local(threads=1))
    else:
        study.run(progress=False, executor=th.Local(threads=1))
        assert len(study.trials) == 2
        assert "checkpoint" not in caplog.text


@pytest.mark.parametrize(("kind", "is_lost"), [(Running, True), (Collecting, False)])
def test_stages_of_one_epoch_are_examined(kind, is_lost, tmp_path, caplog):
    """Each epoch of population-based training may begin with a trial that is restored."""
    study = th.Study(
        LightningTrainable(lambda hp: kind(hp.lr), lambda hp: loaders()),
        th.Space(lr=th.Float(0.01, 0.1)),
        algorithm=th.PopulationBasedTraining(
            population=3, interval=1, max_epochs=3, explore=("lr",)
        ),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="net",
    )
    if is_lost:
        with pytest.raises(th.StateError, match=r"module\.running"):
            study.run(progress=False, executor=th.Local(threads=1))
    else:
        study.run(progress=False, executor=th.Local(threads=1))
        assert "checkpoint" not in caplog.text


@pytest.mark.parametrize("case", LOST)
def test_a_lost_value_is_refused_if_each_epoch_is_restored(case):
    kind, callbacks, name = LOST[case]
    with pytest.raises(th.StateError, match=f"training changes .*{name}.* does not hold"):
        resumed(lambda: of_net(kind, callbacks), fixed, epochs=EPOCHS)


def test_a_trial_of_one_epoch_is_not_examined():
    """Nothing goes on from it, so nothing is lost."""
    one = of_net(Running)
    for _ in range(2):
        train(one, fixed, epochs=1)


# -- Hugging Face -----------------------------------------------------------------------------


class RunningTrainer(transformers.Trainer):
    running = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        if model.training:
            loss = loss * (1 + self.running)
            self.running = 0.9 * self.running + 0.1 * loss.item()
        return (loss, outputs) if return_outputs else loss


class HistoryTrainer(transformers.Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = []

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        self.history.append(loss.item())
        return (loss, outputs) if return_outputs else loss


class FreezingOnce(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if round(state.epoch) == 1:
            model.classifier.requires_grad_(requires_grad=False)


class FreezingFrom(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if round(state.epoch) >= 1:
            model.classifier.requires_grad_(requires_grad=False)


class Counting(transformers.TrainerCallback):
    """Reports how many epochs it has seen."""

    def __init__(self, num=0):
        self.num = num

    def on_epoch_end(self, args, state, control, **kwargs):
        self.num += 1

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_count"] = self.num


class KeepingCount(Counting, transformers.trainer_callback.ExportableState):
    def state(self):
        return {"args": {"num": self.num}, "attributes": {}}


class Halting(transformers.TrainerCallback):
    """Stops at each evaluation; a study decides how long a trial is."""

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Stepwise(torch.nn.Module):
    """Divides the loss by the number of training steps."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.inner = bert()
        if is_buffer:
            self.register_buffer("num", torch.zeros(()))
        else:
            self.num = torch.zeros(())

    def forward(self, input_ids=None, labels=None, attention_mask=None):
        out = self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
        if self.training:
            self.num = self.num + 1
            return {"loss": out.loss / self.num, "logits": out.logits}
        return {"loss": out.loss, "logits": out.logits}


def stepwise(*, is_buffer):
    return HuggingFaceTrainable(
        lambda hp: Stepwise(is_buffer=is_buffer),
        train_dataset=TRAIN,
        eval_dataset=VALID,
        args={"learning_rate": 0.01, "per_device_train_batch_size": 8},
        compute_metrics=accuracy,
    )


def with_callback(*callbacks, **options):
    return bert_task(trainer={"callbacks": [*callbacks]}, **options)


BERT_LOST = {
    "trainer": (lambda: bert_task(trainer_class=RunningTrainer), "'trainer.running'"),
    "steps": (
        lambda: bert_task(trainer_class=RunningTrainer, steps_per_epoch=2),
        "'trainer.running'",
    ),
    "frozen": (
        lambda: with_callback(FreezingOnce()),
        r"'model.classifier.weight \(requires_grad\)'",
    ),
    "frozen, linear": (
        lambda: with_callback(FreezingOnce(), args={**LINEAR, "num_train_epochs": 4}),
        r"'model.classifier.weight \(requires_grad\)'",
    ),
    "frozen, steps, linear": (
        lambda: with_callback(
            FreezingOnce(), args={"lr_scheduler_type": "linear", "max_steps": 12}, steps_per_epoch=3
        ),
        r"'model.classifier.weight \(requires_grad\)'",
    ),
    "callback": (lambda: with_callback(Counting()), "'Counting.num'"),
    "model": (lambda: stepwise(is_buffer=False), "'model.num'"),
}


@pytest.mark.parametrize("case", BERT_LOST)
def test_a_lost_value_of_a_trainer_is_refused_by_name(case):
    make, name = BERT_LOST[case]
    with pytest.raises(th.StateError, match=f"training changes .*{name}.* does not hold"):
        train(make(), fixed_bert, epochs=3)
    with pytest.raises(th.StateError, match=f"training changes .*{name}.* does not hold"):
        resumed(make, fixed_bert, epochs=3)


BERT_KEPT = {
    "history": lambda: bert_task(trainer_class=HistoryTrainer),
    "frozen": lambda: with_callback(FreezingFrom()),
    "frozen, steps": lambda: with_callback(FreezingFrom(), steps_per_epoch=3),
    "callback": lambda: with_callback(KeepingCount()),
    "halting": lambda: with_callback(FreezingFrom(), Halting()),
    "model": lambda: stepwise(is_buffer=True),
}


@pytest.mark.parametrize("case", BERT_KEPT)
def test_what_a_trainer_keeps_passes_in_silence(case, caplog):
    metrics, _ = train(BERT_KEPT[case](), fixed_bert, epochs=3)
    assert len(metrics) == 3
    assert "checkpoint" not in caplog.text
