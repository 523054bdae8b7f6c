"""A trial of several processes is the task's own trial."""

from __future__ import annotations

import pytest
import torch

import thrifty as th
from thrifty.core import HeteroError
from thrifty.hetero import HeteroTask


class Line(th.Task):
    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 16

    def data(self, hp):
        x = torch.linspace(-1, 1, 90)[:, None].repeat(1, 3)
        return th.ArrayData(train=(x[:70], x[:70].sin()), valid=(x[70:], x[70:].sin()))

    def model(self, hp):
        return torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


class Broken(Line):
    def loss(self, model, batch):
        raise ValueError("no loss today")


def run(task, folder, name, **options):
    study = th.Study(
        task,
        th.Space(lr=th.Choice([0.1, 0.05])),
        algorithm=th.GridSearch(max_epochs=3),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/{name}.db",
        name=name,
        seed=0,
        **options,
    )
    study.run()
    return study


def found(study):
    return sorted((trial.config["lr"], trial.value) for trial in study.trials)


def test_a_study_of_jobs_finds_what_a_study_of_trials_finds(tmp_path):
    alone = found(run(Line(), tmp_path, "alone"))
    spread = found(run(HeteroTask(Line(), workers=2), tmp_path, "spread"))
    assert [lr for lr, _ in spread] == [lr for lr, _ in alone]
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)


def test_an_error_in_a_worker_is_told(tmp_path):
    task = HeteroTask(Broken(), workers=2)
    study = run(task, tmp_path, "broken")
    with pytest.raises(th.ThriftyError, match="no loss today"):
        study.best_trial  # noqa: B018 (it raises)


def test_options_are_checked():
    with pytest.raises(HeteroError, match="at least one worker"):
        HeteroTask(Line(), workers=0)
    with pytest.raises(HeteroError, match="1 sets of cores"):
        HeteroTask(Line(), workers=2, cores=[[0]])
