from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from thrifty.core import GraphError
from thrifty.graph import GAT, GIN, SAGE, Graph, NeighborSampler
from thrifty.graph._gnn import GNN


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 6, 40)
    indices = rng.integers(0, 40, degrees.sum()).astype(np.int32)
    x = torch.from_numpy(rng.standard_normal((40, 5), dtype=np.float32))
    graph = Graph(np.concatenate([[0], np.cumsum(degrees)]), indices, x=x)
    sampled = NeighborSampler(graph, [3, 2]).sample([7, 3, 9])
    return replace(sampled, x=graph.x[sampled.nodes])


def test_a_row_for_each_seed(batch):
    assert GNN([SAGE(5, 8), SAGE(8, 3)])(batch).shape == (3, 3)


@pytest.mark.parametrize("first", [SAGE(5, 4), GAT(5, 4), GIN(nn.Linear(5, 4))])
def test_a_stack_is_layers_with_relu_between_them(batch, first):
    model = GNN([first, SAGE(4, 3)])
    hidden = torch.relu(first(batch.x, batch.blocks[0]))
    expected = model.layers[1](hidden, batch.blocks[1])
    ours = model(batch)
    torch.testing.assert_close(ours, expected)
    grads = [
        torch.autograd.grad(out.square().sum(), model.parameters()) for out in (ours, expected)
    ]
    torch.testing.assert_close(*grads)


def test_norm_activation_dropout_in_this_order(batch):
    calls = []

    class Norm(nn.Module):
        def forward(self, x):
            calls.append("norm")
            return x - 1

    def activation(x):
        calls.append("activation")
        return torch.full_like(x, 7)

    model = GNN([SAGE(5, 4), SAGE(4, 3)], activation=activation, dropout=1.0, norms=[Norm()])
    hidden = model.layer(0, batch.x, batch.blocks[0])
    assert calls == ["norm", "activation"]
    assert hidden.abs().sum() == 0
    assert model.eval().layer(0, batch.x, batch.blocks[0]).unique().tolist() == [7]


def test_nothing_follows_the_last_layer(batch):
    model = GNN([SAGE(5, 3)], dropout=1.0)
    block = NeighborSampler(Graph([0, 1], np.zeros(1, dtype=np.int32)), [1]).sample([0]).blocks[0]
    x = torch.randn(1, 5)
    assert torch.equal(model.layer(0, x, block), model.layers[0](x, block))


def test_what_a_norm_returns_is_not_written_over(batch):
    kept = []

    class Norm(nn.Module):
        def forward(self, x):
            kept.append(x - 1)
            return kept[-1]

    GNN([SAGE(5, 4), SAGE(4, 3)], norms=[Norm()])(batch)
    assert (kept[0] < 0).any()


def test_learns_which_nodes_send(batch):
    torch.manual_seed(0)
    model = GNN([SAGE(5, 16), SAGE(16, 2)])
    y = torch.tensor([0, 1, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), y)
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_layers_and_blocks_must_be_equally_many(batch):
    with pytest.raises(
        GraphError, match="has 3 layers, and the batch 2 blocks; sample with 3 fanouts"
    ):
        GNN([SAGE(5, 4), SAGE(4, 4), SAGE(4, 3)])(batch)


def test_a_batch_without_features(batch):
    with pytest.raises(GraphError, match="no features"):
        GNN([SAGE(5, 4), SAGE(4, 3)])(replace(batch, x=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": [SAGE(2, 2)], "dropout": -0.1}, "dropout=-0.1"),
        ({"layers": [SAGE(2, 2)], "norms": [nn.LayerNorm(2)]}, "1 norms for 1 layers"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(GraphError, match=message):
        GNN(**options)


def test_relu_and_dropout_drop_as_often_as_asked_and_not_in_evaluation(batch):
    model = GNN([SAGE(5, 400), SAGE(400, 3)], dropout=0.5)
    plain = model.layers[0](batch.x, batch.blocks[0]).relu()
    hidden = model.layer(0, batch.x, batch.blocks[0])
    kept = hidden > 0
    torch.testing.assert_close(hidden[kept], 2 * plain[kept])
    assert 0.4 < kept.sum() / (plain > 0).sum() < 0.6
    assert torch.equal(model.eval().layer(0, batch.x, batch.blocks[0]), plain)
