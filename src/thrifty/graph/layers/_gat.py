"""Graph attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.graph._attend import attended_sum, attention
from thrifty.graph._block import Block
from thrifty.graph._check import at_least

from ._base import check_input, check_probability


class GAT(nn.Module):
    """Each destination weighs its neighbours by what both are like.

    Graph attention (Veličković et al., ICLR 2018, section 2.1). Equal to PyG's ``GATConv`` with ``add_self_loops=False``; the ``state_dict`` has the same names
    and shapes (``lin.weight``, ``att_src``, ``att_dst``, ``bias``), so either loads the other's. Without neighbours the result is the bias.

    ``torch.compile`` leaves the sums over neighbours out of its graph: a kernel is no PyTorch operation. There is no second derivative on the CPU in float32 and float64.

    Args:
        in_features: of each source.
        out_features: of each destination and head.
        heads: how many weightings there are.
        concat: whether heads stand side by side; if not, their mean is taken.
        negative_slope: of the leaky ReLU on the scores.
        dropout: probability that an edge's weight is set to zero in training.
        bias: whether to add one.

    Raises:
        GraphError: a size is not positive, or the dropout is no probability.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> GAT(4, 2, heads=3)(torch.ones(3, 4), block).shape
    torch.Size([1, 6])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, in_features=in_features, out_features=out_features, heads=heads)
        check_probability(dropout)
        self.in_features, self.out_features, self.heads = in_features, out_features, heads
        self.concat, self.negative_slope, self.dropout = concat, negative_slope, dropout
        self.lin = nn.Linear(in_features, heads * out_features, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_features))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_features))
        width = heads * out_features if concat else out_features
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew; the bias becomes zero."""
        nn.init.xavier_uniform_(self.lin.weight)
        bound = math.sqrt(6 / (self.heads + self.out_features))
        nn.init.uniform_(self.att_src, -bound, bound)
        nn.init.uniform_(self.att_dst, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """New features of the destinations.

        Args:
            x: shape ``(block.num_src, in_features)``, of the layer's dtype.
            block: who sends to whom.

        Returns:
            Shape ``(block.num_dst, heads * out_features)``, or ``(block.num_dst, out_features)`` without ``concat``.

        Raises:
            GraphError: ``x`` has another shape or dtype, or lies on another device.
        """
        check_input(x, block, in_features=self.in_features, weight=self.lin.weight)
        # a score needs no features of the heads, only a product with this much narrower matrix
        source = F.linear(x, self._scorer(self.att_src))
        destination = F.linear(x[: block.num_dst], self._scorer(self.att_dst))
        weights = attention(source, destination, block, slope=self.negative_slope)
        weights = F.dropout(weights, self.dropout, training=self.training)
        out = attended_sum(weights, self.lin(x), block)
        if not self.concat:
            out = out.view(-1, self.heads, self.out_features).mean(dim=1)
        return out if self.bias is None else out + self.bias

    def _scorer(self, attention_vector: Tensor) -> Tensor:
        """From features to a score for each head; shape ``(heads, in_features)``."""
        weight = self.lin.weight.view(self.heads, self.out_features, self.in_features)
        return torch.einsum("hc,hci->hi", attention_vector[0], weight)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return (
            f"{self.in_features}, {self.out_features}, heads={self.heads}, concat={self.concat}"
        )
