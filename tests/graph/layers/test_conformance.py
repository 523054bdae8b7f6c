from __future__ import annotations

import pytest
from torch import nn

from thrifty.graph import GAT, GIN, SAGE
from thrifty.testing.graph import GRAPH_LAYER_CHECKS, check_errors


pytestmark = pytest.mark.slow


MAKERS = {
    "sage": SAGE,
    "sage no bias": lambda a, b: SAGE(a, b, bias=False),
    "gat": GAT,
    "gat heads": lambda a, b: GAT(a, b, heads=2, concat=False, dropout=0.5, bias=False),
    "gin": lambda a, b: GIN(nn.Sequential(nn.Linear(a, 4), nn.Tanh(), nn.Linear(4, b)), eps=0.3),
    "gin train": lambda a, b: GIN(nn.Linear(a, b), eps=0.1, train_eps=True),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("check", GRAPH_LAYER_CHECKS)
def test_conformance(check, make):
    check(make)


def test_that_checks_fail_for_a_layer_that_checks_nothing():
    class Careless(nn.Linear):
        def forward(self, x, block):
            return super().forward(x)

    with pytest.raises(AssertionError, match="was taken"):
        check_errors(Careless)
