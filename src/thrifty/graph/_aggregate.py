"""Sums and means over neighbours, differentiable any number of times.

On the CPU in float32 and float64 they are kernels, elsewhere index operations of PyTorch. The gradient of a source is gathered from the
destinations it was sent to, through the transposed rows of the block: nothing is scattered.
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

from ._block import Block
from ._by_rows import by_rows
from .kernels._aggregate import gather, gather_back
from .kernels._csr import transpose


KERNEL_DTYPES = (torch.float32, torch.float64)


class Transposed(NamedTuple):
    """A block's edges by source: int32 arrays; the edges of source ``j`` are at ``starts[j]`` to ``starts[j + 1]``."""

    starts: np.ndarray
    destinations: np.ndarray
    edges: np.ndarray


def neighbor_mean(x: Tensor, block: Block) -> Tensor:
    """The mean of the neighbours' rows, zero without neighbours.

    Args:
        x: shape ``(block.num_src, features)``.
        block: who sends to whom.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_mean(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_mean, (x,), x, block)  # type: ignore[no-any-return]
    return _aggregate(x, block, _How(mean=True, own=False))


def neighbor_sum(x: Tensor, block: Block) -> Tensor:
    """The sum of the neighbours' rows.

    Args:
        x: shape ``(block.num_src, features)``.
        block: who sends to whom.

    Returns:
        Shape ``(block.num_dst, features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> neighbor_sum(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[6.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(neighbor_sum, (x,), x, block)  # type: ignore[no-any-return]
    return _aggregate(x, block, _How(mean=False, own=False))


def mean_and_own(x: Tensor, block: Block) -> Tensor:
    """The mean of the neighbours' rows, and to the right of it a node's own row.

    Args:
        x: shape ``(block.num_src, features)``.
        block: who sends to whom.

    Returns:
        Shape ``(block.num_dst, 2 * features)``.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> mean_and_own(torch.tensor([[1.0], [2.0], [4.0]]), block)
    tensor([[3., 1.]])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(mean_and_own, (x,), x, block)  # type: ignore[no-any-return]
    return _aggregate(x, block, _How(mean=True, own=True))


def of_each(x: Tensor, block: Block, *, mean: bool, own: bool) -> Tensor:
    """The sums or means of several trials at once, whether or not a gradient is wanted.

    Args:
        x: shape ``(trials, block.num_src, features)``.
        block: who sends to whom.
        mean: whether it is their mean.
        own: whether the destinations' own rows stand to the right of it.

    Returns:
        Shape ``(trials, block.num_dst, features)``, twice as many features with ``own``.
    """
    return _Gather.apply(x, block, _How(mean=mean, own=own))  # type: ignore[no-any-return, no-untyped-call]


def uses_kernels(x: Tensor) -> bool:
    """Whether the kernels can read it; index operations of PyTorch are for the rest."""
    return x.device.type == "cpu" and x.dtype in KERNEL_DTYPES


def transposed(block: Block) -> Transposed:
    """The edges of a block on the CPU by source, made once."""
    return block.once("transposed", lambda: _transpose(block))


class _How(NamedTuple):
    """Sums or means, and whether the destinations' own rows stand to the right of them."""

    mean: bool
    own: bool


class _Remembered(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    out: Tensor
    out_version: int

    def is_of(self, x: Tensor) -> bool:
        """Whether it was made of this ``x``, and nobody has changed either of them since."""
        same = self.x() is x and self.version == x._version
        return same and self.out_version == self.out._version


@torch.compiler.disable
def _aggregate(x: Tensor, block: Block, how: _How) -> Tensor:
    # forward-mode derivatives ride on tensors that need no gradient; inference tensors do not say when they change
    if x.requires_grad or x.is_inference() or unpack_dual(x).tangent is not None:
        return _Gather.apply(x, block, how)  # type: ignore[no-any-return, no-untyped-call]
    return _remembered(x, block, how) if block.shared else _gather(x, block, how)


def _remembered(x: Tensor, block: Block, how: _How) -> Tensor:
    """What does not need a gradient is the input: all trials that ask for the same get one tensor.

    Only the last ``x`` is remembered, and only as long as it lives: blocks may be kept, and must not collect memory.
    """
    last: dict[_How, _Remembered] = block.once("aggregated", dict)
    known = last.get(how)
    if known is not None and known.is_of(x):
        return known.out

    def forget(dead: weakref.ref[Tensor]) -> None:
        # another x may have come to its place
        if how in last and last[how].x is dead:
            del last[how]

    out = _gather(x, block, how)
    last[how] = _Remembered(weakref.ref(x, forget), x._version, out, out._version)
    return out


class _Gather(Function):
    """From sources to destinations."""

    @staticmethod
    def forward(x: Tensor, block: Block, how: _How) -> Tensor:
        return _gather(x, block, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        _, ctx.block, ctx.how = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GatherBack.apply(grads[0], ctx.block, ctx.how), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Gather.apply(tangents[0], ctx.block, ctx.how)  # type: ignore[no-untyped-call]


class _GatherBack(Function):
    """From destinations to sources: what is linear is its own derivative, both ways."""

    @staticmethod
    def forward(grad: Tensor, block: Block, how: _How) -> Tensor:
        return _gather_back(grad, block, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        _, ctx.block, ctx.how = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gather.apply(grads[0], ctx.block, ctx.how), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _GatherBack.apply(tangents[0], ctx.block, ctx.how)  # type: ignore[no-untyped-call]


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
    """The matrix of each trial."""
    return x.unbind(0) if x.dim() == 3 else (x,)


def _gather_by_index(x: Tensor, block: Block, how: _How) -> Tensor:
    if x.dim() == 3:
        return torch.stack([_gather_by_index(each, block, how) for each in x])
    # half precision would lose the small rows of a long sum
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
    """One over the number of edges of each destination, 1 without edges; shape ``(num_dst,)``."""

    def make() -> Tensor:
        return block.indptr.diff().clamp(min=1).to(dtype).reciprocal()

    return block.once(("inverse degrees", dtype), make)


def _transpose(block: Block) -> Transposed:
    starts = np.zeros(block.num_src + 1, dtype=np.int32)
    destinations = np.empty(block.num_edges, dtype=np.int32)
    edges = np.empty(block.num_edges, dtype=np.int32)
    transpose(block.indptr.numpy(), block.indices.numpy(), starts, destinations, edges)
    return Transposed(starts, destinations, edges)
