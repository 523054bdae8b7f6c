"""What LightningCLI makes is trained as the same module and data without it."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import thrifty as th
from thrifty.core import TaskError
from thrifty.integrations import LightningTrainable, lightning_cli


pytestmark = pytest.mark.slow


class Net(pl.LightningModule):
    def __init__(self, lr: float, width: int = 8, kind: str = "relu", num_in: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(num_in, width),
            {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[kind](),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(width, 1),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.body(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.body(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Bare(Net):
    """A module whose optimizer the CLI adds."""

    configure_optimizers = pl.LightningModule.configure_optimizers

    def __init__(self, width: int = 8):
        super().__init__(lr=0.0, width=width)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, num_in: int = 2):
        super().__init__()
        self.batch_size, self.num_in = batch_size, num_in

    def setup(self, stage):
        x = torch.linspace(-1, 1, 32 * self.num_in).reshape(-1, self.num_in)
        self.samples = torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.samples, batch_size=16)


class Linked(LightningCLI):
    """A CLI of the user's own: linked arguments and another default."""

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.num_in", "model.num_in")
        parser.set_defaults({"model.width": 4})


SPACE = {"model.lr": th.Choice([0.05, th.Step(0.05, [2])]), "data.batch_size": th.Choice([8, 16])}


def study_of(task, **space):
    return th.Study(
        task,
        th.Space(**(space or SPACE)),
        algorithm=th.GridSearch(max_epochs=3),
        metric="val_loss",
        mode="min",
        name="cli",
        storage="sqlite://",
    ).run(progress=False, executor=th.Local(pack="solo"))


def curves(study):
    return [trial.curve for trial in study.trials]


def test_trials_are_those_without_the_cli(tmp_path):
    (tmp_path / "config.yaml").write_text("model:\n  width: 4\n  kind: tanh\n")
    found = study_of(lightning_cli(Net, Data, config=tmp_path / "config.yaml"))
    plain = LightningTrainable(
        lambda hp: Net(lr=hp["model.lr"], width=4, kind="tanh"),
        lambda hp: Data(batch_size=hp["data.batch_size"]),
    )
    assert curves(found) == curves(study_of(plain))
    assert found.savings.unique_epochs == 8 < found.savings.trial_epochs, "prefixes are shared"


def test_links_defaults_and_sections_of_a_cli(tmp_path):
    (tmp_path / "a.yaml").write_text("fit:\n  data:\n    num_in: 3\n  model:\n    kind: relu\n")
    config = [str(tmp_path / "a.yaml"), {"model": {"kind": "tanh"}}]
    task = lightning_cli(Net, Data, config=config, cli=Linked)
    found = study_of(task, **{"model.lr": th.Choice([0.05])})
    plain = LightningTrainable(
        lambda hp: Net(lr=hp["model.lr"], width=4, kind="tanh", num_in=3), lambda hp: Data(num_in=3)
    )
    assert curves(found) == curves(study_of(plain, **{"model.lr": th.Choice([0.05])}))


def test_an_optimizer_of_the_configuration():
    space = {"optimizer.init_args.lr": th.Choice([0.05, th.Step(0.05, [1])])}
    config = {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {}}}
    found = study_of(lightning_cli(Bare, Data, config=config), **space)
    plain = LightningTrainable(lambda hp: Net(lr=hp["optimizer.init_args.lr"]), lambda hp: Data())
    assert curves(found) == curves(study_of(plain, **space))


def test_options_of_the_trainer(caplog):
    config = {
        "seed_everything": 7,
        "ckpt_path": None,
        "trainer": {
            "max_epochs": 50,
            "accelerator": "cpu",
            "logger": False,
            "gradient_clip_val": 0.01,
            "callbacks": [{
                "class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler",
                "init_args": {"scheduling": {0: 2}},
            }],
        },
    }  # fmt: skip
    with caplog.at_level(logging.INFO, logger="thrifty"):
        task = lightning_cli(Net, Data, config=config)
    assert "accelerator, logger, max_epochs" in caplog.text
    space = {"model.lr": th.Choice([0.05])}
    found = study_of(task, **space)
    callback = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 2})
    plain = LightningTrainable(
        lambda hp: Net(lr=hp["model.lr"]),
        lambda hp: Data(),
        trainer={"gradient_clip_val": 0.01, "callbacks": [callback]},
    )
    assert curves(found) == curves(study_of(plain, **space))
    assert curves(found) != curves(study_of(lightning_cli(Net, Data), **space))


def test_a_module_without_data():
    class Own(Net):
        def train_dataloader(self):
            data = Data()
            data.setup("fit")
            return data.train_dataloader()

        def val_dataloader(self):
            data = Data()
            data.setup("fit")
            return data.val_dataloader()

    space = {"model.lr": th.Choice([0.05])}
    assert len(curves(study_of(lightning_cli(Own), **space))[0]) == 3


def test_what_a_file_had_counts_and_not_what_it_has_later(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model:\n  width: 4\n")
    task = lightning_cli(Net, Data, config=str(file))
    space = {"model.lr": th.Choice([0.05])}
    before = curves(study_of(task, **space))
    file.write_text("model:\n  width: 8\n")
    assert curves(study_of(task, **space)) == before
    other = lightning_cli(Net, Data, config=str(file))
    assert other.identity() != task.identity()
    assert curves(study_of(other, **space)) != before


@pytest.mark.parametrize(
    ("config", "space", "message"),
    [
        ({}, {"model.speed": th.Choice([1.0])}, "takes no such configuration"),
        ({}, {"model.lr": th.Choice(["fast"])}, "takes no such configuration"),
        ({"model": {"widht": 3}}, {"model.lr": th.Choice([0.1])}, "widht"),
    ],
)
def test_a_configuration_that_does_not_fit(config, space, message):
    study = study_of(lightning_cli(Net, Data, config=config), **space)
    assert message in str(study.trials[0].error)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("a: [", "while parsing"), ("7", "has no options")],
)
def test_a_file_that_cannot_be_read(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TaskError, match=message):
        lightning_cli(Net, Data, config=file)


def test_options_of_the_trainer_that_do_not_fit():
    with pytest.raises(TaskError, match="trainer's options do not fit"):
        lightning_cli(Net, Data, config={"trainer": {"gradient_clip": 1.0}})


class Clips(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.set_defaults({"trainer.gradient_clip_val": 1e-6})


class Calls(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_lightning_class_args(pl.callbacks.EarlyStopping, "patience")
        parser.set_defaults({"patience.monitor": "val_loss"})


class Before(LightningCLI):
    def before_fit(self):
        self.model.lr = 0.0


def test_a_cli_that_changes_the_trainer_is_refused():
    space = {"model.lr": th.Choice([0.1])}
    for cli, told in ((Clips, "trainer.gradient_clip_val"), (Calls, "patience")):
        study = study_of(lightning_cli(Net, Data, cli=cli), **space)
        assert f"sets {told}" in str(study.trials[0].error)
    with pytest.raises(TaskError, match="has a before_fit of its own"):
        lightning_cli(Net, Data, cli=Before)


def test_options_of_the_trainer_are_no_hyper_parameters():
    space = {"model.lr": th.Choice([0.1]), "trainer.gradient_clip_val": th.Choice([1e-6, 1.0])}
    study = study_of(lightning_cli(Net, Data), **space)
    assert "cannot be a hyper-parameter" in str(study.trials[0].error)


class OnlyHere(torch.optim.Adam):
    """A class whose name no other package has: bitsandbytes has an Adam, too."""


def test_a_class_is_given_by_its_name():
    space = {"optimizer.lr": th.Choice([0.05])}
    found = study_of(lightning_cli(Bare, Data, config={"optimizer": "OnlyHere"}), **space)
    plain = LightningTrainable(lambda hp: Net(lr=hp["optimizer.lr"]), lambda hp: Data())
    assert curves(found) == curves(study_of(plain, **space))
