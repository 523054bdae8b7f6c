"""Attention of destinations over their neighbours: edge weights and weighted sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ._aggregate import transposed, uses_kernels
from ._batch import Block
from ._by_rows import by_rows
from .kernels._neighbours import (
    edge_products,
    edge_softmax,
    edge_softmax_back,
    gather,
    weighted_sum,
)


_NO_EDGES = np.empty(0, dtype=np.int32)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(source: Tensor, destination: Tensor, block: Block, *, slope: float) -> Tensor:
    """Return the softmax of ``leaky_relu(source + destination)`` over each destination's edges.

    Args:
        source: shape ``(block.num_src, heads)``.
        destination: shape ``(block.num_dst, heads)``.
        block: edges from sources to destinations.
        slope: slope of the leaky ReLU below zero.

    Returns:
        Shape ``(block.num_edges, heads)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> attention(torch.zeros(3, 1), torch.zeros(1, 1), block, slope=0.2)
    tensor([[0.5000],
            [0.5000]])
    """
    if uses_kernels(source):
        return _Softmax.apply(  # type: ignore[no-any-return, no-untyped-call]
            source, destination, block, slope
        )
    return _softmax_by_index(source, destination, block, slope=slope)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attended_sum(weights: Tensor, x: Tensor, block: Block) -> Tensor:
    """Return the sum of the neighbours' rows, each head's part weighted by that head's weights.

    Args:
        weights: weight of each edge and head, shape ``(block.num_edges, heads)``.
        x: shape ``(block.num_src, heads * features)``.
        block: edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, heads * features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> attended_sum(torch.tensor([[1.0], [0.5]]), torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[4.]])
    """
    if uses_kernels(x) and weights.dtype == x.dtype:
        return _WeightedSum.apply(weights, x, block)  # type: ignore[no-any-return, no-untyped-call]
    return _weighted_sum_by_index(weights, x, block)


class _Softmax(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- apply() takes no keywords
        source: Tensor, destination: Tensor, block: Block, slope: float
    ) -> Tensor:
        alpha = source.new_empty(block.num_edges, source.shape[1])
        scores = _numpy(source), _numpy(destination)
        by_rows(
            edge_softmax, *_rows(block), *scores, slope, alpha.numpy(), width=alpha.shape[1]
        )
        return alpha

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        source, destination, ctx.block, ctx.slope = inputs
        ctx.save_for_backward(source, destination, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        source, destination, alpha = ctx.saved_tensors
        block, heads = ctx.block, source.shape[1]
        by_edge = torch.empty_like(alpha)
        by_destination = torch.empty_like(destination, memory_format=torch.contiguous_format)
        by_source = torch.empty_like(source, memory_format=torch.contiguous_format)
        arrays = (_numpy(t) for t in (alpha, grads[0], by_edge, by_destination))
        scores = _numpy(source), _numpy(destination)
        by_rows(edge_softmax_back, *_rows(block), *scores, ctx.slope, *arrays, width=heads)
        starts, _, edges = transposed(block)
        by_rows(
            gather,
            starts,
            edges,
            _numpy(by_edge),
            False,  # noqa: FBT003
            _numpy(by_source),
            width=heads,
        )
        return by_source, by_destination, None, None


class _WeightedSum(Function):
    @staticmethod
    def forward(weights: Tensor, x: Tensor, block: Block) -> Tensor:
        out = x.new_empty(block.num_dst, x.shape[1])
        arrays = (_numpy(t) for t in (weights, x, out))
        by_rows(weighted_sum, *_rows(block), _NO_EDGES, *arrays, width=x.shape[1])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        weights, x, ctx.block = inputs
        ctx.save_for_backward(weights, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, x = ctx.saved_tensors
        grad, width = grads[0], x.shape[1]
        by_edge = by_source = None
        if ctx.needs_input_grad[0]:
            by_edge = torch.empty_like(weights, memory_format=torch.contiguous_format)
            arrays = (_numpy(t) for t in (grad, x, by_edge))
            by_rows(edge_products, *_rows(ctx.block), *arrays, width=width)
        if ctx.needs_input_grad[1]:
            by_source = torch.empty_like(x, memory_format=torch.contiguous_format)
            arrays = (_numpy(t) for t in (weights, grad, by_source))
            by_rows(weighted_sum, *transposed(ctx.block), *arrays, width=width)
        return by_edge, by_source, None


def _softmax_by_index(
    source: Tensor, destination: Tensor, block: Block, *, slope: float
) -> Tensor:
    to = block.destinations()
    scores = source.index_select(0, block.indices) + destination.index_select(0, to)
    scores = F.leaky_relu(scores, slope).to(torch.promote_types(source.dtype, torch.float32))
    with torch.no_grad():
        # The softmax does not depend on the shift, so no gradient goes through it.
        rows = to[:, None].expand_as(scores)
        largest = scores.new_full(destination.shape, -torch.inf)
        largest.scatter_reduce_(0, rows, scores, "amax")
    powers = (scores - largest.index_select(0, to)).exp()
    totals = powers.new_zeros(destination.shape).index_add(0, to, powers)
    return (powers / totals.index_select(0, to)).to(source.dtype)


def _weighted_sum_by_index(weights: Tensor, x: Tensor, block: Block) -> Tensor:
    heads, dtype = weights.shape[1], torch.promote_types(x.dtype, torch.float32)
    sent: Tensor = x.index_select(0, block.indices).unflatten(  # type: ignore[no-untyped-call]
        1, (heads, x.shape[1] // heads)
    )
    sent = (weights[:, :, None].to(dtype) * sent).flatten(1)
    out = sent.new_zeros(block.num_dst, x.shape[1])
    return out.index_add(0, block.destinations(), sent).to(x.dtype)


def _rows(block: Block) -> tuple[np.ndarray, np.ndarray]:
    return block.indptr.numpy(), block.indices.numpy()


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()
