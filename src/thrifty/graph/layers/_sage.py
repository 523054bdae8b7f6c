"""GraphSAGE with the mean of the neighbours."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.graph._aggregate import mean_and_own, neighbor_mean
from thrifty.graph._block import Block
from thrifty.graph._check import at_least

from ._base import check_input


_SUM_COST = 8
"""Number of a matrix product's multiply-adds that take as long as one addition over an edge."""


class SAGE(nn.Module):
    """A layer for ``weight @ [mean of the neighbours | the node itself] + bias``.

    It takes one matrix product. GraphSAGE (Hamilton et al., NeurIPS 2017, section 3.3, mean
    aggregator, weights for the node and its neighbours). It equals PyG's ``SAGEConv``, whose
    ``state_dict`` (``lin_l``, ``lin_r``) can be loaded. Without neighbours, the mean is zero. The
    layer makes features narrower before averaging them where that costs less.

    In a batch that several trials share (``Batch.shared``), the mean of the input is computed once
    for all of them, until the features change or are freed.

    ``torch.compile`` leaves the mean out of its graph, because a kernel is not a PyTorch operation.

    Args:
        in_features: number of features of each source.
        out_features: number of features of each destination.
        bias: whether to add a bias.

    Raises:
        GraphError: a size is not positive.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> SAGE(4, 2)(torch.ones(3, 4), block).shape
    torch.Size([1, 2])
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        at_least(1, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, 2 * in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_load_state_dict_pre_hook(_from_pyg)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters to new random values, as two ``nn.Linear`` would."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return the new features of the destinations.

        Args:
            x: shape ``(block.num_src, in_features)``, of the layer's dtype.
            block: edges from sources to destinations.

        Returns:
            Shape ``(block.num_dst, out_features)``.

        Raises:
            GraphError: ``x`` has another shape or dtype, or is on another device.
        """
        check_input(x, block, in_features=self.in_features, weight=self.weight)
        if not self._narrows_first(x, block):
            return F.linear(mean_and_own(x, block), self.weight, self.bias)
        of_neighbors, of_own = self.weight.split(self.in_features, dim=1)
        own = F.linear(x[: block.num_dst], of_own, self.bias)
        return own + neighbor_mean(F.linear(x, of_neighbors), block)

    def _narrows_first(self, x: Tensor, block: Block) -> bool:
        """Return whether multiplying before averaging costs less.

        The answer depends only on sizes and on what is differentiated, so that a model does the
        same each time.
        """
        if block.shared and not x.requires_grad:
            return False
        # The products are forward, the gradient of the weights, and the gradient of x. Without
        # gradients, the order stays that of training.
        products = 2 + x.requires_grad
        matrix = self.in_features * self.out_features
        wide = (
            products * 2 * block.num_dst * matrix
            + (1 + x.requires_grad) * _SUM_COST * block.num_edges * self.in_features
        )
        narrow = (
            products * (block.num_src + block.num_dst) * matrix
            + 2 * _SUM_COST * block.num_edges * self.out_features
        )
        return narrow < wide

    def extra_repr(self) -> str:
        """Return the options that ``repr`` shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def _from_pyg(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    neighbors, own = prefix + "lin_l.weight", prefix + "lin_r.weight"
    if neighbors in state and own in state:
        state[prefix + "weight"] = torch.cat([state.pop(neighbors), state.pop(own)], dim=1)
        if prefix + "lin_l.bias" in state:
            state[prefix + "bias"] = state.pop(prefix + "lin_l.bias")
