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
    shape=[(3, 6), (3, 6, 5), (2, 6, 4, 3)],
    num_groups=[1, 2, 6],
    affine=[False, True],
    where=[0, 1, 2, "shared"],
)
def test_group_norm(shape, num_groups, affine, where):
    options = {"shared": True} if where == "shared" else {"axis": where}
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, **options)],
        make=lambda: nn.GroupNorm(num_groups, 6, affine=affine),
    )


def test_weights_that_all_share():
    w, b = torch.rand(2, 6, dtype=torch.float64, device=here())
    for axis in (0, 1):
        check(
            lambda m, x: F.group_norm(x, 2, w, b),
            lambda s, axis=axis: [normal(4, 6, 5, seed=s, axis=axis)],
        )


def test_after_a_convolution():
    check(
        lambda m, x: m(x),
        lambda s: [normal(2, 3, 6, 6, seed=s)],
        make=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)),
    )
