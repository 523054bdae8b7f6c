"""What a fit of Lightning does once is done once in a trial: begin, end, be stopped."""

from __future__ import annotations

import gc
import logging
from copy import deepcopy

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, resumed, train
from tests.integrations.test_lightning import Net, fixed, loaders, points, task
from thrifty.core import derive_seed
from thrifty.integrations import LightningTrainable
from thrifty.pack._state import seed_everything


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]

EPOCHS = 4


class Plain(Net):
    """A module without batch normalization."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.body[1] = torch.nn.Identity()


def still(hp):
    return loaders(shuffle=False)


def one_fit(kind, callbacks=(), **options):
    """Return the curve of a plain ``Trainer.fit`` over all epochs, and the loss of its module."""
    curve = []

    class Noting(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            curve.append(float(trainer.callback_metrics["val_loss"]))

    seed_everything(derive_seed(3, "model"))
    net = kind(0.05)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*deepcopy(list(callbacks)), Noting()],
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(net, *still(None))
    return curve, loss_of(net)


def loss_of(net):
    x, y = points()
    with torch.no_grad():
        return (net.eval().body(x[32:]) - y[32:]).square().mean().item()


def of_net(kind, callbacks=(), **options):
    given = {"callbacks": list(callbacks), **options}
    return task(kind=kind, data=still, trainer=given)


def curve_when_resumed(make):
    return [m["val_loss"] for m in resumed(make, fixed, epochs=EPOCHS)]


def trained(make):
    """Return the curve of a trial, and the loss of its model."""
    one = make()
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    curve = []
    for epoch in range(EPOCHS):
        one.train(epoch, th.HyperParameters(fixed(epoch)))
        curve.append(one.evaluate()["val_loss"])
    return curve, loss_of(one.model)


def rounded(module, by):
    with torch.no_grad():
        for each in module.parameters():
            each.copy_((each * by).round() / by)


# -- the end of a fit --------------------------------------------------------------------------


class Averaged(Plain):
    """Averages its weights in a submodule, and takes the average when training ends."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.average = deepcopy(self.body).requires_grad_(requires_grad=False)

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for mean, each in zip(self.average.parameters(), self.body.parameters(), strict=True):
                mean.mul_(0.9).add_(each, alpha=0.1)

    def on_train_end(self):
        self.body.load_state_dict(self.average.state_dict())


class Quantised(Plain):
    def on_fit_end(self):
        rounded(self, 16)


class TornDown(Plain):
    def teardown(self, stage):
        rounded(self, 4)


class Forgetting(Plain):
    """Clears the optimizer's moments and its rate when training ends."""

    def on_train_end(self):
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            for state in optimizer.state.values():
                state["exp_avg"].zero_()


class Rounding(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        rounded(pl_module, 8)
        trainer.save_checkpoint("of the user")


AT_END = {
    "ema": (Plain, lambda: [pl.callbacks.EMAWeightAveraging(decay=0.9)]),
    "swa": (Plain, lambda: [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
    "average": (Averaged, list),
    "on_fit_end": (Quantised, list),
    "teardown": (TornDown, list),
    "optimizer": (Forgetting, list),
    "callback": (Plain, lambda: [Rounding()]),
}


@pytest.mark.parametrize("case", AT_END)
def test_what_hooks_at_the_end_change_is_in_the_model_and_not_in_the_next_epoch(
    case, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # one of them saves a checkpoint there
    kind, callbacks = AT_END[case]
    curve, loss = trained(lambda: of_net(kind, callbacks()))
    wanted, wanted_loss = one_fit(kind, callbacks())
    assert curve == wanted
    assert loss == wanted_loss


@pytest.mark.parametrize("case", ["ema", "on_fit_end"])
def test_a_trial_with_hooks_at_the_end_resumes(case):
    kind, callbacks = AT_END[case]
    assert curve_when_resumed(lambda: of_net(kind, callbacks())) == one_fit(kind, callbacks())[0]


def test_the_best_model_of_a_study_is_as_after_the_hooks_at_the_end(tmp_path):
    study = th.Study(
        of_net(Quantised),
        th.Space(lr=th.Choice([0.05, th.Step(0.05, [2])])),
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="net",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert [trial.state for trial in study.trials] == ["done", "done"]
    wanted, loss = one_fit(Quantised)
    assert list(study.trials[0].curve) == wanted
    assert loss_of(study.trials[0].load_model()) == loss


class Merged(Plain):
    """Has other weights after training."""

    def on_train_end(self):
        self.body[3] = torch.nn.Linear(8, 2)


def test_a_model_that_has_other_layers_after_training_is_as_before_that(caplog):
    with caplog.at_level(logging.WARNING):
        found = trained(lambda: of_net(Merged))
    assert found == trained(lambda: of_net(Plain))
    text = "Merged.on_train_end changes which weights the model has, such as 'body.3.bias'"
    assert caplog.text.count(text) == 1


# -- the beginning of a fit --------------------------------------------------------------------


class Biased(Plain):
    """Begins with the mean of the targets as its bias."""

    def on_train_start(self):
        with torch.no_grad():
            self.body[3].bias.fill_(0.5)


class Scaled(Plain):
    def on_fit_start(self):
        with torch.no_grad():
            self.body[0].weight.mul_(2)


class Slowed(Plain):
    """Halves the learning rate when training begins."""

    def on_train_start(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] /= 2


class Scaling(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.body[0].weight.mul_(2)


class Begun(Plain):
    """Makes in a hook what training needs, although nothing keeps it."""

    def on_fit_start(self):
        self.factor = 0.5

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


AT_BEGIN = {
    "on_train_start": (Biased, list),
    "on_fit_start": (Scaled, list),
    "optimizer": (Slowed, list),
    "callback": (Plain, lambda: [Scaling()]),
    "attribute": (Begun, list),
}


@pytest.mark.parametrize("case", AT_BEGIN)
def test_hooks_at_the_beginning_change_weights_and_optimizers_only_once(case):
    kind, callbacks = AT_BEGIN[case]
    assert trained(lambda: of_net(kind, callbacks())) == one_fit(kind, callbacks())
    assert_a_resumed_trial_is_the_same(lambda: of_net(kind, callbacks()), fixed)


def test_a_schedule_of_the_space_reaches_an_optimizer_that_a_hook_looks_at():
    one = task(kind=Scaled, data=still)
    metrics, _ = train(one, lambda epoch: {"lr": 0.1 / (1 + epoch)}, epochs=3)
    assert [m["rate"] for m in metrics] == pytest.approx([0.1, 0.05, 0.1 / 3])


class Replacing(Plain):
    def on_train_start(self):
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


def test_a_hook_that_replaces_what_was_restored_is_refused():
    with pytest.raises(th.StateError, match=r"Replacing\.on_train_start replaces an optimizer"):
        train(of_net(Replacing), fixed, epochs=2)


class Beginning(Plain):
    """Draws its weights when it makes its optimizer."""

    def configure_optimizers(self):
        torch.nn.init.ones_(self.body[3].weight)
        return super().configure_optimizers()


def test_weights_that_change_when_optimizers_are_made_are_refused():
    train(of_net(Beginning), fixed, epochs=1)
    with pytest.raises(th.StateError, match=r"configure_optimizers changes.*'body\.3\.weight'"):
        train(of_net(Beginning), fixed, epochs=2)


# -- checkpoints -------------------------------------------------------------------------------


class Halved(Plain):
    """Saves space."""

    def on_save_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: each.half().float() for name, each in weights.items()}


class Trimmed(Plain):
    """Leaves out of its checkpoints what is frozen, as modules with a large trunk do."""

    strict_loading = False

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.body[0].requires_grad_(requires_grad=False)

    def on_save_checkpoint(self, checkpoint):
        for name in ("body.0.weight", "body.0.bias"):
            checkpoint["state_dict"].pop(name, None)


def pruning():
    return pl.callbacks.ModelPruning(
        "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False
    )


@pytest.mark.parametrize(
    ("kind", "callbacks", "hook"),
    [
        (Plain, lambda: [pruning()], "ModelPruning.on_save_checkpoint"),
        (Halved, list, "Halved.on_save_checkpoint"),
    ],
    ids=["pruning", "half"],
)
def test_a_checkpoint_that_does_not_bring_back_all_weights_is_refused(kind, callbacks, hook):
    one = of_net(kind, callbacks())
    with pytest.raises(th.StateError, match=f"does not bring back the weight 'body.*{hook}"):
        train(one, fixed, epochs=2)


def test_one_epoch_with_such_a_checkpoint_passes():
    metrics, _ = train(of_net(Plain, [pruning()]), fixed, epochs=1)
    assert metrics[0]["val_loss"] == one_fit(Plain, [pruning()])[0][0]


def test_a_checkpoint_may_leave_out_what_is_made_again():
    metrics, _ = train(of_net(Trimmed), fixed, epochs=EPOCHS)
    assert [m["val_loss"] for m in metrics] == one_fit(Trimmed)[0]


# -- being stopped -----------------------------------------------------------------------------


class StopsWithin(Plain):
    def on_train_batch_end(self, *args):
        if self.trainer.global_step >= 6:
            self.trainer.should_stop = True


class StopsAfterValidation(Plain):
    def on_validation_epoch_end(self):
        if self.current_epoch == 1:
            self.trainer.should_stop = True


class Counting(pl.Callback):
    """Counts epochs in its state, and stops after the third."""

    num = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.num += 1
        trainer.should_stop = self.num >= 3

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


def early(**options):
    return pl.callbacks.EarlyStopping("val_loss", **{"patience": 1, "min_delta": 0.1, **options})


STOPS = {
    "early": (Plain, lambda: [early()], {}),
    "at once": (Plain, lambda: [early(stopping_threshold=100.0)], {}),
    "within": (StopsWithin, list, {}),
    "validation": (StopsAfterValidation, list, {}),
    "counting": (Plain, lambda: [Counting()], {}),
    "several validations": (Plain, lambda: [early(patience=2)], {"val_check_interval": 2}),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_trial_ends_where_the_users_code_stops_training(case):
    kind, callbacks, options = STOPS[case]
    curve, loss = trained(lambda: of_net(kind, callbacks(), **options))
    wanted, wanted_loss = one_fit(kind, callbacks(), **options)
    assert len(wanted) < EPOCHS
    assert curve == wanted + [wanted[-1]] * (EPOCHS - len(wanted))
    assert loss == wanted_loss


@pytest.mark.parametrize("case", STOPS)
def test_a_trial_that_has_ended_stays_so_when_it_is_resumed(case):
    kind, callbacks, options = STOPS[case]
    wanted, _ = one_fit(kind, callbacks(), **options)
    held = [*wanted, *[wanted[-1]] * (EPOCHS - len(wanted))]
    assert curve_when_resumed(lambda: of_net(kind, callbacks(), **options)) == held


def test_a_trial_may_end_within_an_epoch_of_steps():
    one = LightningTrainable(lambda hp: StopsWithin(hp.lr), still, steps_per_epoch=4)
    curve = [m["val_loss"] for m in train(one, fixed, epochs=EPOCHS)[0]]
    wanted, _ = one_fit(StopsWithin)
    assert curve[1:] == [wanted[-1]] * 3


def test_epochs_of_a_trial_that_has_ended_train_nothing():
    steps = []

    class Noted(StopsAfterValidation):
        def training_step(self, batch, batch_idx):
            steps.append(self.current_epoch)
            return super().training_step(batch, batch_idx)

    one = task(kind=Noted, data=still)
    train(one, fixed, epochs=EPOCHS)
    assert sorted(set(steps)) == [0, 1]


def test_a_study_goes_on_with_a_trial_that_has_ended_in_silence(tmp_path, caplog):
    study = th.Study(
        of_net(Plain, [early()]),
        th.Space(lr=th.Choice([0.05, th.Step(0.05, [3], gamma=0.5)])),
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="net",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    wanted, loss = one_fit(Plain, [early()])
    held = [*wanted, *[wanted[-1]] * (EPOCHS - len(wanted))]
    assert [list(trial.curve) for trial in study.trials] == [held, held]
    assert loss_of(study.trials[0].load_model()) == loss
    assert "checkpoint" not in caplog.text


# -- what a study controls ---------------------------------------------------------------------


class Longer(Plain):
    def on_train_epoch_start(self):
        self.trainer.fit_loop.max_epochs = 9


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (Net, lambda: [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
        (Longer, list),
    ],
    ids=["swa", "hook"],
)
@pytest.mark.parametrize("max_epochs", [None, EPOCHS])
def test_a_hook_that_makes_training_longer_is_refused(kind, callbacks, max_epochs):
    options = {"trainer": {"callbacks": callbacks()}, "max_epochs": max_epochs}
    with pytest.raises(th.TaskError, match=r"changes trainer\.max_epochs"):
        train(task(kind=kind, data=still, **options), fixed, epochs=1)


def test_a_callback_that_trains_before_the_first_step_is_refused():
    finder = pl.callbacks.LearningRateFinder(num_training_steps=5)
    with pytest.raises(th.TaskError, match="trains before the first step"):
        train(of_net(Plain, [finder]), fixed, epochs=1)


# -- data that a module makes itself ---------------------------------------------------------------


class Splitting(Plain):
    """Splits its data at random when a fit begins, and takes a random half of them to validate."""

    seen: list = []  # noqa: RUF012 -- what all fits of a test have made

    def setup(self, stage):
        rows = torch.utils.data.TensorDataset(*points())
        self.parts = torch.utils.data.random_split(rows, [32, 8])
        type(self).seen.append(("split", sorted(self.parts[1].indices)))

    def train_dataloader(self):
        few = torch.randperm(32)[:24].tolist()
        type(self).seen.append(("train", few))
        chosen = torch.utils.data.Subset(self.parts[0], few)
        return torch.utils.data.DataLoader(chosen, batch_size=8, shuffle=True)

    def val_dataloader(self):
        few = torch.randperm(8)[:6].tolist()
        type(self).seen.append(("valid", few))
        return torch.utils.data.DataLoader(torch.utils.data.Subset(self.parts[1], few))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            type(self).seen.append(("first batch", batch[0].flatten().tolist()))
        return super().training_step(batch, batch_idx)


def test_hooks_that_make_data_draw_the_same_in_each_epoch():
    """Else validation data are trained on."""
    Splitting.seen.clear()

    def make():
        return LightningTrainable(lambda hp: Splitting(hp.lr))

    assert_a_resumed_trial_is_the_same(make, fixed, epochs=3)
    for name in ("split", "train", "valid"):
        found = [draws for what, draws in Splitting.seen if what == name]
        assert len(found) >= 6
        assert all(draws == found[0] for draws in found)
    batches = [rows for what, rows in Splitting.seen if what == "first batch"]
    assert len({tuple(rows) for rows in batches}) >= 3, "each epoch has an order of its own"


class Best(torch.nn.Module):
    """A state that is neither parameter nor buffer, as those of torchmetrics are."""

    def __init__(self):
        super().__init__()
        self.value = float("-inf")

    def get_extra_state(self):
        return torch.tensor(self.value)

    def set_extra_state(self, state):
        self.value = float(state)


class Resetting(Plain):
    """Begins anew to look for the best value when training begins."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.best = Best()

    def on_train_start(self):
        self.best.value = float("-inf")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            self.best.value = max(self.best.value, float(self.current_epoch == 1))
            self.log("best", self.best.value)


def test_a_state_that_hooks_at_the_beginning_reset_goes_on_later():
    metrics, _ = train(of_net(Resetting), fixed, epochs=4)
    assert [each["best"] for each in metrics] == [0.0, 1.0, 1.0, 1.0]


class WithBest(Plain):
    """Looks for the best value as projects do that begin from the well-known template."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.best = torchmetrics.MinMetric()

    def on_train_start(self):
        self.best.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.best.update(float(self.current_epoch != 1))
        self.log("best", self.best.compute())


def test_a_metric_that_goes_over_all_epochs(tmp_path):
    def make():
        return of_net(WithBest)

    assert_a_resumed_trial_is_the_same(make, fixed)
    metrics, state = train(make(), fixed, epochs=3)
    assert [each["best"] for each in metrics] == [1.0, 0.0, 0.0]
    held = {name: each for name, each in state.tensors.items() if "best" not in name}
    assert len(held) == len(state.tensors) - 1


class WithoutRows(Splitting):
    """Fails when it makes its data for validation."""

    def val_dataloader(self):
        raise FileNotFoundError("rows.csv")


def test_a_hook_that_fails_changes_no_random_stream_afterwards():
    """Else a later trial draws other numbers once the error is forgotten."""
    one = LightningTrainable(lambda hp: WithoutRows(hp.lr))
    with pytest.raises(FileNotFoundError, match="rows") as caught:
        train(one, fixed, epochs=1)
    seed_everything(5)
    del caught
    gc.collect()
    drawn = torch.rand(3)
    seed_everything(5)
    assert torch.equal(drawn, torch.rand(3))


class MyLoader(torch.utils.data.DataLoader):
    def __init__(self, rows):
        super().__init__(rows, batch_size=2)


def test_a_hook_that_fails_leaves_the_classes_of_loaders_as_they_were():
    """Lightning wraps their methods, and the identity of a task with a loader would show that."""
    kinds = (torch.utils.data.DataLoader, torch.utils.data.BatchSampler, MyLoader)
    methods = ("__init__", "__setattr__", "__delattr__")

    def found():
        held = [{k: v for k, v in vars(each).items() if k.startswith("__old")} for each in kinds]
        return held, [getattr(each, name) for each in kinds for name in methods]

    before = found()
    for _ in range(2):
        one = LightningTrainable(lambda hp: WithoutRows(hp.lr))
        with pytest.raises(FileNotFoundError, match="rows"):
            train(one, fixed, epochs=1)
        assert found() == before
    assert not [name for name in vars(MyLoader([1, 2])) if "__pl" in name]


def test_what_other_code_has_left_wrapped_is_put_back_as_well():
    """Such as a fit of Lightning that has failed before."""
    before = torch.utils.data.DataLoader.__init__
    with pytest.raises(FileNotFoundError, match="rows"):
        pl.Trainer(logger=False, enable_progress_bar=False, max_epochs=1).fit(WithoutRows(0.1))
    assert torch.utils.data.DataLoader.__init__ is not before
    train(LightningTrainable(lambda hp: Splitting(hp.lr)), fixed, epochs=1)
    assert torch.utils.data.DataLoader.__init__ is before
