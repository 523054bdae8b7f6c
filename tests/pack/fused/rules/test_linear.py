from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import check, normal


pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 1, 3, 5)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_fused(shape, shared, bias):
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, shared=shared)],
        make=lambda: nn.Linear(5, 7, bias=bias),
    )


@pytest.mark.parametrize("axis", range(3))
def test_wherever_the_trials_are_counted(axis):
    check(
        lambda m, x: m(x),
        lambda s: [normal(4, 6, 5, seed=s, axis=axis)],
        make=lambda: nn.Linear(5, 7),
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_trials(size):
    check(
        lambda m, x: m(x),
        lambda s: [normal(4, 5, seed=s, size=size)],
        make=lambda: nn.Linear(5, 2),
        size=size,
    )


def test_weights_that_all_share():
    weight = torch.randn(7, 5, dtype=torch.float64, device=here())
    check(lambda m, x: F.linear(x, weight), lambda s: [normal(4, 5, seed=s)])


def test_a_batch_of_nothing():
    check(lambda m, x: m(x), lambda s: [normal(0, 5, seed=s)], make=lambda: nn.Linear(5, 2))
