"""Layers equal those of PyTorch Geometric in values, gradients and state, which either can load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.layers._blocks import features, pyg, random_block
from thrifty.graph import GAT, GIN, SAGE


def pairs():
    conv = pyg().nn
    mlp = lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))  # noqa: E731
    return {
        "sage": (SAGE(5, 3), conv.SAGEConv(5, 3)),
        "sage narrow": (SAGE(5, 1), conv.SAGEConv(5, 1)),
        "sage no bias": (SAGE(5, 3, bias=False), conv.SAGEConv(5, 3, bias=False)),
        "gat": (
            GAT(5, 3, heads=2, negative_slope=0.1),
            conv.GATConv(5, 3, heads=2, negative_slope=0.1, add_self_loops=False),
        ),
        "gat mean of heads": (
            GAT(5, 3, heads=2, concat=False, bias=False),
            conv.GATConv(5, 3, heads=2, concat=False, bias=False, add_self_loops=False),
        ),
        "gin": (GIN(mlp(), eps=0.4), conv.GINConv(mlp(), eps=0.4)),
        "gin train": (GIN(mlp(), train_eps=True), conv.GINConv(mlp(), train_eps=True)),
    }


NAMES = ["sage", "sage narrow", "sage no bias", "gat", "gat mean of heads", "gin", "gin train"]


@pytest.fixture(params=NAMES)
def pair(request):
    torch.manual_seed(0)
    ours, theirs = pairs()[request.param]
    ours, theirs = ours.double(), theirs.double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_outputs_and_gradients_of_the_input(pair):
    ours, theirs = pair
    block, x = random_block(6, 9), features(9, 5, requires_grad=True)
    mine, yours = ours(x, block), theirs(x, block.edge_index())[:6]
    torch.testing.assert_close(mine, yours)
    grad = features(*mine.shape, seed=1)
    torch.testing.assert_close(
        torch.autograd.grad(mine, x, grad), torch.autograd.grad(yours, x, grad)
    )


def test_gradients_of_parameters_come_under_pygs_names(pair):
    ours, theirs = pair
    block, x = random_block(6, 9), features(9, 5)
    ours(x, block).square().sum().backward()
    theirs(x, block.edge_index())[:6].square().sum().backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    found = {name: p.grad for name, p in ours.named_parameters()}
    if isinstance(ours, SAGE):
        left, right = grads.pop("lin_l.weight"), grads.pop("lin_r.weight")
        grads["weight"] = torch.cat([left, right], dim=1)
        if "lin_l.bias" in grads:
            grads["bias"] = grads.pop("lin_l.bias")
    torch.testing.assert_close(found, grads)


@pytest.mark.parametrize("name", ["gat", "gin"])
def test_pyg_loads_our_state(name):
    ours, theirs = pairs()[name]
    theirs.load_state_dict(ours.state_dict())
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, yours)
