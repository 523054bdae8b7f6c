"""Measuring a worker's speed has no side effects."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.core import HeteroError
from thrifty.hetero import measure_curve
from thrifty.hetero._samples import PublicAndPrivate
from thrifty.hetero.training._learner import Learner, Objective
from thrifty.testing import VirtualClock

from .jobs import data, loss, model


pytestmark = pytest.mark.slow


class Device:
    """A device whose steps take ``fixed + each * size`` seconds and that holds ``room`` samples."""

    def __init__(self, fixed=0.1, each=0.01, room=None):
        self.clock = VirtualClock()
        self.fixed, self.each, self.room = fixed, each, room
        self.sizes = []

    def step(self, size):
        if self.room is not None and size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(size)
        self.clock.advance(self.fixed + self.each * size)

    def measured(self, **options):
        return measure_curve(self.step, clock=self.clock, **{"max_samples": 64, **options})


@given(st.floats(0.0, 0.5), st.floats(1e-4, 0.02), st.integers(2, 200))
def test_a_line_is_found_again(fixed, each, max_samples):
    device = Device(fixed, each)
    curve = device.measured(max_samples=max_samples, budget_s=1e9)
    assert curve.fixed_s == pytest.approx(fixed, abs=1e-6)
    assert curve.sample_s == pytest.approx(each, rel=1e-6, abs=1e-8)
    assert (curve.max_samples, curve.min_samples) == (None, 0)
    assert max(device.sizes) == max_samples


def test_sizes_double_up_to_the_most_that_is_worth_trying():
    device = Device()
    device.measured(max_samples=20)
    assert sorted(set(device.sizes)) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("slow", [(1,), (3,), (1, 3)])
def test_a_slow_first_step_and_another_one_are_no_matter(slow):
    device = Device()

    def step(size):
        device.step(size)
        if device.sizes.count(size) in slow:
            device.clock.advance(0.5)

    curve = measure_curve(step, max_samples=16, clock=device.clock)
    assert (curve.fixed_s, curve.sample_s) == pytest.approx((0.1, 0.01))


@given(st.integers(8, 2000))
def test_measuring_keeps_to_its_budget(budget_s):
    device = Device(fixed=0.0, each=1.0)
    device.measured(max_samples=2**20, budget_s=budget_s)
    assert device.clock.monotonic() <= budget_s
    # Four steps of the next size would have exceeded the budget.
    assert device.clock.monotonic() + 4 * 2 * max(device.sizes) > budget_s


def test_at_least_one_size_is_measured():
    device = Device(fixed=0.0, each=100.0)
    assert device.measured(budget_s=1.0).sample_s == pytest.approx(100.0)
    assert set(device.sizes) == {1}


def test_it_begins_with_what_a_worker_has_to_be_given():
    device = Device()
    curve = device.measured(min_samples=4)
    assert min(device.sizes) == 4
    assert curve.min_samples == 4


def test_it_ends_where_memory_ends():
    device = Device(room=11)
    curve = device.measured()
    assert curve.max_samples == 8
    assert curve.sample_s == pytest.approx(0.01)


def test_one_sample_has_to_fit():
    with pytest.raises(HeteroError, match="does not fit into this worker's memory"):
        Device(room=0).measured()


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def step(size):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        measure_curve(step, max_samples=8, clock=VirtualClock())


class Restless(nn.Module):
    """A model that draws, counts and keeps statistics; one buffer is not part of its state."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = model(norm=True), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.hidden += 1
        np.random.rand()  # noqa: NPY002 -- as some user code does
        random.random()
        return self.drop(self.net(x))


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.8, 0.9)),
    "tensor lr": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1)),
}


def learner_of(net, optimizer, dataset=None, lossy=loss, sum_=lambda tensor: None):
    samples = PublicAndPrivate(dataset or data(), None, None)
    objective = Objective(loss=lossy)
    return Learner(net, optimizer, samples, objective=objective, sum_=sum_)


def everything(net, optimizer):
    return copy.deepcopy((
        dict(net.named_parameters()),
        dict(net.named_buffers()),
        optimizer.state_dict(),
        [
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002
        ],
    ))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_measuring_leaves_everything_as_it_was(make, trained):
    net = Restless()
    optimizer = make(net)
    learner = learner_of(net, optimizer)
    if trained:
        loss(net, data()[:16]).backward()
        optimizer.step()
    before = everything(net, optimizer)
    clock = VirtualClock()
    learner.measure(max_samples=16, clock=clock)
    after = everything(net, optimizer)
    assert all(map(same, before, after))
    # Training continues as if nothing had been measured.
    loss(net, data()[:16]).backward()
    optimizer.step()
    assert not same(everything(net, optimizer)[0], before[0])


def test_measuring_leaves_the_loss_as_it_was():
    """Measuring restores a loss that counts its calls or tracks its inputs."""
    calls, centre = 0, nn.BatchNorm1d(3).double()

    def counting(net, batch):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(centre(net(batch[0])), batch[1])

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    learner_of(net, optimizer, lossy=counting).rehearse(2)
    assert calls == 0
    assert int(centre.num_batches_tracked) == 0


def test_whole_steps_are_measured():
    """A measured step includes forward pass, backward pass and optimizer."""
    clock = VirtualClock()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plain_step = optimizer.step

    def step():
        clock.advance(0.25)
        assert all(p.grad.any() for p in net.parameters())
        return plain_step()

    def slow_loss(net, batch):
        clock.advance(0.5 * len(batch[0]))
        return loss(net, batch)

    optimizer.step = step
    curve = learner_of(net, optimizer, lossy=slow_loss).measure(max_samples=8, clock=clock)
    assert (curve.fixed_s, curve.sample_s) == pytest.approx((0.25, 0.5))


def test_a_rehearsal_has_no_more_samples_than_there_are():
    seen = []

    def counting(net, batch):
        seen.append(len(batch[0]))
        return loss(net, batch)

    net = model()
    few = TensorDataset(*data()[:3])
    learner = learner_of(net, torch.optim.SGD(net.parameters(), lr=0.1), few, counting)
    learner.rehearse(2)
    learner.rehearse(10)
    assert seen == [2, 3]


class Demanding(Device):
    """A device on which steps of fewer than ``least`` samples raise an error."""

    def __init__(self, least):
        super().__init__()
        self.least = least
        self.refused = []

    def step(self, size):
        if size < self.least:
            self.refused.append(size)
            raise ValueError(f"{size} are too few")
        super().step(size)


def test_measuring_begins_with_the_smallest_size_that_trains():
    device = Demanding(least=3)
    curve = device.measured(max_samples=16)
    assert (device.refused, sorted(set(device.sizes))) == ([1, 2], [3, 6, 12, 16])
    assert curve.min_samples == 3
    assert (curve.fixed_s, curve.sample_s) == pytest.approx((0.1, 0.01))


def test_an_error_of_a_larger_size_is_raised_as_it_is():
    class Failing(Demanding):
        def step(self, size):
            if size > 6:
                raise IndexError("bad sample")
            super().step(size)

    with pytest.raises(IndexError, match="bad sample"):
        Failing(least=3).measured(max_samples=16)


@pytest.mark.parametrize("max_samples", [2, 64])
def test_the_error_of_the_first_size_is_raised_if_no_small_size_trains(max_samples):
    with pytest.raises(ValueError, match="1 are too few"):
        Demanding(least=10).measured(max_samples=max_samples)


def test_batch_normalisation_over_each_share_is_measured_with_several_samples():
    net = model()
    net.insert(1, nn.BatchNorm1d(8).double())
    learner = learner_of(net, torch.optim.SGD(net.parameters(), lr=0.1), sum_=None)
    assert learner.measure(max_samples=8, clock=VirtualClock()).min_samples == 2
