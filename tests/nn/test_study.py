"""Gyro dropout in a study: each trial has its own subnetworks, packed or interrupted or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, together
from thrifty.nn import GyroMLP, GyroSchedule, gyro_
from thrifty.pack import BlockOptions, FusedBackend, SoloBackend


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


EPOCHS, ROWS, BATCH = 4, 22, 5
STEPS = EPOCHS * -(-ROWS // BATCH)


class Gyro(th.Task):
    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = BATCH

    def data(self, hp):
        x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)).double()
        y = x[:, :2].tanh()
        return th.ArrayData(train=(x, y), valid=(x, y))

    def model(self, hp):
        model = nn.Sequential(
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Dropout(hp.p),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Dropout(hp.p),
            nn.Linear(8, 2),
        )
        gyro_(model, torch.zeros(1, 6), subnetworks=hp.sigma, concurrent=hp.tau, total_steps=STEPS)
        return model.double()

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"error": self.loss(model, batch)}


class Blocks(Gyro):
    def model(self, hp):
        schedule = GyroSchedule(subnetworks=hp.sigma, concurrent=hp.tau, total_steps=STEPS)
        return GyroMLP(
            6, [8, 8], 2, p=hp.p, group_size=2, schedule=schedule, execution="sliced"
        ).double()


CONFIGS = [
    {"lr": 0.1, "p": 0.5, "sigma": 8, "tau": 2},
    {"lr": 0.05, "p": 0.5, "sigma": 8, "tau": 2},
    {"lr": 0.05, "p": 0.25, "sigma": 8, "tau": 2},
    {"lr": 0.05, "p": 0.5, "sigma": 6, "tau": 3},
]


@pytest.mark.parametrize("task", [Gyro, Blocks])
def test_packed_is_solo(task):
    trials = [Trial(config=c, seed=k, epochs=EPOCHS) for k, c in enumerate(CONFIGS)]
    found = together(FusedBackend(task(), device=here(), block=BlockOptions(size=4)), trials)
    for trial, result in zip(trials, found, strict=True):
        (alone,) = together(SoloBackend(task(), device=here()), [trial])
        assert result.error is None
        for one, other in zip(result.metrics, alone.metrics, strict=True):
            assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.parametrize("task", [Gyro, Blocks])
def test_stopped_in_mid_period_and_resumed(task):
    (whole,) = together(
        SoloBackend(task(), device=here()), [Trial(config=CONFIGS[0], epochs=EPOCHS)]
    )
    (half,) = together(SoloBackend(task(), device=here()), [Trial(config=CONFIGS[0], epochs=1)])
    rest = Trial(config=CONFIGS[0], epochs=EPOCHS, start=1, state=half.state)
    (resumed,) = together(SoloBackend(task(), device=here()), [rest])
    assert resumed.metrics == whole.metrics[1:]


def test_a_study_tunes_them(tmp_path):
    study = th.Study(
        Gyro(),
        th.Space(lr=0.1, p=th.Choice([0.0, 0.5]), sigma=th.Choice([4, 8]), tau=2),
        algorithm=th.GridSearch(max_epochs=2),
        metric="error",
        mode="min",
        storage=f"sqlite:///{tmp_path}/study.db",
        name="gyro",
    )
    study.run(progress=False)
    best = study.best_trial
    model = best.load_model()
    assert int(model[2].schedule.position) == 2 * STEPS // EPOCHS
    assert model[2].schedule is model[5].schedule
