from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.graph.layers._blocks import means
from thrifty.core import GraphError
from thrifty.graph import GAT, SAGE, Block, Graph
from thrifty.graph._gnn import GNN
from thrifty.graph._inference import infer_layerwise, infer_sampled


NUM = 30


@pytest.fixture
def graph():
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 5, NUM)
    indices = rng.integers(0, NUM, degrees.sum()).astype(np.int32)
    x = torch.from_numpy(rng.standard_normal((NUM, 5), dtype=np.float32))
    return Graph(np.concatenate([[0], np.cumsum(degrees)]), indices, x=x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GNN([SAGE(5, 8), GAT(8, 4, heads=2), SAGE(8, 3)], dropout=0.5)


def chain(num=NUM):
    """Return a graph where node i receives messages from node i + 1."""
    indptr = np.minimum(np.arange(num + 1), num - 1)
    return Graph(indptr, np.arange(1, num, dtype=np.int32), x=torch.ones(num, 5))


def test_layer_by_layer_is_the_whole_graph_at_once(graph):
    model = GNN([SAGE(5, 4), SAGE(4, 3)])
    block = Block(torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), num_src=NUM)
    x = graph.x
    for number, layer in enumerate(model.layers):
        joined = torch.cat([means(block, torch.float32) @ x, x], dim=1)
        x = nn.functional.linear(joined, layer.weight, layer.bias)
        x = torch.relu(x) if number == 0 else x
    torch.testing.assert_close(infer_layerwise(model, graph), x)


@settings(max_examples=10)
@given(nodes=st.lists(st.integers(0, NUM - 1), max_size=9), batch_size=st.integers(1, 8))
def test_layer_by_layer_is_sampling_everything(nodes, batch_size):
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 5, NUM)
    indices = rng.integers(0, NUM, degrees.sum()).astype(np.int32)
    x = torch.from_numpy(rng.standard_normal((NUM, 5), dtype=np.float32))
    graph = Graph(np.concatenate([[0], np.cumsum(degrees)]), indices, x=x)
    model = GNN([SAGE(5, 8), SAGE(8, 3)], dropout=0.5)
    full = infer_layerwise(model, graph, nodes=nodes, batch_size=batch_size)
    sampled = infer_sampled(model, graph, nodes, fanouts=[-1, -1], batch_size=batch_size)
    assert full.shape == (len(nodes), 3)
    torch.testing.assert_close(full, sampled)


def test_some_nodes_get_what_they_get_among_all(graph, model):
    nodes = [9, 3, 9, 0]
    everything = infer_layerwise(model, graph, batch_size=7)
    torch.testing.assert_close(infer_layerwise(model, graph, nodes=nodes), everything[nodes])


def test_only_nodes_that_matter_are_computed():
    told = []
    model = GNN([SAGE(5, 4), SAGE(4, 4), SAGE(4, 3)])
    infer_layerwise(model, chain(), nodes=[5], progress=lambda *n: told.append(n))
    assert told == [(3, 6), (5, 6), (6, 6)]


def test_sampled_inference_depends_on_its_seed_alone(graph, model):
    def run(**options):
        return infer_sampled(model, graph, np.arange(NUM), fanouts=(2, 2, 2), **options)

    assert torch.equal(run(seed=1, num_threads=1), run(seed=1, num_threads=3))
    assert not torch.equal(run(seed=1), run(seed=2))


def test_progress_of_sampled_inference(graph, model):
    told = []
    options = {"fanouts": (2, 2, 2), "batch_size": 3, "progress": lambda *n: told.append(n)}
    infer_sampled(model, graph, [1, 2, 3, 2, 1, 0], **options)
    assert told == [(3, 4), (4, 4)]


@pytest.mark.parametrize("infer", [infer_layerwise, lambda m, g: infer_sampled(m, g, [0])])
def test_modes_are_what_they_were_also_after_an_error(graph, model, infer):
    model.layers[1].eval()
    before = [part.training for part in model.modules()]
    seen = []

    def fail(module, inputs):
        seen.append((module.training, torch.is_grad_enabled()))
        raise ZeroDivisionError

    model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        infer(model, graph)
    assert seen == [(False, False)]
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize(
    "infer", [infer_layerwise, lambda m, g: infer_sampled(m, g, np.arange(NUM))]
)
def test_features_take_the_dtype_of_the_model(graph, model, infer):
    halves = graph.replace(x=graph.x.bfloat16())
    assert infer(model, halves).dtype == torch.float32
    assert infer(model.double(), halves).dtype == torch.float64


def test_any_model_with_layers_will_do(graph):
    class Sum:
        num_layers = 1

        def layer(self, number, x, block):
            return x[: block.num_dst] * 2

    torch.testing.assert_close(infer_layerwise(Sum(), graph), graph.x * 2)


def test_sampled_inference_takes_any_function_of_a_batch(graph):
    out = infer_sampled(lambda b: b.x[: b.num_seeds], graph, [3, 1, 3], fanouts=[1])
    assert torch.equal(out, graph.x[[3, 1, 3]])


def test_no_nodes_are_no_rows(graph, model):
    assert infer_layerwise(model, graph, nodes=[]).shape == (0, 3)
    assert infer_sampled(model, graph, []).shape == (0, 3)


def test_an_empty_graph(model):
    empty = Graph([0], np.empty(0, dtype=np.int32), x=torch.empty(0, 5))
    assert infer_layerwise(model, empty).shape == (0, 3)


@pytest.mark.parametrize("infer", [infer_layerwise, lambda m, g: infer_sampled(m, g, [0])])
def test_a_graph_without_features(graph, model, infer):
    with pytest.raises(GraphError, match="no features"):
        infer(model, Graph(graph.indptr, graph.indices))


@pytest.mark.parametrize("infer", [infer_layerwise, infer_sampled])
@pytest.mark.parametrize("size", [0, 2.0, True])
def test_sizes_that_make_no_sense(graph, model, infer, size):
    with pytest.raises(GraphError, match="batch_size="):
        infer(model, graph, nodes=[0], batch_size=size)


@pytest.mark.parametrize("infer", [infer_layerwise, infer_sampled])
def test_nodes_that_do_not_exist(graph, model, infer):
    with pytest.raises(GraphError, match="30 does not exist"):
        infer(model, graph, nodes=[0, 30])


def test_fanouts_must_fit_the_model(graph, model):
    with pytest.raises(GraphError, match="3 layers, and the batch 2 blocks"):
        infer_sampled(model, graph, [0], fanouts=(2, 2))


def test_a_model_without_layers(graph):
    with pytest.raises(GraphError, match="put its layers into a GNN"):
        infer_layerwise(nn.Linear(5, 3), graph)


def test_a_model_that_predicts_for_more_than_the_seeds(graph):
    with pytest.raises(GraphError, match="rows for 1 seeds"):
        infer_sampled(lambda b: b.x, graph, [int(np.argmax(graph.degrees()))], fanouts=[2])
