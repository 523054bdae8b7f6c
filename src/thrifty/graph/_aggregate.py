"""Sums, means and attention over neighbours, differentiable, in threads."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from ._batch import Block
from .kernels import wrapping
from .kernels._csr import transpose
from .kernels._neighbours import (
    edge_products,
    edge_softmax,
    edge_softmax_back,
    gather,
    gather_back,
    weighted_sum,
)


KERNEL_DTYPES = (torch.float32, torch.float64)


class Transposed(NamedTuple):
    """A block's edges by source, as int32 arrays.

    The edges of source ``j`` are at ``starts[j]`` to ``starts[j + 1]``.
    """

    starts: np.ndarray
    destinations: np.ndarray
    edges: np.ndarray


def neighbor_mean(x: Tensor, block: Block) -> Tensor:
    """Return the mean of the neighbours' rows, or zero without neighbours.

    Args:
        x: Shape ``(block.num_src, features)``.
        block: Edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_mean(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_mean, (x,), x, block)
    return _aggregate(x, block, _AggregateKind(mean=True, own=False))  # type: ignore[no-any-return]


def neighbor_sum(x: Tensor, block: Block) -> Tensor:
    """Return the sum of the neighbours' rows.

    Args:
        x: Shape ``(block.num_src, features)``.
        block: Edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_sum(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[6.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_sum, (x,), x, block)
    total: Tensor = _aggregate(x, block, _AggregateKind(mean=False, own=False))
    return total


def mean_and_own(x: Tensor, block: Block) -> Tensor:
    """Return the mean of the neighbours' rows, with the destination's own row to its right.

    Args:
        x: Shape ``(block.num_src, features)``.
        block: Edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, 2 * features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> mean_and_own(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3., 1.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(mean_and_own, (x,), x, block)
    return _aggregate(x, block, _AggregateKind(mean=True, own=True))  # type: ignore[no-any-return]


def of_each(x: Tensor, block: Block, *, mean: bool, own: bool) -> Tensor:
    """Return the sums or means of several trials at once, with or without gradients.

    Args:
        x: Shape ``(trials, block.num_src, features)``.
        block: Edges from sources to destinations.
        mean: Whether to return means instead of sums.
        own: Whether to put the destinations' own rows to the right of the result.

    Returns:
        Shape ``(trials, block.num_dst, features)``, twice as many features with ``own``.
    """
    return _apply(x, block, _AggregateKind(mean=mean, own=own))


def uses_kernels(x: Tensor) -> bool:
    """Return whether the kernels can read ``x``; other tensors need PyTorch index operations."""
    return x.device.type == "cpu" and x.dtype in KERNEL_DTYPES


def transposed(block: Block) -> Transposed:
    """Return the edges of a CPU block by source, computed once for each block."""
    return block.once("transposed", lambda: _transpose(block))


class _AggregateKind(NamedTuple):
    """The kind of aggregate: sums or means, with or without the destinations' own rows."""

    mean: bool
    own: bool


class _Remembered(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    out: Tensor
    out_version: int

    def is_of(self, x: Tensor) -> bool:
        """Return whether this was computed from ``x`` and neither tensor has changed since."""
        same = self.x() is x and self.version == x._version
        return same and self.out_version == self.out._version


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _aggregate(x: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    # Forward-mode derivatives travel on tensors that need no gradient, and inference tensors do
    # not say when they change, so neither kind can be cached.
    no_cache = x.requires_grad or x.is_inference()
    if no_cache or unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return _apply(x, block, how)
    return _remembered(x, block, how) if block.shared else _gather(x, block, how)


def _remembered(x: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    """Return the aggregate of an input that needs no gradient, one tensor for all trials.

    Only the last ``x`` is cached, and only while it exists, because blocks may be kept for long
    and must not collect memory.
    """
    last: dict[_AggregateKind, _Remembered] = block.once("aggregated", dict)
    known = last.get(how)
    if known is not None and known.is_of(x):
        return known.out

    def forget(dead: weakref.ref[Tensor]) -> None:
        # Another x may have taken its place.
        if how in last and last[how].x is dead:
            del last[how]

    out = _gather(x, block, how)
    last[how] = _Remembered(weakref.ref(x, forget), x._version, out, out._version)
    return out


class _Gather(Function):
    """Aggregation from sources to destinations, or ``back``, as an autograd function.

    Both directions are linear, so each is its own forward-mode derivative.
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        x: Tensor,
        block: Block,
        how: _AggregateKind,
        back: bool,  # noqa: FBT001
    ) -> Tensor:
        return _gather_back(x, block, how) if back else _gather(x, block, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        _, ctx.block, ctx.how, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(grads[0], ctx.block, ctx.how, back=not ctx.back), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _apply(tangents[0], ctx.block, ctx.how, back=ctx.back)


def _apply(x: Tensor, block: Block, how: _AggregateKind, *, back: bool = False) -> Tensor:
    return _Gather.apply(x, block, how, back)  # type: ignore[no-any-return, no-untyped-call]


def _gather(x: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    if not uses_kernels(x):
        return _gather_by_index(x, block, how)
    x = x.detach().contiguous()
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-2], block.num_dst, width * (1 + how.own))
    rows = block.indptr.numpy(), block.indices.numpy()
    for source, target in zip(_each(x), _each(out), strict=True):
        by_rows(gather, *rows, source.numpy(), how.mean, target.numpy(), width=width)
    return out


def _gather_back(grad: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    if not uses_kernels(grad):
        return _gather_back_by_index(grad, block, how)
    grad = grad.detach().contiguous()
    width = grad.shape[-1] // (1 + how.own)
    out = grad.new_empty(*grad.shape[:-2], block.num_src, width)
    weights = _inverse_degrees(block, grad.dtype) if how.mean else grad.new_empty(0)
    starts, destinations, _ = transposed(block)
    for source, target in zip(_each(grad), _each(out), strict=True):
        arrays = destinations, source.numpy(), weights.numpy(), target.numpy()
        by_rows(gather_back, starts, *arrays, width=width)
    return out


def _each(x: Tensor) -> tuple[Tensor, ...]:
    """Return the matrix of each trial."""
    return x.unbind(0) if x.dim() == 3 else (x,)


def _gather_by_index(x: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    if x.dim() == 3:
        return torch.stack([_gather_by_index(each, block, how) for each in x])
    # In half precision, a long sum would lose its small rows.
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(block.num_dst, x.shape[1], dtype=dtype)
    out.index_add_(0, block.destinations(), x.index_select(0, block.indices).to(dtype))
    if how.mean:
        out *= _inverse_degrees(block, dtype)[:, None]
    out = out.to(x.dtype)
    return torch.cat([out, x[: block.num_dst]], dim=1) if how.own else out


def _gather_back_by_index(grad: Tensor, block: Block, how: _AggregateKind) -> Tensor:
    if grad.dim() == 3:
        return torch.stack([_gather_back_by_index(each, block, how) for each in grad])
    dtype = torch.promote_types(grad.dtype, torch.float32)
    width = grad.shape[1] // (1 + how.own)
    sent = grad[:, :width].to(dtype)
    if how.mean:
        sent = sent * _inverse_degrees(block, dtype)[:, None]
    out = grad.new_zeros(block.num_src, width, dtype=dtype)
    out.index_add_(0, block.indices, sent.index_select(0, block.destinations()))
    if how.own:
        out[: block.num_dst] += grad[:, width:]
    return out.to(grad.dtype)


def _inverse_degrees(block: Block, dtype: torch.dtype) -> Tensor:
    """Return one over each destination's number of edges, 1 without edges; shape ``(num_dst,)``."""

    def make() -> Tensor:
        return block.indptr.diff().clamp(min=1).to(dtype).reciprocal()

    return block.once(("inverse degrees", dtype), make)


def _transpose(block: Block) -> Transposed:
    starts = np.zeros(block.num_src + 1, dtype=np.int32)
    destinations = np.empty(block.num_edges, dtype=np.int32)
    edges = np.empty(block.num_edges, dtype=np.int32)
    transpose(block.indptr.numpy(), block.indices.numpy(), starts, destinations, edges)
    return Transposed(starts, destinations, edges)


_NO_EDGES = np.empty(0, dtype=np.int32)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(source: Tensor, destination: Tensor, block: Block, *, slope: float) -> Tensor:
    """Return the softmax of ``leaky_relu(source + destination)`` over each destination's edges.

    Args:
        source: Shape ``(block.num_src, heads)``.
        destination: Shape ``(block.num_dst, heads)``.
        block: Edges from sources to destinations.
        slope: Slope of the leaky ReLU below zero.

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
        weights: Weight of each edge and head, shape ``(block.num_edges, heads)``.
        x: Shape ``(block.num_src, heads * features)``.
        block: Edges from sources to destinations.

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
        by_rows(edge_softmax, *_rows(block), *scores, slope, alpha.numpy(), width=alpha.shape[1])
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


def _softmax_by_index(source: Tensor, destination: Tensor, block: Block, *, slope: float) -> Tensor:
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


# -- threads ---------------------------------------------------------------------------------------


LEAST_WORK = 2**17
"""Number of elements to add up below which a second thread does not pay."""

_pool: ThreadPoolExecutor | None = None


def by_rows(kernel: Callable[..., None], indptr: np.ndarray, *arrays: Any, width: int) -> None:
    """Call ``kernel(indptr, *arrays, begin, end)`` for ranges of rows in parallel.

    The ranges have equally many edges and run in up to ``torch.get_num_threads()`` threads. Each
    row is written by one thread, so the result does not depend on the number of threads.

    Args:
        kernel: A compiled function that releases the GIL.
        indptr: Where rows of edges begin and end.
        arrays: The kernel's other arguments.
        width: Cost of an edge in elements.
    """
    num_rows = len(indptr) - 1
    total = int(indptr[-1]) + num_rows
    num = _num_threads(total * width)
    # Each row is written, which costs about as much as one edge.
    cuts = (
        bisect_left(range(num_rows), total * n // num, key=lambda i: int(indptr[i]) + i)
        for n in range(1, num)
    )
    _run(partial(kernel, indptr, *arrays), [0, *cuts, num_rows])


def by_elements(kernel: Callable[..., None], *arrays: Any, num: int) -> None:
    """Call ``kernel(*arrays, begin, end)`` for equal ranges of ``num`` elements in parallel.

    All ranges begin at even elements.
    """
    parts = _num_threads(num)
    _run(partial(kernel, *arrays), [*(num * n // parts // 2 * 2 for n in range(parts)), num])


def _num_threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // LEAST_WORK)


def _run(task: Callable[[int, int], None], cuts: Sequence[int]) -> None:
    """Run the first range in this thread and the others in the pool."""
    first, *others = pairwise(cuts)
    pending: list[Future[None]] = [_threads().submit(task, *cut) for cut in others]
    with wrapping():
        task(*first)
    for future in pending:
        future.result()


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(
            os.cpu_count(), thread_name_prefix="thrifty-rows", initializer=_wrap_around
        )
    return _pool


def _wrap_around() -> None:
    # NumPy keeps this setting per thread; it only matters to uncompiled kernels.
    wrapping().__enter__()


def _forget() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: a child that waited for them would wait forever.
    os.register_at_fork(after_in_child=_forget)
