from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import check, normal
from tests.pairs import pairwise


pytestmark = pytest.mark.usefixtures("device")


@pairwise(
    axis=range(4),
    num_normalized=[1, 2],
    options=[{}, {"bias": False}, {"elementwise_affine": False}],
)
def test_layer_norm(axis, num_normalized, options):
    shape = (4, 3, 5)
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, axis=axis)],
        make=lambda: nn.LayerNorm(shape[-num_normalized:], **options),
    )


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_the_same_input_for_all(shape):
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, shared=True)],
        make=lambda: nn.LayerNorm(5),
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_rms_norm(shared, affine):
    check(
        lambda m, x: m(x),
        lambda s: [normal(4, 5, seed=s, shared=shared)],
        make=lambda: nn.RMSNorm(5, elementwise_affine=affine),
    )


def test_weights_that_all_share():
    w, b = torch.rand(2, 5, dtype=torch.float64, device=here())
    check(lambda m, x: F.layer_norm(x, (5,), w, b), lambda s: [normal(4, 5, seed=s)])


def test_only_a_shift():
    check(
        lambda m, x, b: F.layer_norm(x, (5,), None, b),
        lambda s: [normal(4, 5, seed=s), normal(5, seed=s + 5)],
    )
