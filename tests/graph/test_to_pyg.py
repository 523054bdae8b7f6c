from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.graph.layers._blocks import pyg
from thrifty.core import GraphError, MissingExtraError
from thrifty.graph import GAT, GIN, SAGE, Graph, NeighborSampler
from thrifty.graph._gnn import GNN


def sampled(mode="frontier"):
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 6, 60)
    indices = rng.integers(0, 60, degrees.sum()).astype(np.int32)
    graph = Graph(np.concatenate([[0], np.cumsum(degrees)]), indices)
    batch = NeighborSampler(graph, [3, 2, 2], mode=mode).sample([7, 3, 9, 3])
    x = torch.from_numpy(rng.standard_normal((batch.num_nodes, 5)))
    return replace(batch, x=x, y=torch.arange(3))


@pytest.fixture
def batch():
    pyg()
    return sampled()


def test_what_the_data_say(batch):
    data = batch.to_pyg()
    assert data.batch_size == 3
    assert data.num_nodes == batch.num_nodes
    assert torch.equal(data.n_id[:3], torch.tensor([7, 3, 9]))
    assert torch.equal(data.edge_index, batch.blocks[0].edge_index())
    assert data.edge_index.dtype == torch.int64
    assert data.num_sampled_nodes == list(batch.hop_nodes)
    assert data.num_sampled_edges == list(batch.hop_edges)
    assert data.x is batch.x
    assert data.y is batch.y
    data.validate()


def test_without_features(batch):
    data = replace(batch, x=None, y=None).to_pyg()
    assert data.x is None
    assert data.num_nodes == batch.num_nodes


def mlp(width_in, width_out):
    return nn.Sequential(nn.Linear(width_in, 6), nn.ReLU(), nn.Linear(6, width_out))


def models():
    """Return stock models of PyG, and ours with layers of the same shapes."""
    stock = pyg().nn

    class StockGIN(stock.GIN):
        def init_conv(self, width_in, width_out, **options):
            return stock.GINConv(mlp(width_in, width_out))

    return {
        "sage": (
            stock.GraphSAGE(5, 8, num_layers=3, out_channels=2),
            GNN([SAGE(5, 8), SAGE(8, 8), SAGE(8, 2)]),
        ),
        "gat": (
            stock.GAT(5, 8, num_layers=3, out_channels=2, heads=2, add_self_loops=False),
            GNN([GAT(5, 4, heads=2), GAT(8, 4, heads=2), GAT(8, 2, heads=2, concat=False)]),
        ),
        "gin": (
            StockGIN(5, 8, num_layers=3, out_channels=2),
            GNN([GIN(mlp(5, 8)), GIN(mlp(8, 8)), GIN(mlp(8, 2))]),
        ),
    }


@pytest.mark.parametrize("name", ["sage", "gat", "gin"])
@pytest.mark.parametrize("trim", [True, False])
def test_stock_models_say_the_same_as_ours(batch, name, trim):
    torch.manual_seed(0)
    theirs, ours = (model.double() for model in models()[name])
    for conv, layer in zip(theirs.convs, ours.layers, strict=True):
        layer.load_state_dict(conv.state_dict())
    data = batch.to_pyg()
    x, y = (batch.x.clone().requires_grad_() for _ in range(2))
    hops = {
        "num_sampled_nodes_per_hop": data.num_sampled_nodes,
        "num_sampled_edges_per_hop": data.num_sampled_edges,
    }
    mine = ours(replace(batch, x=x))
    yours = theirs(y, data.edge_index, **(hops if trim else {}))[: data.batch_size]
    torch.testing.assert_close(mine, yours)
    mine.square().sum().backward()
    yours.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_full_batches_have_no_such_form():
    with pytest.raises(GraphError, match='sample with mode="frontier"'):
        sampled("full").to_pyg()


def test_without_pyg(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(MissingExtraError, match="torch-geometric is not installed"):
        sampled().to_pyg()
