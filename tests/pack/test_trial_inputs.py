"""The inputs of a trial are those of the trial itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import thrifty as th
from thrifty.core import TaskError
from thrifty.pack import Member, TrialInputs
from thrifty.pack._backend import EpochPlan
from thrifty.pack.trial._trial import TaskTrial


CPU = torch.device("cpu")
SIZES = (4, 8)


class Noisy(torch.utils.data.Dataset):
    """Rows that draw from the global stream when they are read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 16)[index : index + 1]
        return x + 0.1 * torch.randn(1), 2 * x


class Both(th.Task):
    optimizer = th.SGD(lr=0.1)
    batch_size = "size"
    eval_batch_size = 5

    def model(self, hp):
        return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, model, batch):
        x, y = batch
        return functional.mse_loss(model(x + torch.randn_like(x)), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"mse": functional.mse_loss(model(x + torch.randn_like(x)), y)}


class FromDatasets(Both):
    def data(self, hp):
        return th.DatasetPair(train=Noisy(), valid=Noisy())


class FromArrays(Both):
    def data(self, hp):
        x = torch.randn(16, 1)  # seeded before data() is called
        return th.ArrayData(train=(x, 2 * x), valid=(x, 2 * x))


class Counting(torch.utils.data.IterableDataset):
    """A stream whose place is a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            x = torch.tensor([self.at / 40])
            yield x, 2 * x

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class FromAStream(FromArrays):
    batch_size, steps_per_epoch = 4, 2  # type: ignore[assignment]

    def data(self, hp):
        x = torch.ones(1, 1)
        return th.StreamData(train=Counting(), valid=[(x, 2 * x)])


@pytest.mark.parametrize("task", [FromDatasets(), FromArrays()])
def test_a_plain_loop_with_the_inputs_of_a_trial_gives_its_bits(task):
    first = {"size": SIZES[0]}
    trial = TaskTrial(task, CPU)
    trial.begin(Member(values=first, seed=3, moving=frozenset({"size"})))
    plans = [EpochPlan(epoch=epoch, values={"size": size}) for epoch, size in enumerate(SIZES)]
    wanted = [dict(trial.epoch(plan)) for plan in plans]

    inputs = TrialInputs(task, first, seed=3)
    model = inputs.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, size in enumerate(SIZES):
        model.train()
        losses = []
        for batch in inputs.batches(epoch, values={"size": size}):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            found = [
                (float(task.metrics(model, batch)["mse"]), num)
                for batch, num in inputs.valid_batches(epoch)
            ]
        assert torch.stack(losses).mean().item() == wanted[epoch]["train_loss"]
        assert [num for _, num in found] == [5, 5, 5, 1]
        mean = sum(value * num for value, num in found) / 16
        assert mean == pytest.approx(wanted[epoch]["mse"], rel=1e-12)
    trained = trial.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "task", [type("Steps", (FromArrays,), {"batch_size": 6, "steps_per_epoch": 2})(), FromAStream()]
)
def test_epochs_of_a_number_of_steps_go_on_in_the_data(task):
    trial = TaskTrial(task, CPU)
    trial.begin(Member(values={"lr": 0.1}, seed=3))
    inputs = TrialInputs(task, {}, seed=3)
    for epoch in range(3):
        trial.start(EpochPlan(epoch=epoch, values={"lr": 0.1}))
        wanted = list(iter(trial.next_batch, None))
        found = list(inputs.batches(epoch))
        assert len(found) == len(wanted) == 2
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found, wanted, strict=True))


def test_a_batch_size_without_a_value_is_an_error():
    with pytest.raises(TaskError, match="batch_size follows hyper-parameter 'size'"):
        list(TrialInputs(FromArrays(), {}, seed=0).batches(0))
