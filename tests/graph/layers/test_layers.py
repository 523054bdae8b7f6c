from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.graph.layers._blocks import adjacency, block_of, features, means, random_block, shared
from thrifty.core import GraphError
from thrifty.graph import GAT, GIN, SAGE


def sage_by_matrices(layer, x, block):
    joined = torch.cat([means(block) @ x, x[: block.num_dst]], dim=1)
    return F.linear(joined, layer.weight, layer.bias)


@pytest.mark.parametrize(("wide", "narrow"), [(3, 7), (9, 2)], ids=["wider", "narrower"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_sage_is_that_of_dense_matrices(wide, narrow, requires_grad):
    layer, block = SAGE(wide, narrow).double(), random_block(10, 16)
    x = features(16, wide, requires_grad=requires_grad)
    results = []
    for out in (layer(x, block), sage_by_matrices(layer, x, block)):
        inputs = [*layer.parameters(), *([x] if requires_grad else [])]
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sage_narrows_first_only_where_that_costs_less():
    block = random_block(10, 16)
    assert SAGE(64, 4)._narrows_first(features(16, 64), block)
    assert not SAGE(4, 64)._narrows_first(features(16, 4), block)


def test_sage_leaves_a_shared_input_as_it_is_first():
    block = shared(random_block(10, 16))
    assert not SAGE(64, 4)._narrows_first(features(16, 64), block)
    assert SAGE(64, 4)._narrows_first(features(16, 64, requires_grad=True), block)


def test_sage_without_neighbors_is_a_linear_layer():
    layer, block = SAGE(3, 2).double(), block_of([[], []], 4)
    x = features(4, 3)
    torch.testing.assert_close(layer(x, block), F.linear(x[:2], layer.weight[:, 3:], layer.bias))


def test_gin_is_that_of_dense_matrices():
    block, x = random_block(10, 16), features(16, 3)
    out = GIN(nn.Identity(), eps=0.5).double()(x, block)
    torch.testing.assert_close(out, adjacency(block) @ x + 1.5 * x[:10])


def test_gat_drops_weights_in_training_alone():
    torch.manual_seed(0)
    layer, block = GAT(3, 2, dropout=1.0, bias=False), block_of([[0, 1]], 2)
    x = torch.ones(2, 3)
    assert layer(x, block).abs().sum() == 0
    assert layer.eval()(x, block).abs().sum() > 0


@pytest.mark.parametrize(
    "make", [SAGE, GAT, lambda a, b: GIN(nn.Linear(a, b), eps=0.5, train_eps=True)]
)
def test_parameters_can_be_drawn_anew(make):
    torch.manual_seed(0)
    layer = make(4, 3)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(100)
    layer.reset_parameters()
    for name, p in layer.named_parameters():
        assert p.shape == before[name].shape
        assert (p.abs() < 3).all()


def test_autocast_is_left_to_pytorch():
    block = random_block(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert SAGE(3, 2)(torch.ones(6, 3), block).dtype == torch.bfloat16


def test_layers_say_what_they_are():
    assert repr(SAGE(4, 2)) == "SAGE(4, 2, bias=True)"
    assert "4, 2, heads=3, concat=True" in repr(GAT(4, 2, heads=3))
    assert "eps=0.5, train_eps=False" in repr(GIN(nn.Identity(), eps=0.5))


@pytest.mark.parametrize("make", [SAGE, GAT])
def test_features_must_fit_the_layer(make):
    with pytest.raises(GraphError, match="x has 3 features, and the layer takes 4"):
        make(4, 2)(torch.ones(6, 3), random_block(4, 6))


@pytest.mark.parametrize("make", [SAGE, GAT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_dtypes_must_fit_the_layer(make, dtype):
    with pytest.raises(GraphError, match=r"give x.to\(torch.float32\)"):
        make(3, 2)(torch.ones(6, 3, dtype=dtype), random_block(4, 6))


def test_whole_numbers_are_no_features():
    with pytest.raises(GraphError, match=r"give x\.float\(\)"):
        GIN(nn.Identity(), eps=0.5)(torch.ones(6, 3, dtype=torch.int64), random_block(4, 6))


def test_the_layer_must_lie_where_the_features_do():
    with pytest.raises(GraphError, match="the layer on meta"):
        SAGE(3, 2).to("meta")(torch.ones(6, 3), random_block(4, 6))


def test_the_block_must_lie_where_the_features_do():
    with pytest.raises(GraphError, match="the block on meta"):
        SAGE(3, 2)(torch.ones(6, 3), random_block(4, 6).to("meta"))


def test_rows_must_be_those_of_the_block():
    with pytest.raises(GraphError, match="and the block 6 sources"):
        GIN(nn.Identity())(torch.ones(5, 3), random_block(4, 6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SAGE(0, 2), "in_features=0"),
        (lambda: GAT(3, 2.0), "out_features=2.0"),
        (lambda: GAT(3, 2, heads=True), "heads=True"),
        (lambda: GAT(3, 2, dropout=1.5), "dropout=1.5"),
    ],
)
def test_options_that_make_no_sense(make, message):
    with pytest.raises(GraphError, match=message):
        make()
