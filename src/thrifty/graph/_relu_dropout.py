"""ReLU and dropout at once: what stands between two layers, and costs as much as they do if each is a pass of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ._aggregate import uses_kernels
from ._by_rows import by_elements
from .kernels import _relu_dropout as kernels


_NUM_DRAWS = 2**32


@torch.compiler.disable
def relu_dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """``dropout(relu(x), p)`` in training: an element stays with probability ``1 - p``, and is then divided by it.

    Draws are a function of one number from PyTorch's generator on the CPU, so that ``torch.manual_seed`` holds for them; they are not
    those of ``torch.nn.functional.dropout``, and do not depend on the number of threads.

    Args:
        x: any shape.
        p: probability of zero.
        inplace: whether to write over ``x``.

    >>> relu_dropout(torch.tensor([-1.0, 2.0]), 1.0)
    tensor([0., 0.])
    """
    if not (uses_kernels(x) and x.is_contiguous() and 0.0 < p < 1.0):
        return F.dropout(x.relu_() if inplace else x.relu(), p)
    (key,) = torch.randint(2**63 - 1, (1,)).tolist()
    return _ReluDropout.apply(x, p, key, inplace)  # type: ignore[no-any-return, no-untyped-call]


class _ReluDropout(Function):
    @staticmethod
    def forward(x: Tensor, p: float, key: int, inplace: bool) -> Tensor:  # noqa: FBT001, PLR0917 -- apply() takes no keywords
        out = x if inplace else torch.empty_like(x)
        draws = np.uint64(key), np.uint64(round(p * _NUM_DRAWS)), 1 / (1 - p)
        by_elements(kernels.relu_dropout, _flat(x), *draws, _flat(out), num=x.numel())
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, p, _, inplace = inputs
        ctx.scale = 1 / (1 - p)
        if inplace:
            ctx.mark_dirty(x)
        # what was dropped and what was negative is zero, what stayed is not: no mask has to be kept
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,), grad = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():
            # somebody wants to differentiate again
            passed = torch.where(out <= 0, 0.0, grad * ctx.scale)
            return passed, None, None, None
        grad = grad.contiguous()
        passed = torch.empty_like(grad)
        arrays = _flat(out), _flat(grad), ctx.scale, _flat(passed)
        by_elements(kernels.relu_dropout_back, *arrays, num=grad.numel())
        return passed, None, None, None


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.detach().view(-1).numpy()
