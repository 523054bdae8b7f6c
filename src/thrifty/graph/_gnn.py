"""Graph networks, made by name, their fused ReLU and dropout, and their packing rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import module as torch_module
from torch.overrides import handle_torch_function, has_torch_function_unary

from thrifty.core import GraphError
from thrifty.pack import Group, Packed, register_rule

from . import _aggregate
from ._aggregate import by_elements, mean_and_own, neighbor_mean, neighbor_sum, uses_kernels
from ._batch import Batch, Block, Memory
from ._features import gather_features
from ._graph_layers import GAT, SAGE
from ._sampler import NeighborSampler
from .kernels import _neighbours as kernels


_NUM_DRAWS = 2**32


@torch.compiler.disable  # type: ignore[untyped-decorator]
def relu_dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Return ``dropout(relu(x), p)`` as in training.

    An element is kept with probability ``1 - p`` and then divided by it. The draws are a function
    of one number from PyTorch's CPU generator, so they follow ``torch.manual_seed``. They are not
    those of ``torch.nn.functional.dropout``, and do not depend on the number of threads.

    Args:
        x: Input of any shape.
        p: Probability that an element is set to zero.
        inplace: Whether to overwrite ``x``.

    >>> relu_dropout(torch.tensor([-1.0, 2.0]), 1.0)
    tensor([0., 0.])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(  # type: ignore[no-any-return]
            relu_dropout, (x,), x, p, inplace=inplace
        )
    if not (uses_kernels(x) and x.is_contiguous() and 0.0 < p < 1.0):
        return F.dropout(x.relu_() if inplace else x.relu(), p)
    return of_each(x, [(p, draw_key())], inplace=inplace)


def draw_key(generator: torch.Generator | None = None) -> int:
    """Draw the number that determines a mask."""
    (key,) = torch.randint(2**63 - 1, (1,), generator=generator).tolist()
    return int(key)


def of_each(x: Tensor, draws: Sequence[tuple[float, int]], *, inplace: bool) -> Tensor:
    """Apply ReLU and dropout to several trials, each with its own probability and key.

    Probabilities of 0 and 1 are allowed.

    Args:
        x: Contiguous; its first dimension counts the trials, unless there is only one.
        draws: Probability and key of each trial.
        inplace: Whether to overwrite ``x``.
    """
    return _ReluDropout.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, tuple(draws), inplace
    )


class _ReluDropout(Function):
    @staticmethod
    def forward(
        x: Tensor,
        draws: Sequence[tuple[float, int]],
        inplace: bool,  # noqa: FBT001 -- apply() takes no keywords
    ) -> Tensor:
        out = x if inplace else torch.empty_like(x)
        num = len(draws)
        for (p, key), source, target in zip(draws, _rows(x, num), _rows(out, num), strict=True):
            mask = np.uint64(key), np.uint64(round(p * _NUM_DRAWS)), _scale(p)
            by_elements(kernels.relu_dropout, source, *mask, target, num=len(source))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, draws, inplace = inputs
        ctx.scales = [_scale(p) for p, _ in draws]
        if inplace:
            ctx.mark_dirty(x)
        # Dropped and negative elements are zero and kept ones are not, so no mask must be saved.
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,), grad, num = ctx.saved_tensors, grads[0], len(ctx.scales)
        if torch.is_grad_enabled():
            # The caller will differentiate again, so use differentiable operations.
            scales = grad.new_tensor(ctx.scales)
            if num > 1:
                scales = scales.view(-1, *[1] * (grad.dim() - 1))
            return torch.where(out <= 0, 0.0, grad * scales), None, None
        grad = grad.contiguous()
        passed = torch.empty_like(grad)
        rows = _rows(out, num), _rows(grad, num), _rows(passed, num)
        for scale, y, source, target in zip(ctx.scales, *rows, strict=True):
            arrays = y, source, scale, target
            by_elements(kernels.relu_dropout_back, *arrays, num=len(source))
        return passed, None, None


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _rows(tensor: Tensor, num: int) -> Iterator[np.ndarray]:
    """Return an iterator over the elements of each trial."""
    return iter(tensor.detach().view(num, -1).numpy())


def make_batch(
    sampler: NeighborSampler,
    seeds: Any,
    *,
    epoch: int = 0,
    index: int = 0,
    dtype: torch.dtype | None = None,
    memory: Memory | None = None,
) -> Batch:
    """Sample around some seeds and gather features and labels, all in the calling thread.

    Args:
        sampler: Sampler on the graph that has the features and labels.
        seeds: Node numbers, shape ``(num,)``; duplicates get one row.
        epoch: See ``NeighborSampler.sample``.
        index: Number of the batch; see ``NeighborSampler.sample``.
        dtype: Dtype of the features: that of the graph or float32; None for that of the graph.
        memory: Pool to take the features' memory from; None for fresh memory.

    Returns:
        A batch with ``x`` and ``y``; each is None where the graph has none.

    Raises:
        GraphError: A seed does not exist, or the features cannot be converted to this dtype.

    >>> import numpy as np
    >>> from thrifty.graph import Graph
    >>> ring = Graph(
    ...     np.arange(4),
    ...     np.array([1, 2, 0], dtype=np.int32),
    ...     x=torch.eye(3),
    ...     y=torch.tensor([5, 6, 7]),
    ... )
    >>> batch = make_batch(NeighborSampler(ring, [1]), [2, 1])
    >>> batch.nodes, batch.y
    (tensor([2, 1, 0]), tensor([7, 6]))
    >>> bool((batch.x == ring.x[batch.nodes]).all())
    True
    """
    graph = sampler.graph
    batch = sampler.sample(seeds, epoch=epoch, batch=index)
    x = y = None
    if graph.x is not None:
        x = gather_features(graph.x, batch.nodes, dtype=dtype, memory=memory)
    if graph.y is not None:
        y = graph.y.index_select(0, batch.seeds)
    return replace(batch, x=x, y=y)


class GNN(nn.Module):
    """A stack of layers, one for each block of a batch.

    Between two layers come a norm, the activation and dropout, in this order.

    Args:
        layers: Modules called as ``layer(x, block)``, the input layer first.
        activation: Activation after each layer but the last.
        dropout: Probability that a hidden feature is set to zero in training.
        norms: Modules on ``(num, features)``, one for each layer but the last.

    Raises:
        GraphError: There is no layer, the number of norms is not one less than that of layers,
            or ``dropout`` is not a probability.

    >>> from thrifty.graph import Graph, NeighborSampler
    >>> import numpy as np
    >>> ring = Graph(np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32), x=torch.ones(5, 8))
    >>> batch = NeighborSampler(ring, [1, 1]).sample([0, 3])
    >>> model = GNN([SAGE(8, 16), SAGE(16, 3)])
    >>> model.layer(0, ring.x[batch.nodes], batch.blocks[0]).shape
    torch.Size([4, 16])
    """

    trial_rate = "dropout"
    """Name of the attribute that may differ between packed trials."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
        norms: Iterable[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not self.layers:
            raise GraphError("layers is empty; give one for each hop, such as SAGE(100, 256)")
        if not 0.0 <= dropout <= 1.0:
            raise GraphError(f"dropout={dropout!r}; give a probability from 0 to 1")
        self.activation = activation
        self.dropout = dropout
        self.norms = None if norms is None else nn.ModuleList(norms)
        if self.norms is not None and len(self.norms) != len(self.layers) - 1:
            raise GraphError(
                f"{len(self.norms)} norms for {len(self.layers)} layers; give one for each but "
                "the last"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers, and of blocks that a batch must have."""
        return len(self.layers)

    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for the seeds of a batch.

        Args:
            batch: A batch with features ``x``, on the model's device.

        Returns:
            Shape ``(batch.num_seeds, out_features)``. Index it with ``batch.seed_rows`` to get a
            row for each requested seed.

        Raises:
            GraphError: The batch does not have one block for each layer, or has no features.
        """
        if len(batch.blocks) != self.num_layers:
            raise GraphError(
                f"the model has {self.num_layers} layers, and the batch {len(batch.blocks)} "
                "blocks; "
                f"sample with {self.num_layers} fanouts, one for each layer"
            )
        if batch.x is None:
            raise GraphError("the batch has no features; give the graph some: graph.replace(x=...)")
        x = batch.x
        for number, block in enumerate(batch.blocks):
            x = self.layer(number, x, block)
        return x

    def layer(self, number: int, x: Tensor, block: Block) -> Tensor:
        """Apply one layer and the norm, activation and dropout that follow it.

        Args:
            number: Number of the layer; the input layer is 0.
            x: Shape ``(block.num_src, features)``.
            block: Edges from sources to destinations.

        Returns:
            Shape ``(block.num_dst, features)``.
        """
        layer = self.layers[number]
        x = layer(x, block)
        if number == self.num_layers - 1:
            return x
        # The output of these layers may be overwritten: nothing else holds it or needs it for a
        # gradient, unless a hook or a subclass does.
        inplace = self.norms is None and type(layer) in (SAGE, GAT) and not _has_hooks(layer)
        if self.norms is not None:
            x = self.norms[number](x)
        if self.activation is not torch.relu:
            return F.dropout(self.activation(x), self.dropout, training=self.training)
        if self.training:
            return relu_dropout(x, self.dropout, inplace=inplace)  # type: ignore[no-any-return]
        return x.relu_() if inplace else x.relu()


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


@register_rule(neighbor_mean)
def mean(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``neighbor_mean`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=True, own=False))


@register_rule(neighbor_sum)
def total(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``neighbor_sum`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=False, own=False))


@register_rule(mean_and_own)
def beside(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``mean_and_own`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=True, own=True))


@register_rule(relu_dropout)
def drop(group: Group, x: Packed, p: float, *, inplace: bool = False) -> Packed:
    """Apply ``relu_dropout`` with each trial's own key and probability."""
    value = group.first(x)
    if not (uses_kernels(value) and value.is_contiguous()):
        return F.dropout(x.relu_() if inplace else x.relu(), p)  # type: ignore[return-value]
    randomness = group.randomness
    draws = [
        # A trial on its own draws no number either if the rate is 0 or 1.
        (rate, draw_key(generator) if 0.0 < rate < 1.0 else 0)
        for rate, generator in zip(randomness.rates_of(p), randomness.generators, strict=True)
    ]
    out = of_each(value, draws, inplace=inplace)
    if inplace:
        x.value, x.axis = out, 0
        return x
    return group.pack(out)
