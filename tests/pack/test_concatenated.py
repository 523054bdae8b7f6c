"""The concatenated back-end equals solo training bit for bit, for any mix of trials."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import TOYS, Dropping, Toy, normal
from thrifty.core import DivergedError, TaskError
from thrifty.pack import SGD, AdamW, ConcatenatedBackend, epoch_order
from thrifty.space import Cosine, MultiStep
from thrifty.testing import FaultyTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


def check(task, trials, *, at_once=None):
    found = together(ConcatenatedBackend(task, device=here()), trials, at_once=at_once)
    assert_same(found, alone(task, trials))
    return found


@pytest.mark.parametrize("toy", TOYS)
def test_concatenated_models_train_as_alone(toy):
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=k % 2) for k in range(3)]
    check(toy(), trials)


class Mixed(Toy):
    """A task with a different model, optimizer and batch size in each trial."""

    batch_size = "size"  # type: ignore[assignment]

    def optimizer(self, hp):
        return SGD(lr="lr", momentum=0.9) if hp.kind == "sgd" else AdamW(lr="lr", clip_norm=0.5)

    def network(self, hp):
        layers = [layer for _ in range(hp.depth) for layer in (nn.Linear(6, 6), nn.Tanh())]
        return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(6, 1))


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_everything_may_differ(at_once):
    trials = [
        Trial(
            config={"lr": Cosine(0.05), "kind": kind, "depth": depth, "size": size},
            seed=depth,
            epochs=epochs,
        )
        for kind, depth, size, epochs in [
            ("sgd", 1, 8, 3),
            ("adamw", 1, 5, 1),
            ("adamw", 3, 8, 4),
            ("sgd", 2, 20, 2),
            ("sgd", 0, 1, 2),
        ]
    ]
    check(Mixed(), trials, at_once=at_once)


class Drawing(nn.Module):
    """A model that draws from the random stream of the given kind."""

    def __init__(self, kind):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.kind = kind

    def forward(self, x):
        if self.kind == "python":
            x = x * random.random()
        elif self.kind == "numpy":
            x = x + float(np.random.rand())  # noqa: NPY002 (as user code does)
        elif self.kind == "torch":
            x = x + torch.rand(())
        return self.inner(x)


class Draws(Toy):
    def network(self, hp):
        return Drawing(hp.kind)


@pytest.mark.parametrize("kinds", [("python", "numpy", "torch"), ("python",) * 3])
def test_models_that_draw_from_other_streams(kinds):
    trials = [
        Trial(config={"lr": 0.05, "kind": kind}, seed=k, epochs=3) for k, kind in enumerate(kinds)
    ]
    check(Draws(), trials)


class Rows(Dataset):
    """A dataset that counts how often each row is read and adds random noise to its rows."""

    def __init__(self, *, noise):
        self.num_read = [0] * 20
        self._noise = noise

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.num_read[index] += 1
        x = normal(6, seed=index)
        if self._noise == "torch":
            x = x + 0.1 * torch.rand(6)
        elif self._noise == "python":
            x = x + random.random()
        elif self._noise == "numpy":
            x = x + float(np.random.rand())  # noqa: NPY002
        return x, x.sum(0, keepdim=True)


class FromRows(Dropping):
    not_state = ("num_read",)

    def __init__(self, noise=None):
        self.train_rows, self.valid_rows = Rows(noise=noise), Rows(noise=None)

    def data(self, hp):
        return self.train_rows, self.valid_rows


@pytest.mark.parametrize("noise", ["torch", "python", "numpy"])
def test_data_that_draw_at_random(noise):
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=k) for k in range(3)]
    check(FromRows(noise), trials)


@pytest.mark.parametrize("noise", ["torch", "python", "numpy"])
def test_data_that_draw_at_random_for_trials_that_share_them(noise):
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=0) for k in range(3)]
    check(FromRows(noise), trials)


def num_train_reads(trials):
    task = FromRows()
    together(ConcatenatedBackend(task, device=here()), trials)
    return sorted(task.train_rows.num_read)


def test_trials_that_see_the_same_batches_read_them_once():
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=3, epochs=2) for k in range(4)]
    assert num_train_reads(trials) == [2] * 19 + [3], "one is read to see what reading changes"


def test_trials_of_other_seeds_read_batches_of_their_own():
    trials = [Trial(config={"lr": 0.05}, seed=seed, epochs=2) for seed in (1, 1, 2)]
    assert num_train_reads(trials) == [4] * 19 + [5]


def test_states_of_solo_and_concatenated_are_one():
    task = Dropping()
    half = [Trial(config={"lr": 0.05}, seed=k, epochs=2) for k in range(3)]
    states = [r.state for r in together(ConcatenatedBackend(task, device=here()), half)]
    rest = [
        Trial(config=t.config, seed=t.seed, start=2, epochs=4, state=state)
        for t, state in zip(half, states, strict=True)
    ]
    whole = alone(task, [Trial(config=t.config, seed=t.seed, epochs=4) for t in half])
    for found in (check(task, rest), alone(task, rest)):
        for one, other in zip(found, whole, strict=True):
            assert one.metrics == other.metrics[2:]


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_goes_wrong_is_the_affair_of_one_trial(fault):
    trials = [
        Trial(config={"lr": 0.05, "width": 4, "fault": each}, seed=k, epochs=4)
        for k, each in enumerate([MultiStep(["", fault], milestones=[2]), "", ""])
    ]
    found = check(FaultyTask(), trials)
    assert isinstance(found[0].error, DivergedError if fault == "nan" else RuntimeError)
    assert [len(result.metrics) for result in found] == [2, 4, 4]


def test_an_error_at_the_start_of_an_epoch_is_an_outcome():
    class Task(Toy):
        def adapt(self, model, hp):
            if hp.lr == 0.01:
                raise TaskError("the task's own error")

    rates = [MultiStep([0.1, 0.01], milestones=[1]), 0.1]
    found = check(Task(), [Trial(config={"lr": rate}) for rate in rates])
    assert isinstance(found[0].error, TaskError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_running_out_of_memory_is_raised(error):
    class Task(Toy):
        def loss(self, model, batch):
            raise error("no memory left")

    backend = ConcatenatedBackend(Task(), device=here())
    with pytest.raises(error, match="no memory"):
        together(backend, [Trial(config={"lr": 0.1})])


class Breaking(Rows):
    """A dataset with one row that cannot be read."""

    def __getitem__(self, index):
        if index == BROKEN:
            raise ValueError("this row is broken")
        return super().__getitem__(index)


BROKEN = int(epoch_order(20, seed=0, epoch=0)[-1])
"""Last row of the first epoch."""


def test_batches_that_cannot_be_read_end_no_epoch_early():
    """All trials that share an unreadable batch fail; no trial's epoch silently ends early."""

    task = FromRows()
    task.train_rows = Breaking(noise=None)
    found = together(
        ConcatenatedBackend(task, device=here()), [Trial(config={"lr": 0.1}) for _ in range(2)]
    )
    assert [str(result.error) for result in found] == ["this row is broken"] * 2
    assert not any(result.metrics for result in found)
