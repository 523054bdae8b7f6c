"""Each trial has its own copy of the task, so that nothing leaks from one trial to another."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy
from thrifty.pack import ConcatenatedBackend, FusedBackend, SoloBackend
from thrifty.pack.task._task import LARGE_BYTES, own_task


class Thing:
    pass


def holding(value):
    task = Thing()
    task.value = value
    return task


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        (torch.ones(2), lambda v: v.add_(1)),
        (np.ones(2), lambda v: v.__setitem__(0, 2)),
        (torch.nn.Linear(1, 1), lambda v: v.weight.data.add_(1)),
        (holding(1), lambda v: setattr(v, "value", 2)),
    ],
    ids=lambda value: "",
)
def test_attributes_are_copied(value, change):
    task = holding(value)
    before = own_task(task)
    change(own_task(task).value)
    again = own_task(task)
    assert type(task) is type(again) is Thing
    assert repr(_plain(again.value)) == repr(_plain(before.value))


def _plain(value):
    if isinstance(value, torch.nn.Module):
        return dict(value.state_dict())
    return value.value if isinstance(value, Thing) else value


def test_attributes_that_belong_together_stay_together():
    task = Thing()
    task.one = []
    task.other, task.itself = task.one, task
    own = own_task(task)
    assert own.one is own.other
    assert own.one is not task.one
    assert own.itself is own


@pytest.mark.parametrize(
    "value",
    [
        TensorDataset(torch.ones(1)),
        torch.empty(LARGE_BYTES // 4),
        np.empty(LARGE_BYTES, dtype=np.uint8),
        [torch.empty(LARGE_BYTES // 4)],
        {"train": TensorDataset(torch.ones(1))},
        threading.Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_and_what_cannot_be_copied_are_shared(value):
    task = holding(value)
    assert own_task(task).value is value


class Noting(Toy):
    """A task whose ``adapt`` stores values in a list and in an object, for its loss to use."""

    def __init__(self):
        self.factors, self.settings = [1.0], Thing()
        self.settings.power = 1.0

    def adapt(self, model, hp):
        self.factors[0] = hp.factor
        self.settings.power = hp.power

    def loss(self, model, batch):
        return super().loss(model, batch) ** self.settings.power / self.factors[0]


@pytest.mark.parametrize("backend", [SoloBackend, ConcatenatedBackend, FusedBackend])
def test_trials_do_not_see_what_others_note_down(backend):
    trials = [
        Trial(config={"lr": 0.05, "factor": 1.0 + k, "power": 1.0 + k / 2}, epochs=2)
        for k in range(3)
    ]
    task = Noting()
    at_once = 1 if backend is SoloBackend else 3
    wanted = alone(Noting(), trials)
    found = together(backend(task), trials, at_once=at_once)
    assert_same(found, wanted, tolerance=1e-5 if backend is FusedBackend else 0.0)
    assert task.factors == [1.0]
    assert len({result.metrics[-1]["mse"] for result in found}) == 3
