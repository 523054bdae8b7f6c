"""Batches are those that a data loader makes from the same indices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from thrifty.core import HeteroError
from thrifty.hetero import HeteroOptions, HeteroTrainer, StepCurve
from thrifty.hetero._samples import PublicAndPrivate, Samples

from .jobs import FEATURES, distance, model, plain_with, sgd


class Plain(Dataset):
    """A data set of dicts, read one by one."""

    def __init__(self, num=6, first=0):
        self.first, self.num = first, num
        self.read = []

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": torch.full((2,), float(self.first + index)), "y": self.first + index}


class AtOnce(Plain):
    """A data set that reads many samples at once."""

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    def __getitems__(self, indices):
        return [super(AtOnce, self).__getitem__(index) for index in indices]


def tensors(first=0):
    x = torch.arange(12.0).reshape(6, 2) + first
    return TensorDataset(x, torch.arange(6) + first)


def values(batch):
    return batch["y"].tolist() if isinstance(batch, dict) else batch[1].tolist()


@pytest.mark.parametrize(
    "dataset",
    [Plain(), AtOnce(), tensors(), Subset(Plain(9), [8, 7, 6, 2, 1, 0])],
    ids=["plain", "at once", "tensors", "subset"],
)
def test_batches_are_those_of_a_loader(dataset):
    samples = Samples(dataset, None)
    (expected,) = DataLoader(dataset, batch_sampler=[[4, 0, 3]])
    batch = samples.batch((4, 0, 3))
    assert len(samples) == 6
    if isinstance(batch, dict):
        assert batch.keys() == expected.keys()
        batch, expected = batch.values(), expected.values()
    for mine, its in zip(batch, expected, strict=True):
        assert torch.equal(mine, its)
        assert mine.dtype == its.dtype


def test_tensors_are_indexed_at_once():
    class Counted(TensorDataset):
        """A ``TensorDataset`` subclass whose own ``__getitem__`` must be used."""

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, y + 100

    assert values(Samples(Counted(*tensors().tensors), None).batch((1, 2))) == [101, 102]
    assert isinstance(Samples(tensors(), None).batch((1, 2)), tuple)


def test_what_collates_is_given_samples():
    def collate(samples):
        return [int(y) for _, y in samples]

    assert Samples(tensors(), collate).batch((5, 1)) == [5, 1]
    both = PublicAndPrivate(tensors(), tensors(50), collate)
    assert both.batch((0, 1), (2,)) == [52, 0, 1]
    assert both.batch((), (2,)) == [52]
    assert both.batch((3,), ()) == [3]


@pytest.mark.parametrize(
    ("public", "private"),
    [
        (Plain(), Plain(first=50)),
        (tensors(), tensors(50)),
        (AtOnce(), Plain(first=50)),
        (Plain(), AtOnce(first=50)),
    ],
)
def test_private_and_public_samples_make_one_batch(public, private):
    both = PublicAndPrivate(public, private, None)
    assert (both.num_public, both.num_private) == (6, 6)
    assert values(both.batch((1, 0), (5, 2))) == [55, 52, 1, 0]
    assert values(both.batch((), (5, 2))) == [55, 52]
    assert values(both.batch((1, 0), ())) == [1, 0]


def test_only_what_was_asked_for_is_read():
    public, private = Plain(), Plain(first=50)
    PublicAndPrivate(public, private, None).batch((1, 0), (5,))
    assert (public.read, private.read) == ([1, 0], [5])


def test_without_private_data_there_is_none():
    both = PublicAndPrivate(Plain(), None, None)
    assert both.num_private == 0
    assert values(both.batch((2,), ())) == [2]


# --- changing a batch does not change the data set


class Objects(Dataset):
    """A data set that holds its samples in several kinds of containers."""

    def __init__(self, num=6):
        self.rows = torch.arange(2.0 * num).reshape(num, 2)
        self.arrays = [np.full(2, float(n)) for n in range(num)]
        self.lists = [[float(n)] for n in range(num)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        # The row is a view of one large tensor.
        return {
            "row": self.rows[index],
            "array": self.arrays[index],
            "own": Held(self.lists[index]),
        }


class Held:
    """An object that collate functions do not look into."""

    def __init__(self, values):
        self.values = values


def as_they_are(samples):
    return samples


def joined(samples):
    """Collate to one new tensor and two that belong to the data set."""
    return (
        torch.stack([s["row"] for s in samples]),
        samples[0]["row"],
        torch.from_numpy(samples[0]["array"]),
    )


@pytest.mark.parametrize("private", [(), (5,)])
def test_a_batch_may_be_changed(private):
    dataset = Objects()
    both = PublicAndPrivate(dataset, dataset, as_they_are)
    for sample in both.batch((2, 3), private):
        sample["row"].zero_()
        sample["array"][:] = 0
        sample["own"].values.clear()
    fresh = Objects()
    assert torch.equal(dataset.rows, fresh.rows)
    assert np.array_equal(dataset.arrays, fresh.arrays)
    assert dataset.lists == fresh.lists


def test_what_a_batch_shares_with_samples_in_part_may_be_changed():
    dataset = Objects()
    for tensor in Samples(dataset, joined).batch((2, 3)):
        tensor.fill_(-1)
    assert torch.equal(dataset.rows, Objects().rows)
    assert np.array_equal(dataset.arrays, Objects().arrays)


def test_what_is_new_in_a_batch_is_not_copied():
    made = []

    def collate(samples):
        made.append(torch.stack([s["row"] for s in samples]))
        return made[-1]

    assert Samples(Objects(), collate).batch((1, 2)) is made[0]


class Rows(Dataset):
    """A data set of rows, collated to lists so that a forward pass may change them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(32, FEATURES, generator=generator, dtype=torch.double)
        self.y = torch.randint(0, 3, (32,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def changing(net, batch):
    """Return the loss after centring the samples in place."""
    out = [net(x.sub_(x.mean())) for x, _ in batch]
    return torch.nn.functional.cross_entropy(torch.stack(out), torch.stack([y for _, y in batch]))


def unchanging(net, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(net(x - x.mean(1, keepdim=True)), y)


def test_a_loss_that_changes_samples_in_place_trains_on_those_of_the_data_set():
    dataset, net = Rows(), model()
    before = dataset.x.clone()
    expected, _ = plain_with(unchanging, TensorDataset(before, dataset.y), epochs=3)
    trainer = HeteroTrainer(
        net, sgd(net), dataset, loss=changing, collate=as_they_are, global_batch=16, seed=5,
        options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
    )  # fmt: skip
    assert len(list(trainer.run(epochs=3))) == 6
    assert torch.equal(dataset.x, before)
    assert distance(net, expected) < 1e-12


# --- data sets that reuse one object


class Refilled(Objects):
    """A data set that refills one array for each sample."""

    def __init__(self, kind=torch.zeros):
        super().__init__(32)
        self.out = kind(2)

    def __getitem__(self, index):
        self.out[:] = index
        return self.out, 1


class RefilledAtOnce(Refilled):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Shared(Objects):
    """A data set that returns one object for several samples and never changes it."""

    def __init__(self):
        super().__init__(32)
        self.out = torch.ones(2)

    def __getitem__(self, index):
        return self.out, np.zeros(2), 1


class SharedAtOnce(Shared):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "dataset",
    [Refilled(), Refilled(np.zeros), RefilledAtOnce(), RefilledAtOnce(np.zeros)],
    ids=["tensor", "array", "tensor at once", "array at once"],
)
def test_a_data_set_that_uses_one_object_again_is_refused(dataset):
    net = torch.nn.Linear(2, 1)
    trainer = HeteroTrainer(
        net, sgd(net), dataset, loss=lambda net, batch: net(batch[0].float()).mean(),
        global_batch=16, options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
    )  # fmt: skip
    with pytest.raises(HeteroError, match=r"reading another sample changes sample \d+.*clone"):
        next(trainer.run(epochs=1))


@pytest.mark.parametrize("dataset", [Shared(), SharedAtOnce(), AtOnce(), Plain(), tensors()])
def test_samples_may_share_what_does_not_change(dataset):
    assert Samples(dataset, None).take((3, 1, 2), watched=True).reused is None


def test_private_samples_are_watched_too():
    both = PublicAndPrivate(Plain(32), Refilled(), as_they_are)
    assert both.take((0, 1), (4, 5), watched=True).reused == 4
    assert both.take((0, 1), (), watched=True).reused is None
