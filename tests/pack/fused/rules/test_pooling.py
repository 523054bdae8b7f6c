from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.pack.fused.twin import check, normal
from tests.pairs import pairwise


pytestmark = pytest.mark.usefixtures("device")


SHAPES = {1: (2, 3, 8), 2: (2, 3, 8, 6), 3: (2, 2, 4, 6, 4)}


@pairwise(
    num_spatial=[1, 2, 3],
    kind=["max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"],
    axis=[0, 1],
    batched=[False, True],
)
def test_pooling_is_fused(num_spatial, kind, axis, batched):
    function = getattr(F, f"{kind}{num_spatial}d")
    shape = SHAPES[num_spatial] if batched else SHAPES[num_spatial][1:]
    args = (2.0, 2) if kind == "lp_pool" else (2,)
    check(lambda m, x: function(x.abs(), *args), lambda s: [normal(*shape, seed=s, axis=axis)])


@pytest.mark.parametrize("function", [F.max_pool2d, F.adaptive_max_pool2d])
def test_pooling_with_indices_is_fused(function):
    check(
        lambda m, x: function(x, 2, return_indices=True),
        lambda s: [normal(2, 3, 6, 6, seed=s, axis=1)],
    )


def test_options_of_pooling_are_followed():
    check(
        lambda m, x: (
            F.max_pool2d(x, 3, 2, 1, ceil_mode=True)
            + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        ),
        lambda s: [normal(2, 3, 7, 7, seed=s, axis=1)],
    )
