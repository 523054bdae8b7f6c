"""Numbers that are not finite agree only with their like, and hide no other difference."""

from __future__ import annotations

import math

import pytest
import torch

from thrifty.pack.fused._activations import _agree
from thrifty.pack.fused._step import close


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("agree", [_agree, lambda a, b: close(a, b, 1e-6)], ids=["kept", "step"])
@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([NAN, 2.0], [NAN, 2.0], True),
        ([NAN, 2.0], [1.0, 2.0], False),
        ([NAN, 2.0], [NAN, 2.1], False),
        ([INF, 2.0], [INF, 2.0], True),
        ([INF, 2.0], [INF, 2.1], False),
        ([INF, 2.0], [-INF, 2.0], False),
        ([-INF, -INF], [-INF, -INF], True),
        ([], [], True),
    ],
)
def test_agreement(agree, one, other, wanted):
    assert agree(torch.tensor(one), torch.tensor(other)) is wanted
