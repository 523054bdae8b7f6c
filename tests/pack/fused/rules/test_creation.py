from __future__ import annotations

import pytest
import torch

from tests.pack.fused.twin import check, integers, normal


pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "create",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda x: torch.full_like(x, 3.0),
        lambda x: torch.empty_like(x).fill_(2.0),
        lambda x: x.new_zeros(4, 3),
        lambda x: x.new_ones((4, 3)),
        lambda x: x.new_ones(x.shape),
        lambda x: x.new_full((4, 3), 2.0),
        lambda x: x.new_empty(4, 3).zero_(),
    ],
)
def test_what_is_new_can_be_written_into(axis, create):
    def forward(module, x):
        new = create(x)
        new += x
        new[:, 0] = 2 * x[:, 1]
        return new

    check(forward, lambda s: [normal(4, 3, seed=s, axis=axis)])


def test_other_types():
    check(
        lambda m, x: (
            torch.zeros_like(x, dtype=torch.float64),
            x.new_zeros(2, dtype=torch.float32),
        ),
        lambda s: [integers(5, 4, 3, seed=s)],
    )
