"""Batches are what a data loader makes of the same indices."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from thrifty.hetero._samples import PublicAndPrivate, Samples


class Plain(Dataset):
    """Dicts, one by one."""

    def __init__(self, num=6, first=0):
        self.first, self.num = first, num
        self.read = []

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": torch.full((2,), float(self.first + index)), "y": self.first + index}


class AtOnce(Plain):
    """Reads many at once, as some data sets do."""

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
        """No plain ``TensorDataset``: what it adds counts."""

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
