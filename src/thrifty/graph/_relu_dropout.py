"""ReLU and dropout at once: what stands between two layers, and costs as much as they do if each is a pass of its own."""

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
    if has_torch_function_unary(x):
        return handle_torch_function(relu_dropout, (x,), x, p, inplace=inplace)  # type: ignore[no-any-return]
    if not (uses_kernels(x) and x.is_contiguous() and 0.0 < p < 1.0):
        return F.dropout(x.relu_() if inplace else x.relu(), p)
    return of_each(x, [(p, draw_key())], inplace=inplace)


def draw_key(generator: torch.Generator | None = None) -> int:
    """The number that a mask is a function of."""
    (key,) = torch.randint(2**63 - 1, (1,), generator=generator).tolist()
    return int(key)


def of_each(x: Tensor, draws: Sequence[tuple[float, int]], *, inplace: bool) -> Tensor:
    """The same for several trials, each with its probability, 0 and 1 included, and its key.

    Args:
        x: contiguous; its first dimension counts the trials, unless there is but one.
        draws: of each trial.
        inplace: whether to write over ``x``.
    """
    return _ReluDropout.apply(x, tuple(draws), inplace)  # type: ignore[no-any-return, no-untyped-call]


class _ReluDropout(Function):
    @staticmethod
    def forward(x: Tensor, draws: Sequence[tuple[float, int]], inplace: bool) -> Tensor:  # noqa: FBT001 -- apply() takes no keywords
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
        # what was dropped and what was negative is zero, what stayed is not: no mask has to be kept
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,), grad, num = ctx.saved_tensors, grads[0], len(ctx.scales)
        if torch.is_grad_enabled():
            # somebody wants to differentiate again
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
    """The elements of each trial."""
    return iter(tensor.detach().view(num, -1).numpy())
