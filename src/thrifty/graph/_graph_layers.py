"""Graph neural network layers: GraphSAGE, GAT, GIN."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core import GraphError, check_integers

from ._aggregate import attended_sum, attention, mean_and_own, neighbor_mean, neighbor_sum
from ._batch import Block


def check_input(
    x: Tensor, block: Block, *, in_features: int | None = None, weight: Tensor | None = None
) -> None:
    """Check that ``x`` fits the block and the layer.

    ``x`` needs a row for each source of the block, the device of the block, and features that fit
    the layer.

    Raises:
        GraphError: ``x`` does not fit.
    """
    if x.dim() != 2 or x.shape[0] != block.num_src:
        raise GraphError(
            f"x has shape {tuple(x.shape)}, and the block {block.num_src} sources: give a row "
            "for each, such as batch.x for batch.blocks[0]"
        )
    if in_features is not None and x.shape[1] != in_features:
        raise GraphError(f"x has {x.shape[1]} features, and the layer takes {in_features}")
    if x.device != block.device:
        raise GraphError(
            f"x lies on {x.device} and the block on {block.device}; move both, as "
            "batch.to(device) does"
        )
    if weight is None:
        if not x.is_floating_point():
            raise GraphError(f"x is {x.dtype}, and features are real numbers; give x.float()")
        return
    if weight.device != x.device:
        raise GraphError(
            f"x lies on {x.device} and the layer on {weight.device}; give "
            f"layer.to({str(x.device)!r}) or move the batch"
        )
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise GraphError(
            f"x is {x.dtype} and the layer {weight.dtype}; give x.to({weight.dtype}), or "
            f"change the layer's with layer.to({x.dtype})"
        )


def check_probability(value: float) -> None:
    """Check that a dropout rate is a probability.

    Raises:
        GraphError: The rate is not a probability.
    """
    if not 0.0 <= value <= 1.0:
        raise GraphError(f"dropout={value!r}; give a probability from 0 to 1")


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
        in_features: Number of features of each source.
        out_features: Number of features of each destination.
        bias: Whether to add a bias.

    Raises:
        GraphError: A size is not positive.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> SAGE(4, 2)(torch.ones(3, 4), block).shape
    torch.Size([1, 2])
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(GraphError, 1, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, 2 * in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_load_state_dict_pre_hook(_from_pyg)  # type: ignore[no-untyped-call]
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
            x: Shape ``(block.num_src, in_features)``, of the layer's dtype.
            block: Edges from sources to destinations.

        Returns:
            Shape ``(block.num_dst, out_features)``.

        Raises:
            GraphError: ``x`` has another shape or dtype, or is on another device.
        """
        check_input(x, block, in_features=self.in_features, weight=self.weight)
        if not self._narrows_first(x, block):
            return F.linear(mean_and_own(x, block), self.weight, self.bias)
        of_neighbors, of_own = self.weight.split(  # type: ignore[no-untyped-call]
            self.in_features, dim=1
        )
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


class GAT(nn.Module):
    """A layer in which each destination weighs its neighbours by the features of both.

    Graph attention (Veličković et al., ICLR 2018, section 2.1). It equals PyG's ``GATConv`` with
    ``add_self_loops=False``. The ``state_dict`` has the same names and shapes (``lin.weight``,
    ``att_src``, ``att_dst``, ``bias``), so either loads the other's. Without neighbours, the
    result is the bias.

    ``torch.compile`` leaves the sums over neighbours out of its graph, because a kernel is not a
    PyTorch operation. There is no second derivative on the CPU in float32 and float64.

    Args:
        in_features: Number of features of each source.
        out_features: Number of features of each destination and head.
        heads: Number of attention heads.
        concat: Whether to put heads side by side; otherwise their mean is taken.
        negative_slope: Slope of the leaky ReLU on the scores.
        dropout: Probability that an edge's weight is set to zero in training.
        bias: Whether to add a bias.

    Raises:
        GraphError: A size is not positive, or ``dropout`` is not a probability.

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
        check_integers(
            GraphError, 1, in_features=in_features, out_features=out_features, heads=heads
        )
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
            x: Shape ``(block.num_src, in_features)``, of the layer's dtype.
            block: Edges from sources to destinations.

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
        out: Tensor = attended_sum(weights, self.lin(x), block)
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
        return f"{self.in_features}, {self.out_features}, heads={self.heads}, concat={self.concat}"


class GIN(nn.Module):
    """A layer that computes ``mlp((1 + eps) * the node itself + sum of the neighbours)``.

    Graph isomorphism network (Xu et al., ICLR 2019, equation 4.1). It equals PyG's ``GINConv``. The
    ``state_dict`` has the same names (``nn.*``, ``eps``), so either loads the other's.

    ``torch.compile`` leaves the sum out of its graph, because a kernel is not a PyTorch operation.

    Args:
        mlp: Module from shape ``(num, in_features)`` to ``(num, out_features)``.
        eps: How much more than a neighbour the node itself counts.
        train_eps: Whether ``eps`` is learnt.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32), num_src=3)
    >>> GIN(nn.Identity())(torch.ones(3, 4), block)
    tensor([[3., 3., 3., 3.]])
    """

    def __init__(self, mlp: nn.Module, *, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.nn = mlp
        self.initial_eps = eps
        start = torch.tensor([float(eps)])
        if train_eps:
            self.eps: Tensor = nn.Parameter(start)
        else:
            self.register_buffer("eps", start)

    def reset_parameters(self) -> None:
        """Reset ``eps`` and the parameters of all submodules that support it."""
        for part in self.nn.modules():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return the new features of the destinations.

        Args:
            x: Shape ``(block.num_src, in_features)``.
            block: Edges from sources to destinations.

        Returns:
            Shape ``(block.num_dst, out_features)``.

        Raises:
            GraphError: ``x`` has another number of rows, or is on another device.
        """
        check_input(x, block)
        own = (1 + self.eps).to(x.dtype) * x[: block.num_dst]
        out: Tensor = self.nn(own + neighbor_sum(x, block))
        return out

    def extra_repr(self) -> str:
        """Return the options that ``repr`` shows."""
        return f"eps={self.initial_eps}, train_eps={isinstance(self.eps, nn.Parameter)}"
