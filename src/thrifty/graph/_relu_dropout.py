"""ReLU and dropout in one pass.

They stand between two layers, and would cost as much as the layers if each were its own pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function_unary

from ._aggregate import uses_kernels
from ._by_rows import by_elements
from .kernels import _aggregate as kernels


_NUM_DRAWS = 2**32


@torch.compiler.disable
def relu_dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Return ``dropout(relu(x), p)`` as in training.

    An element is kept with probability ``1 - p`` and then divided by it. The draws are a function
    of one number from PyTorch's CPU generator, so they follow ``torch.manual_seed``. They are not
    those of ``torch.nn.functional.dropout``, and do not depend on the number of threads.

    Args:
        x: input of any shape.
        p: probability that an element is set to zero.
        inplace: whether to overwrite ``x``.

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
        x: contiguous; its first dimension counts the trials, unless there is only one.
        draws: probability and key of each trial.
        inplace: whether to overwrite ``x``.
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
