"""A stack of graph layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from thrifty.core import GraphError

from ._batch import Batch
from ._block import Block
from ._layers import GAT, SAGE
from ._relu_dropout import relu_dropout


class GNN(nn.Module):
    """A stack of layers, one for each block of a batch.

    Between two layers come a norm, the activation and dropout, in this order.

    Args:
        layers: modules called as ``layer(x, block)``, the input layer first.
        activation: activation after each layer but the last.
        dropout: probability that a hidden feature is set to zero in training.
        norms: modules on ``(num, features)``, one for each layer but the last.

    Raises:
        GraphError: there is no layer, the number of norms is not one less than that of layers,
            or ``dropout`` is not a probability.

    >>> from thrifty.graph import Graph, NeighborSampler
    >>> import numpy as np
    >>> ring = Graph(
    ...     np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32), x=torch.ones(5, 8)
    ... )
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
            batch: a batch with features ``x``, on the model's device.

        Returns:
            Shape ``(batch.num_seeds, out_features)``. Index it with ``batch.seed_rows`` to get a
            row for each requested seed.

        Raises:
            GraphError: the batch does not have one block for each layer, or has no features.
        """
        if len(batch.blocks) != self.num_layers:
            raise GraphError(
                f"the model has {self.num_layers} layers, and the batch {len(batch.blocks)} "
                "blocks; "
                f"sample with {self.num_layers} fanouts, one for each layer"
            )
        if batch.x is None:
            raise GraphError(
                "the batch has no features; give the graph some: graph.replace(x=...)"
            )
        x = batch.x
        for number, block in enumerate(batch.blocks):
            x = self.layer(number, x, block)
        return x

    def layer(self, number: int, x: Tensor, block: Block) -> Tensor:
        """Apply one layer and the norm, activation and dropout that follow it.

        Args:
            number: number of the layer; the input layer is 0.
            x: shape ``(block.num_src, features)``.
            block: edges from sources to destinations.

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
            return relu_dropout(x, self.dropout, inplace=inplace)
        return x.relu_() if inplace else x.relu()


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or torch_module._has_any_global_hook()
    )
