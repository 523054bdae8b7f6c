"""LightningModules are trained unchanged by Lightning, and share stages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import cloudpickle
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, made_again_only, train
from thrifty.core import TaskError, derive_seed
from thrifty.integrations import LightningTrainable, _model_copies
from thrifty.integrations._adapters import follow, options_of
from thrifty.pack._state import seed_everything


pytestmark = pytest.mark.slow


EPOCHS = 4
SCHEDULERS = {
    "none": None,
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "plateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "monitor": "val_loss",
    },
}


def points():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, 4, generator=generator)
    return x, (x[:, :1] * 2 - x[:, 1:2]).tanh()


class Net(pl.LightningModule):
    def __init__(self, lr, *, dropout=0.0, optimizer=torch.optim.Adam, scheduler=None):
        super().__init__()
        self.save_hyperparameters("lr", "dropout")
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(8, 1),
        )
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("rate", self.optimizers().param_groups[0]["lr"], on_epoch=True, on_step=False)
        self.log("dropout", self.body[2].p, on_epoch=True, on_step=False)
        self.log("epoch_number", float(self.current_epoch), on_epoch=True, on_step=False)
        return (self.body(x) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.body(x) - y).square().mean())

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=self.hparams.lr)
        if self.scheduler is None:
            return optimizer
        made = self.scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": made}


class WithLoaders(Net):
    def train_dataloader(self):
        return loaders()[0]

    def val_dataloader(self):
        return loaders()[1]


class Points(pl.LightningDataModule):
    num_setups = 0

    def setup(self, stage):
        type(self).num_setups += 1
        x, y = points()
        chosen = torch.randperm(40)
        self.train, self.valid = (TensorDataset(x[i], y[i]) for i in chosen.split([32, 8]))

    def teardown(self, stage):
        del self.train

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=8)


def loaders(*, shuffle=True, generator=None):
    x, y = points()
    train_set, valid = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
    return (
        DataLoader(train_set, batch_size=8, shuffle=shuffle, generator=generator),
        DataLoader(valid, batch_size=8),
    )


def fixed(epoch):
    return {"lr": 0.05}


def slowing(epoch):
    return {"lr": 0.1 / (1 + epoch)}


def falling(epoch):
    return {"lr": 0.1 if epoch < 2 else 0.01, "dropout": 0.1 * epoch}


def task(*, data=lambda hp: loaders(), kind=Net, trainer=None, max_epochs=None, **options):
    return LightningTrainable(
        lambda hp: kind(hp.lr, dropout=hp.get("dropout", 0.0), **options),
        data,
        max_epochs=max_epochs,
        trainer=trainer,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_resumed_is_as_alone(scheduler):
    options = {"scheduler": SCHEDULERS[scheduler]}
    assert_a_resumed_trial_is_the_same(
        lambda: task(**options), lambda _: {"lr": 0.05, "dropout": 0.3}
    )


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Net, lambda hp: loaders(generator=torch.Generator().manual_seed(1))),
        (Net, lambda hp: Points()),
        (WithLoaders, None),
    ],
    ids=["generator", "datamodule", "module"],
)
def test_data_of_each_kind_come_in_the_same_order_when_resumed(kind, data):
    assert_a_resumed_trial_is_the_same(lambda: task(kind=kind, data=data), falling)


def test_a_generator_of_the_loader_does_not_stand_still():
    class Seen(Net):
        def training_step(self, batch, batch_idx):
            self.log("first", batch[0][0, 0], on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    data = [lambda hp: loaders(generator=torch.Generator()), lambda hp: loaders()]
    for each in data:
        metrics, _ = train(task(kind=Seen, data=each), fixed, epochs=3)
        assert len({m["first"] for m in metrics}) == 3


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_trial_is_what_one_fit_of_lightning_gives():
    curve = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            curve.append(float(trainer.callback_metrics["val_loss"]))

    seed_everything(derive_seed(3, "model"))
    net = Net(0.05, scheduler=SCHEDULERS["step"])
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
        num_sanity_val_steps=0,
    )
    trainer.fit(net, *loaders(shuffle=False))
    one = task(scheduler=SCHEDULERS["step"], data=lambda hp: loaders(shuffle=False))
    metrics, _ = train(one, fixed, epochs=EPOCHS)
    assert [m["val_loss"] for m in metrics] == curve


def test_schedules_reach_optimizer_and_layers():
    metrics, _ = train(task(), falling, epochs=EPOCHS)
    assert [m["rate"] for m in metrics] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert [m["dropout"] for m in metrics] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [m["epoch_number"] for m in metrics] == [0, 1, 2, 3]


def test_a_schedule_leaves_the_optimizers_memory_alone():
    """A schedule keeps the optimizer's state.

    It does so as a loop of plain PyTorch that changes the learning rate of its groups.
    """

    def momentum(params, lr):
        return torch.optim.SGD(params, lr=lr, momentum=0.9)

    seed_everything(derive_seed(3, "model"))
    net = Net(0.1)
    optimizer = momentum(net.parameters(), 0.1)
    train_loader, ((x, y),) = loaders(shuffle=False)
    curve = []
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = falling(epoch)["lr"]
        net.train()
        for a, b in train_loader:
            optimizer.zero_grad()
            (net.body(a) - b).square().mean().backward()
            optimizer.step()
        net.eval()
        curve.append((net.body(x) - y).square().mean().item())

    one = task(optimizer=momentum, data=lambda hp: loaders(shuffle=False))
    metrics, _ = train(one, lambda epoch: {"lr": falling(epoch)["lr"]}, epochs=EPOCHS)
    assert [m["val_loss"] for m in metrics] == curve


def test_a_scheduler_that_multiplies_goes_with_a_schedule():
    one = task(scheduler=SCHEDULERS["lambda"])
    metrics, _ = train(one, lambda epoch: {"lr": 0.1 if epoch < 2 else 0.02}, epochs=EPOCHS)
    assert [m["rate"] for m in metrics] == pytest.approx([0.1, 0.05, 0.02 / 4, 0.02 / 8])


@pytest.mark.parametrize("scheduler", ["step", "plateau"])
def test_other_schedulers_do_not(scheduler):
    one = task(scheduler=SCHEDULERS[scheduler])
    with pytest.raises(th.TaskError, match="leave one of them out"):
        train(one, falling, epochs=EPOCHS)


def test_a_scheduler_may_ask_how_many_steps_there_will_be():
    class OneCycle(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            made = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
            return [optimizer], [{"scheduler": made, "interval": "step"}]

    def make():
        return task(kind=OneCycle, max_epochs=EPOCHS)

    assert_a_resumed_trial_is_the_same(make, fixed)
    with pytest.raises(th.TaskError, match="is asked for epoch 5"):
        train(make(), fixed, epochs=EPOCHS + 1)


def test_accumulated_gradients_and_callbacks():
    class Count(pl.Callback):
        seen = 0

        def on_train_epoch_start(self, trainer, pl_module):
            self.seen += 1
            pl_module.log("seen", float(self.seen))

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    options = {"callbacks": [Count()], "accumulate_grad_batches": 3, "gradient_clip_val": 1.0}
    assert_a_resumed_trial_is_the_same(lambda: task(trainer=options), falling)
    metrics, _ = train(task(trainer=options), falling, epochs=3)
    assert [m["seen"] for m in metrics] == [1, 2, 3]
    assert options["callbacks"][0].seen == 0


def test_train_loss_is_the_mean_over_the_epoch_also_of_accumulated_batches():
    still = {"optimizer": torch.optim.SGD, "data": lambda hp: loaders(shuffle=False)}
    plain, _ = train(task(**still), lambda _: {"lr": 0.0}, epochs=1)
    added, _ = train(
        task(**still, trainer={"accumulate_grad_batches": 2}), lambda _: {"lr": 0.0}, epochs=1
    )
    assert added[0]["train_loss"] == pytest.approx(plain[0]["train_loss"])
    seed_everything(derive_seed(3, "model"))
    net = Net(0.0)
    losses = [(net.body(x) - y).square().mean().item() for x, y in loaders(shuffle=False)[0]]
    assert plain[0]["train_loss"] == pytest.approx(sum(losses) / 4)


def test_data_are_made_and_set_up_once_for_each_trial():
    calls = []
    before = Points.num_setups

    def data(hp):
        calls.append(hp.get("rows"))
        return Points()

    one = task(data=data)
    for lr in (0.1, 0.2):
        train(one, lambda epoch, lr=lr: {"lr": lr, "rows": 3}, epochs=2)
    assert calls == [3, 3]
    assert Points.num_setups == before + 2
    train(one, lambda epoch: {"lr": 0.1, "rows": 3 + epoch // 2}, epochs=4)
    assert calls == [3, 3, 3, 4]


def test_a_study_shares_stages_and_every_trial_is_as_alone(tmp_path):
    space = th.Space(lr=th.Choice([0.1, th.Step(0.1, [2], gamma=0.1)]))
    study = th.Study(
        task(),
        space,
        algorithm=th.GridSearch(max_epochs=4),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="line",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert (study.savings.trial_epochs, study.savings.unique_epochs) == (8, 6)
    for trial, values in zip(study.trials, (lambda _: {"lr": 0.1}, None), strict=True):
        step = values or (lambda epoch: {"lr": 0.1 if epoch < 2 else 0.1 * 0.1})
        metrics, _ = train(task(), step, epochs=4)
        assert list(trial.curve) == [m["val_loss"] for m in metrics]


def test_nothing_is_printed_and_nothing_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    train(task(), fixed, epochs=2)
    said = capfd.readouterr()
    assert said.out + said.err == ""
    assert not list(Path.cwd().iterdir())


@pytest.mark.filterwarnings("default")
def test_what_lightning_warns_of_at_each_start_is_not_repeated(recwarn):
    train(task(), fixed, epochs=2)
    assert [str(each.message) for each in recwarn] == []


class Remembering(Net):
    """Counts its steps in an attribute, and depends on them."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append(batch_idx)
        return super().training_step(batch, batch_idx) * len(self.steps)


LATEST: dict[str, Net] = {}


class Registered(Net):
    """Asks whether it is the module that was made last, which a copy would not be."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        self.body[0].bias.requires_grad_(requires_grad=False)
        LATEST["module"] = self

    def training_step(self, batch, batch_idx):
        assert LATEST["module"] is self
        return super().training_step(batch, batch_idx)


class Whole(Net):
    """Keeps all hyper-parameters, and reads the rate when the optimizer is made."""

    def __init__(self, hp):
        super().__init__(0.0)
        self.hp = hp

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hp.lr)


class Halved(Net):
    """Computes with the rate when it is made."""

    def __init__(self, lr, **options):
        super().__init__(lr / 2, **options)


class Deeper(Net):
    """Looks at the rate when it is made, and forgives that this fails."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        try:
            small = lr < 0.05
        except Exception:  # noqa: BLE001 (user code that tries what it may)
            small = True
        self.scale = 0.5 if small else 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


RATES: list[float] = []


class Noting(Net):
    """Keeps the rate of each module in a list of the class as well."""

    def __init__(self, lr, **options):
        super().__init__(lr, **options)
        RATES.append(lr)


def made(kind):
    if kind is Whole:
        return Whole
    return lambda hp: kind(hp.lr, dropout=hp.get("dropout", 0.0))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "values", "num"),
    [
        (Net, fixed, 4),
        (Net, slowing, 4),
        (Net, falling, 7),
        (Remembering, slowing, 4),
        (Whole, slowing, 4),
        (Halved, fixed, 4),
        (Halved, slowing, 7),
        (Deeper, slowing, 7),
        (Noting, slowing, 6),
        (Registered, fixed, 6),
    ],
)
def test_modules_are_copied_where_they_are_the_same(monkeypatch, kind, values, num):
    def trained():
        calls = []
        counted = lambda *args: (calls.append(None), seed_everything(*args))  # noqa: E731
        monkeypatch.setattr(_model_copies, "seed_everything", counted)
        task = LightningTrainable(made(kind), lambda hp: loaders())
        metrics, state = train(task, values, epochs=6)
        return metrics, state.tensors, len(calls)

    metrics, tensors, calls = trained()
    assert calls == num
    monkeypatch.setattr(_model_copies, "made_again", made_again_only)
    wanted, others, _ = trained()
    assert metrics == wanted
    assert all((tensor == others[name]).all() for name, tensor in tensors.items())
    assert all(type(rate) is float for rate in RATES)


def test_the_model_has_the_trials_weights():
    one = task(data=lambda hp: loaders(shuffle=False))
    with pytest.raises(th.TaskError, match="nothing has been trained"):
        one.evaluate()
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    stream = torch.get_rng_state()
    fresh = one.model.state_dict()
    assert torch.equal(torch.get_rng_state(), stream)
    one.train(0, th.HyperParameters(fixed(0)))
    trained = one.model.eval()
    x, y = points()
    loss = (trained.body(x[32:]) - y[32:]).square().mean()
    assert loss.item() == one.evaluate()["val_loss"]
    assert not torch.equal(fresh["body.0.weight"], trained.body[0].weight)


def test_monitor_chooses_what_is_reported():
    one = LightningTrainable(lambda hp: Net(0.1), lambda hp: loaders(), monitor="val_loss")
    metrics, _ = train(one, fixed, epochs=1)
    assert set(metrics[0]) == {"val_loss"}
    other = LightningTrainable(lambda hp: Net(0.1), lambda hp: loaders(), monitor=["accuracy"])
    with pytest.raises(th.TaskError, match=r"does not log accuracy .it logs dropout, epoch_number"):
        train(other, fixed, epochs=1)


class Diverging(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


def test_a_loss_that_is_no_number():
    with pytest.raises(th.DivergedError, match="training loss of epoch 1 is nan"):
        train(task(kind=Diverging), fixed, epochs=1)


def test_what_is_wrong_is_said():
    with pytest.raises(th.TaskError, match=r"'logger'.*observers"):
        task(trainer={"logger": True})
    with pytest.raises(th.TaskError, match="made a Linear; it has to make a LightningModule"):
        train(LightningTrainable(lambda hp: torch.nn.Linear(1, 1)), fixed, epochs=1)
    with pytest.raises(th.TaskError, match="made a tuple of 3"):
        train(task(data=lambda hp: (1, 2, 3)), fixed, epochs=1)


def test_a_module_of_pytorch_lightning():
    old = importlib.import_module("pytorch_lightning")

    class Old(old.LightningModule):
        def __init__(self, lr):
            super().__init__()
            self.body, self.lr = torch.nn.Linear(4, 1), lr

        def training_step(self, batch, batch_idx):
            return (self.body(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    assert_a_resumed_trial_is_the_same(
        lambda: LightningTrainable(lambda hp: Old(hp.lr), lambda hp: loaders()[0]), fixed, epochs=2
    )


def test_a_task_may_go_to_another_process_with_what_it_has_made_left_behind():
    data = [lambda hp: loaders(generator=torch.Generator()), lambda hp: Points()]
    for each in data:
        one = task(data=each)
        alone, _ = train(one, fixed, epochs=2)
        sent = cloudpickle.loads(cloudpickle.dumps(one))
        assert train(sent, fixed, epochs=2)[0] == alone


def test_layers_may_be_made_late():
    class Late(Net):
        def configure_model(self):
            if not hasattr(self, "more"):
                self.more = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.more.weight.square().sum()

    assert_a_resumed_trial_is_the_same(lambda: task(kind=Late), fixed, epochs=2)
    one = task(kind=Late)
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    one.train(0, th.HyperParameters(fixed(0)))
    assert one.model.more.weight.shape == (1, 1)


def test_manual_optimisation():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert_a_resumed_trial_is_the_same(lambda: task(kind=Manual), falling)


IDENTITY = """
from tests.integrations._drive import train, stored
from thrifty.integrations import LightningTrainable
one = LightningTrainable(
    lambda hp: train(hp.lr) if hp.kind in {"a", "b", "c"} else 0, stored, monitor="val_loss"
)
identity = str(one.identity())
"""


def test_the_identity_is_the_same_in_every_process_and_follows_the_code():
    # `exec` here, too: from Python 3.13 on, code after `-c` has a source that can be read
    script = f"names = {{'__name__': 'somewhere'}}; exec({IDENTITY!r}, names)"
    elsewhere = subprocess.run(
        [sys.executable, "-c", f"{script}; print(names['identity'])"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    # a name of its own: that of the main program is another one in each process
    here, changed = {"__name__": "somewhere"}, {"__name__": "somewhere"}
    exec(IDENTITY, here)
    exec(IDENTITY.replace("train(hp.lr)", "train(2 * hp.lr)"), changed)
    assert here["identity"] == elsewhere.stdout.strip() != changed["identity"]


def test_the_identity_follows_options_captures_and_the_modules_class(monkeypatch):
    def of(width=1, **options):
        one = LightningTrainable(lambda hp: Net(hp.lr * width), lambda hp: loaders(), **options)
        return one.identity()

    assert of() == of()
    for other in (
        {"width": 2},
        {"version": "2"},
        {"trainer": {"precision": 64}},
        {"max_epochs": 3},
    ):
        assert of(**other) != of()
    before = of()
    monkeypatch.setattr(Net, "training_step", lambda *_: None)
    assert of() != before


def test_what_the_data_function_made_is_not_taken_for_state(tmp_path, caplog):
    study = th.Study(
        task(),
        th.Space(lr=th.Choice([0.05, th.Step(0.05, [1])])),
        algorithm=th.GridSearch(max_epochs=2),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="net",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert len(study.trials) == 2
    assert "checkpoint" not in caplog.text


class Growing(Points):
    """Gives the first epochs half of the samples, as a data module that counts its epochs may."""

    def __init__(self, num_small):
        super().__init__()
        self.num_small, self.count = num_small, 0

    def train_dataloader(self):
        self.count += 1
        x, y = points()
        num = 16 if self.count <= self.num_small else 32
        return DataLoader(TensorDataset(x[:num], y[:num]), batch_size=8)


def ran(rates, *, num_small, folder, not_state=()):
    one = task(data=lambda hp: Growing(num_small))
    one.not_state = (*one.not_state, *not_state)
    study = th.Study(
        one,
        th.Space(lr=th.Choice(rates)),
        algorithm=th.GridSearch(max_epochs=2),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{folder}/{len(rates)}.db",
        name="net",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    return {trial.config["lr"]: trial.value for trial in study.trials}


def test_no_trial_sees_what_another_one_has_changed_in_its_data_module(tmp_path):
    excused = {"num_small": 4, "folder": tmp_path, "not_state": ("count", "num_setups")}
    assert ran([0.05, 0.1, 0.2], **excused)[0.2] == ran([0.2], **excused)[0.2]


@pytest.mark.parametrize("num_small", [1, 4])  # the count acts in the next epochs, or later
def test_a_data_module_with_state_of_its_own_is_refused_by_name(num_small, tmp_path):
    with pytest.raises(th.StateError, match=r"_data\.made\.count"):
        ran([0.2], num_small=num_small, folder=tmp_path)


def test_parameter_groups_that_are_added_later_are_refused():
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(
        [{"params": list(first.parameters())}, {"params": list(second.parameters())}], lr=0.1
    )
    with pytest.raises(TaskError, match=r"had 1 parameter groups .* and has 2 now"):
        follow([two], [], before=options_of([one]), now=options_of([two]))
