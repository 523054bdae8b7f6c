from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from tests.graph.layers._blocks import block_of, blocks, features, random_block
from thrifty.graph import _aggregate
from thrifty.graph._aggregate import (
    _softmax_by_index,
    _weighted_sum_by_index,
    attended_sum,
    attention,
)


pytestmark = pytest.mark.slow


def slow_attention(source, destination, block, slope):
    """Compute attention row by row."""
    rows = []
    for i in range(block.num_dst):
        mine = block.indices[block.indptr[i] : block.indptr[i + 1]].long()
        rows.append(F.leaky_relu(source[mine] + destination[i], slope).softmax(0))
    return torch.cat([source[:0], *rows])


def slow_sum(weights, x, block):
    """Compute the weighted sum edge by edge."""
    heads = weights.shape[1]
    out = [torch.zeros(heads, x.shape[1] // heads, dtype=x.dtype) for _ in range(block.num_dst)]
    for e, (j, i) in enumerate(block.edge_index().t().tolist()):
        out[i] = out[i] + weights[e, :, None] * x[j].view(heads, -1)
    return torch.stack([x[:0].sum(0), *(row.flatten() for row in out)])[1:]


def compare(fast, slow, *inputs):
    """Compare values, and the gradients of all inputs."""
    ours, theirs = fast(*inputs), slow(*inputs)
    torch.testing.assert_close(ours, theirs)
    grad = features(*ours.shape, seed=9)
    pairs = (
        torch.autograd.grad(out, inputs, grad, allow_unused=True, materialize_grads=True)
        for out in (ours, theirs)
    )
    for mine, yours in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, yours)


def scores(block, heads):
    source = features(block.num_src, heads, seed=1, requires_grad=True)
    return source, features(block.num_dst, heads, seed=2, requires_grad=True)


@given(block=blocks().filter(lambda b: b.num_edges), heads=st.integers(1, 3))
def test_attention_is_a_softmax_of_each_row(block, heads):
    compare(
        lambda a, b: attention(a, b, block, slope=0.2),
        lambda a, b: slow_attention(a, b, block, 0.2),
        *scores(block, heads),
    )


@given(block=blocks().filter(lambda b: b.num_edges), heads=st.integers(1, 3))
def test_attention_by_index_operations(block, heads):
    compare(
        lambda a, b: _softmax_by_index(a, b, block, slope=0.2),
        lambda a, b: slow_attention(a, b, block, 0.2),
        *scores(block, heads),
    )


@pytest.mark.parametrize("fast", [attended_sum, _weighted_sum_by_index])
@given(
    block=blocks().filter(lambda b: b.num_edges), heads=st.integers(1, 3), width=st.integers(1, 3)
)
def test_attended_sum(fast, block, heads, width):
    compare(
        lambda w, x: fast(w, x, block),
        lambda w, x: slow_sum(w, x, block),
        features(block.num_edges, heads, seed=1, requires_grad=True),
        features(block.num_src, heads * width, seed=2, requires_grad=True),
    )


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_attended_sum_with_one_gradient(needs):
    block = random_block(4, 6)
    weights = features(block.num_edges, 2, requires_grad=needs[0])
    x = features(6, 4, requires_grad=needs[1])
    assert torch.autograd.gradcheck(lambda w, x: attended_sum(w, x, block), (weights, x))


@pytest.mark.parametrize("fast", [attention, _softmax_by_index])
def test_large_scores_do_not_overflow(fast):
    block = block_of([[0, 1], [0]], 2)
    out = fast(torch.tensor([[1e4], [-1e4]]), torch.zeros(2, 1), block, slope=1.0)
    assert out.flatten().tolist() == [1, 0, 1]


@pytest.mark.parametrize("fast", [attention, _softmax_by_index])
def test_what_is_no_number_stays_so_and_in_its_row(fast):
    block = block_of([[0, 1], [1]], 2)
    out = fast(torch.tensor([[torch.nan], [0.0]]), torch.zeros(2, 1), block, slope=0.2)
    assert out.isnan().flatten().tolist() == [True, True, False]


def test_a_gradient_at_zero_is_that_of_pytorch():
    block, zero = (
        block_of([[0, 1]], 2),
        torch.zeros(2, 1, dtype=torch.float64, requires_grad=True),
    )
    compare(
        lambda a, b: attention(a, b, block, slope=0.2),
        lambda a, b: slow_attention(a, b, block, 0.2),
        zero,
        torch.zeros(1, 1, dtype=torch.float64, requires_grad=True),
    )


def test_threads_do_not_change_a_bit(monkeypatch):
    block = random_block(30, 50, most=9)
    source, destination = scores(block, 2)
    x = features(50, 6, requires_grad=True)
    results = []
    for least, threads in ((2**60, 1), (1, 3)):
        monkeypatch.setattr(_aggregate, "LEAST_WORK", least)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        out = attended_sum(attention(source, destination, block, slope=0.2), x, block)
        results.append((
            out.detach(),
            *torch.autograd.grad(out.square().sum(), (source, destination, x)),
        ))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_derivative_is_refused():
    block = random_block(4, 6)
    source, destination = scores(block, 1)
    out = attention(source, destination, block, slope=0.2).square().sum()
    (grad,) = torch.autograd.grad(out, source, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
