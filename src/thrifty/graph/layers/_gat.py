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
    """A layer in which each destination weighs its neighbours by the features of both.

    Graph attention (Veličković et al., ICLR 2018, section 2.1). It equals PyG's ``GATConv`` with
    ``add_self_loops=False``. The ``state_dict`` has the same names and shapes (``lin.weight``,
    ``att_src``, ``att_dst``, ``bias``), so either loads the other's. Without neighbours, the
    result is the bias.

    ``torch.compile`` leaves the sums over neighbours out of its graph, because a kernel is not a
    PyTorch operation. There is no second derivative on the CPU in float32 and float64.

    Args:
        in_features: number of features of each source.
        out_features: number of features of each destination and head.
        heads: number of attention heads.
        concat: whether to put heads side by side; otherwise their mean is taken.
        negative_slope: slope of the leaky ReLU on the scores.
        dropout: probability that an edge's weight is set to zero in training.
        bias: whether to add a bias.

    Raises:
        GraphError: a size is not positive, or ``dropout`` is not a probability.

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
        """Reset all parameters to new random values; the bias becomes zero."""
        nn.init.xavier_uniform_(self.lin.weight)
        bound = math.sqrt(6 / (self.heads + self.out_features))
        nn.init.uniform_(self.att_src, -bound, bound)
        nn.init.uniform_(self.att_dst, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return the new features of the destinations.

        Args:
            x: shape ``(block.num_src, in_features)``, of the layer's dtype.
            block: edges from sources to destinations.

        Returns:
            Shape ``(block.num_dst, heads * out_features)``, or
            ``(block.num_dst, out_features)`` without ``concat``.

        Raises:
            GraphError: ``x`` has another shape or dtype, or is on another device.
        """
        check_input(x, block, in_features=self.in_features, weight=self.lin.weight)
        # A score does not need the heads' features, only a product with this much narrower matrix.
        source = F.linear(x, self._scorer(self.att_src))
        destination = F.linear(x[: block.num_dst], self._scorer(self.att_dst))
        weights = attention(source, destination, block, slope=self.negative_slope)
        weights = F.dropout(weights, self.dropout, training=self.training)
        out = attended_sum(weights, self.lin(x), block)
        if not self.concat:
            out = out.view(-1, self.heads, self.out_features).mean(dim=1)
        return out if self.bias is None else out + self.bias

    def _scorer(self, attention_vector: Tensor) -> Tensor:
        """Return the matrix from features to a score for each head.

        Its shape is ``(heads, in_features)``.
        """
        weight = self.lin.weight.view(self.heads, self.out_features, self.in_features)
        return torch.einsum("hc,hci->hi", attention_vector[0], weight)

    def extra_repr(self) -> str:
        """Return the options that ``repr`` shows."""
        return (
            f"{self.in_features}, {self.out_features}, heads={self.heads}, concat={self.concat}"
        )
