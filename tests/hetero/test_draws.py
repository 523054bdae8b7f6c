"""Random numbers of a step depend only on seed, epoch, step and share, for any random stream."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from thrifty.hetero import HeteroOptions, HeteroTrainer, StepCurve
from thrifty.hetero.workers._membership import from_bytes, to_bytes
from thrifty.testing import VirtualClock

from .jobs import SAMPLES, data, loss, model, sgd


pytestmark = pytest.mark.slow


SOURCES = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 -- as user code does
    "torch": lambda: float(torch.rand(())),
}


class Augmenting:
    """A data set that draws one number for each sample and records it."""

    def __init__(self, draw):
        self.draw, self.drawn = draw, []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.drawn.append(self.draw())
        x, y = data()[index]
        return x + 0.1 * self.drawn[-1], y


def trained(dataset, *, net=None, seed=5, criterion=loss, epochs=2):
    net = net or model()
    trainer = HeteroTrainer(
        net, sgd(net), dataset, loss=criterion, global_batch=16, seed=seed,
        options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
    )  # fmt: skip
    return [report.loss for report in trainer.run(epochs=epochs)]


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("source", SOURCES)
def test_a_check_takes_no_draws_from_a_step(source, batch, monkeypatch):
    """A check takes no draws from a step, since it depends on run time when a check happens."""
    monkeypatch.setattr("thrifty.hetero._loss_check._LEAST_GAP", 2)
    found = []
    for verify in (True, False):
        net, dataset = model(), Augmenting(SOURCES[source])
        trainer = HeteroTrainer(
            net, sgd(net), dataset, loss=noisy(SOURCES[source]), global_batch=batch, seed=5,
            clock=VirtualClock(),
            options=HeteroOptions(curve=StepCurve(sample_s=1.0), verify=verify),
        )  # fmt: skip
        found.append([report.loss for report in trainer.run(epochs=1)])
    assert found[0] == found[1]


def noisy(draw):
    return lambda net, batch: loss(net, batch) * (1 + 0.01 * draw())


def streams():
    state = np.random.get_state()  # noqa: NPY002
    return random.getstate(), state[1].tobytes(), state[2], torch.get_rng_state().tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_each_sample_of_each_step_has_draws_of_its_own(source):
    dataset = Augmenting(SOURCES[source])
    trained(dataset)
    assert len(set(dataset.drawn)) == len(dataset.drawn) == 2 * SAMPLES


@pytest.mark.parametrize("source", SOURCES)
def test_draws_follow_the_seed_and_not_the_caller_s_streams(source):
    losses = []
    for caller, seed in ((1, 5), (2, 5), (1, 6)):
        net = model()
        random.seed(caller)
        np.random.seed(caller)  # noqa: NPY002
        torch.manual_seed(caller)
        before = streams()
        losses.append(trained(Augmenting(SOURCES[source]), net=net, seed=seed))
        assert streams() == before
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("source", SOURCES)
def test_a_loss_draws_anew_at_each_step(source):
    drawn = []

    def noisy(net, batch):
        drawn.append(SOURCES[source]())
        return loss(net, batch) * (1 + 0.01 * drawn[-1])

    trained(data(), criterion=noisy)
    assert len(set(drawn)) == len(drawn) == 8


@pytest.mark.parametrize("source", SOURCES)
def test_a_resumed_run_draws_on(source):
    def trainer():
        net = model()
        return HeteroTrainer(
            net, sgd(net), Augmenting(SOURCES[source]), loss=loss, global_batch=16, seed=5,
            options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
        )  # fmt: skip

    whole = trainer()
    states, losses = [], []
    for report in whole.run(epochs=2):
        losses.append(report.loss)
        states.append(to_bytes(whole.state()))
    rest = trainer()
    rest.load_state(from_bytes(states[2]))
    assert [report.loss for report in rest.run(epochs=2)] == losses[3:]
