"""Schedules agree with plainly written definitions and with torch's schedulers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.optim import lr_scheduler as theirs

from tests import naive
from tests.strategies import EPOCHS, LEAVES
from thrifty.space import Cosine, CosineRestarts, Exponential, Linear, Polynomial, Step, Warmup


pytestmark = pytest.mark.slow


def torch_values(make, *, epochs, lr=0.1):
    """Return the learning rate in each epoch under a scheduler that is stepped once an epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, values = make(optimizer), []
    for _ in range(epochs):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (Step(0.1, [3, 7]), lambda o: theirs.MultiStepLR(o, [3, 7])),
        (Step(0.1, every=4, gamma=0.3), lambda o: theirs.StepLR(o, 4, gamma=0.3)),
        (Cosine(0.1, floor=0.01), lambda o: theirs.CosineAnnealingLR(o, 10, eta_min=0.01)),
        (
            CosineRestarts(0.1, period=2, growth=2.0),
            lambda o: theirs.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
        ),
        (
            Linear(0.1, floor=0.02, epochs=6),
            lambda o: theirs.LinearLR(o, 1.0, end_factor=0.2, total_iters=6),
        ),
        (
            Warmup(4, 0.1, start=0.25),
            lambda o: theirs.LinearLR(o, start_factor=0.25, total_iters=4),
        ),
        (Exponential(0.1, gamma=0.9), lambda o: theirs.ExponentialLR(o, gamma=0.9)),
        (Exponential(0.1, gamma=0.9, sample="epoch"), lambda o: theirs.ExponentialLR(o, gamma=0.9)),
        (
            Polynomial(0.1, power=3.0, epochs=8),
            lambda o: theirs.PolynomialLR(o, total_iters=8, power=3.0),
        ),
    ],
    ids=lambda value: "theirs" if callable(value) else repr(value),
)
def test_equals_torch(ours, make):
    expected = torch_values(make, epochs=10)
    assert ours.values(0, 10, epochs=10) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sequential_equals_torch():
    def make(optimizer):
        parts = [theirs.ConstantLR(optimizer, 1.0), theirs.ExponentialLR(optimizer, 0.5)]
        return theirs.SequentialLR(optimizer, parts, milestones=[4])

    ours = Linear(0.1, floor=0.1).then(Exponential(0.1, gamma=0.5), at=4)
    expected = torch_values(make, epochs=10)
    assert ours.values(0, 10, epochs=10) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", LEAVES)
def test_each_kind_equals_the_plain_definition(kind):
    @settings(max_examples=30, deadline=None)
    @given(LEAVES[kind])
    def check(schedule):
        times = np.arange(0, EPOCHS, 1 / 8)
        expected = [naive.value_at(schedule, time, EPOCHS) for time in times.tolist()]
        ours = schedule.values(0, EPOCHS, epochs=EPOCHS, steps_per_epoch=8)
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)

    check()
