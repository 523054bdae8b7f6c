"""Bitwise equality."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from thrifty.pack.verify import same


NAN = float("nan")


class Incomparable:
    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.0),
        (NAN, NAN),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
        (torch.tensor([1, 2]), torch.tensor([1, 2])),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        ({"a": [1, torch.ones(1)]}, OrderedDict(a=[1, torch.ones(1)])),
        ((1, (2,)), (1, (2,))),
    ],
)
def test_equal_values_are_the_same(one, other):
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (NAN, 0.0),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(1), torch.nextafter(torch.ones(1), torch.zeros(1))),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (np.ones(2), np.ones((2, 1))),
        ([1, 2], (1, 2)),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        (Incomparable(), Incomparable()),
    ],
)
def test_different_values_are_not_the_same(one, other):
    assert not same(one, other)


def test_an_object_is_itself_however_it_compares():
    one = Incomparable()
    assert same(one, one)
