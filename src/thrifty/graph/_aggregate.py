"""Sums and means over neighbours, differentiable any number of times.

On the CPU, in float32 and float64, they run as kernels; elsewhere, as PyTorch index operations.
The kernels gather the gradient of a source from the destinations that it was sent to, through the
transposed rows of the block. They never scatter.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import handle_torch_function, has_torch_function_unary

from ._batch import Block
from ._by_rows import by_rows
from .kernels._csr import transpose
from .kernels._neighbours import gather, gather_back


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
        x: shape ``(block.num_src, features)``.
        block: edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_mean(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_mean, (x,), x, block)
    return _aggregate(x, block, _How(mean=True, own=False))  # type: ignore[no-any-return]


def neighbor_sum(x: Tensor, block: Block) -> Tensor:
    """Return the sum of the neighbours' rows.

    Args:
        x: shape ``(block.num_src, features)``.
        block: edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_sum(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[6.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_sum, (x,), x, block)
    return _aggregate(x, block, _How(mean=False, own=False))  # type: ignore[no-any-return]


def mean_and_own(x: Tensor, block: Block) -> Tensor:
    """Return the mean of the neighbours' rows, with the destination's own row to its right.

    Args:
        x: shape ``(block.num_src, features)``.
        block: edges from sources to destinations.

    Returns:
        Shape ``(block.num_dst, 2 * features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> mean_and_own(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3., 1.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(mean_and_own, (x,), x, block)
    return _aggregate(x, block, _How(mean=True, own=True))  # type: ignore[no-any-return]


def of_each(x: Tensor, block: Block, *, mean: bool, own: bool) -> Tensor:
    """Return the sums or means of several trials at once, with or without gradients.

    Args:
        x: shape ``(trials, block.num_src, features)``.
        block: edges from sources to destinations.
        mean: whether to return means instead of sums.
        own: whether to put the destinations' own rows to the right of the result.

    Returns:
        Shape ``(trials, block.num_dst, features)``, twice as many features with ``own``.
    """
    return _apply(x, block, _How(mean=mean, own=own))


def uses_kernels(x: Tensor) -> bool:
    """Return whether the kernels can read ``x``; other tensors need PyTorch index operations."""
    return x.device.type == "cpu" and x.dtype in KERNEL_DTYPES


def transposed(block: Block) -> Transposed:
    """Return the edges of a CPU block by source, computed once for each block."""
    return block.once("transposed", lambda: _transpose(block))


class _How(NamedTuple):
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
def _aggregate(x: Tensor, block: Block, how: _How) -> Tensor:
    # Forward-mode derivatives travel on tensors that need no gradient, and inference tensors do
    # not say when they change, so neither kind can be cached.
    no_cache = x.requires_grad or x.is_inference()
    if no_cache or unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return _apply(x, block, how)
    return _remembered(x, block, how) if block.shared else _gather(x, block, how)


def _remembered(x: Tensor, block: Block, how: _How) -> Tensor:
    """Return the aggregate of an input that needs no gradient, one tensor for all trials.

    Only the last ``x`` is cached, and only while it exists, because blocks may be kept for long
    and must not collect memory.
    """
    last: dict[_How, _Remembered] = block.once("aggregated", dict)
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
    def forward(x: Tensor, block: Block, how: _How, back: bool) -> Tensor:  # noqa: FBT001, PLR0917
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


def _apply(x: Tensor, block: Block, how: _How, *, back: bool = False) -> Tensor:
    return _Gather.apply(x, block, how, back)  # type: ignore[no-any-return, no-untyped-call]


def _gather(x: Tensor, block: Block, how: _How) -> Tensor:
    if not uses_kernels(x):
        return _gather_by_index(x, block, how)
    x = x.detach().contiguous()
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-2], block.num_dst, width * (1 + how.own))
    rows = block.indptr.numpy(), block.indices.numpy()
    for source, target in zip(_each(x), _each(out), strict=True):
        by_rows(gather, *rows, source.numpy(), how.mean, target.numpy(), width=width)
    return out


def _gather_back(grad: Tensor, block: Block, how: _How) -> Tensor:
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


def _gather_by_index(x: Tensor, block: Block, how: _How) -> Tensor:
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


def _gather_back_by_index(grad: Tensor, block: Block, how: _How) -> Tensor:
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
