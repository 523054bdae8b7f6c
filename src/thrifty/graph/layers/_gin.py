"""Graph isomorphism network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thrifty.graph._aggregate import neighbor_sum
from thrifty.graph._block import Block

from ._base import check_input


class GIN(nn.Module):
    """A layer that computes ``mlp((1 + eps) * the node itself + sum of the neighbours)``.

    Graph isomorphism network (Xu et al., ICLR 2019, equation 4.1). It equals PyG's ``GINConv``. The
    ``state_dict`` has the same names (``nn.*``, ``eps``), so either loads the other's.

    ``torch.compile`` leaves the sum out of its graph, because a kernel is not a PyTorch operation.

    Args:
        mlp: module from shape ``(num, in_features)`` to ``(num, out_features)``.
        eps: how much more than a neighbour the node itself counts.
        train_eps: whether ``eps`` is learnt.

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
            x: shape ``(block.num_src, in_features)``.
            block: edges from sources to destinations.

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
