"""Batches of arbitrary objects, each seen by all trials of a group at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from thrifty.core import derive_seed
from thrifty.pack import SGD, BlockOptions, FusedBackend, Member, Task, UnfusableError, times


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


CONFIG = {"lr": 0.05}


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points, all but two of which have a label. Their number differs from batch to batch."""

    points: torch.Tensor
    labels: torch.Tensor

    def double(self):
        return Cloud(self.points.double(), self.labels)


class Clouds:
    arrays = None
    num_train = 12

    def source(self, device):
        return self

    def train_batches(self, *, seed, epoch, batch_size):
        for step in range(self.num_train // batch_size):
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch, step) % 2**63)
            yield cloud(int(torch.randint(5, 9, (), generator=generator)), generator)

    def valid_batches(self, *, batch_size):
        for num in (5, 3):
            yield cloud(num, torch.Generator().manual_seed(num)), num


def cloud(num, generator):
    return Cloud(
        torch.randn(num, 3, generator=generator, dtype=torch.float64).to(here()),
        torch.randint(2, (num - 2,), generator=generator).to(here()),
    )


class Labels(Task):
    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 3

    def data(self, hp):
        return Clouds()

    def model(self, hp):
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2)).double()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch.points)[: len(batch.labels)], batch.labels)

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}


class Grouped(Labels):
    """A task whose matrices and vectors alternate and have separate optimizer options."""

    optimizer = SGD(
        lr="lr", momentum=0.9, groups={"*.bias": {"lr": times("lr", 2), "momentum": 0.5}}
    )


class Normed(Labels):
    """A task whose running statistics change at each step."""

    def model(self, hp):
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()


def fused(task, size=4):
    return FusedBackend(task, device=here(), block=BlockOptions(size=size))


def refused(task, message):
    with pytest.raises(UnfusableError, match=message):
        fused(task).put(0, Member(values=CONFIG, seed=0))


@pytest.mark.parametrize(
    "task", [Labels(), Normed(), Grouped()], ids=["dropout", "buffers", "groups"]
)
@pytest.mark.parametrize("seeds", [(1, 1, 1), (1, 2, 1, 2, 1)], ids=["together", "mixed"])
def test_fused_trials_get_what_they_get_alone(task, seeds):
    some = [
        Trial(config={"lr": 0.02 * (k + 1)}, seed=seed, epochs=5) for k, seed in enumerate(seeds)
    ]
    assert_same(together(fused(task), some), alone(task, some), tolerance=1e-10)


def test_trials_at_other_epochs_stand_in_one_block():
    some = [Trial(config=CONFIG, seed=1, epochs=n) for n in (1, 4, 2, 3)]
    found = together(fused(Labels()), some, at_once=2)
    assert_same(found, alone(Labels(), some), tolerance=1e-10)


def test_control_flow_may_follow_the_batch():
    class Task(Labels):
        def loss(self, model, batch):
            return super().loss(model, batch) * (2 if len(batch.points) % 2 else 1)

    some = [Trial(config=CONFIG, seed=k, epochs=3) for k in range(2)]
    assert_same(together(fused(Task()), some), alone(Task(), some), tolerance=1e-10)


def test_random_numbers_that_are_nobodys_own():
    class Task(Labels):
        def loss(self, model, batch):
            noise = torch.rand_like(batch.points)
            return F.cross_entropy(model(batch.points + noise)[: len(batch.labels)], batch.labels)

    refused(Task(), "random numbers that are not each trial's own")


def test_a_rule_that_is_wrong_is_found_out():
    class Wrong(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            # The result depends on whether the input is packed, which no rule may do.
            return out if type(out) is torch.Tensor else out * 2

    class Task(Labels):
        def model(self, hp):
            return Wrong(3, 2).double()

    refused(Task(), "loss differs")


def test_metrics_that_cannot_be_fused_are_worked_out_one_by_one():
    class Task(Labels):
        def metrics(self, model, batch):
            return {"loss": self.loss(model, batch).item()}

    some = [Trial(config=CONFIG, seed=k, epochs=2) for k in range(2)]
    assert_same(together(fused(Task()), some), alone(Task(), some), tolerance=1e-10)


def test_a_batch_size_of_ones_own_is_a_block_of_ones_own():
    class Task(Labels):
        batch_size = "size"

    some = [Trial(config={**CONFIG, "size": size}, seed=1, epochs=2) for size in (3, 4)]
    backend = fused(Task())
    for slot, trial in enumerate(some):
        backend.put(slot, trial.member)
    assert len(backend.blocks.by_key) == 2
    assert_same(together(fused(Task()), some), alone(Task(), some), tolerance=1e-10)


def test_the_dry_run_asks_for_a_small_batch():
    asked = []

    class Noted(Clouds):
        def train_batches(self, *, seed, epoch, batch_size):
            asked.append(batch_size)
            return super().train_batches(seed=seed, epoch=epoch, batch_size=batch_size)

    class Large(Labels):
        batch_size = 12
        not_state = ("asked",)

        def data(self, hp):
            return Noted()

    backend = FusedBackend(Large(), device=here(), block=BlockOptions(size=2))
    together(backend, [Trial(config=CONFIG, seed=k) for k in range(2)])
    assert asked[:2] == [1, 5], "a row shows what reading changes, the dry run takes five"
    assert set(asked[2:]) == {12}
