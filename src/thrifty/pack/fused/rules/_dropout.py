"""Dropout: each trial's own mask, drawn before the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._randomness import plain
from thrifty.pack.fused._registry import RULES, UnfusableError, register_rule


def dropout(noise_shape: Callable[[Any], Sequence[int]]) -> Callable[..., Any]:
    """The rule of ``F.dropout`` and its kin; ``noise_shape(input)`` is what broadcasts against the input."""

    def rule(
        group: Group,
        input: Any,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        if not _active(p, training=training):
            return input
        return _drop(group, input, p, shape=noise_shape(input), inplace=inplace)

    return rule


def _of_channels(*, without_batch: int | None) -> Callable[[Any], Sequence[int]]:
    """One number for a whole channel; ``without_batch`` is the rank of an input that has no batch."""

    def shape(x: Any) -> Sequence[int]:
        num_kept = 1 if x.dim() == without_batch else 2
        return (*x.shape[:num_kept], *[1] * (x.dim() - num_kept))

    return shape


RULES[F.dropout] = dropout(lambda x: x.shape)
for _function, _rank in ((F.dropout1d, 2), (F.dropout2d, None), (F.dropout3d, 4)):
    RULES[_function] = dropout(_of_channels(without_batch=_rank))


@register_rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(
    group: Group,
    input: Any,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Refused in training."""
    if not _active(p, training=training):
        return input
    raise UnfusableError("nn.AlphaDropout has no batched rule")


def noise_like(group: Group, x: torch.Tensor, p: float) -> torch.Tensor:
    """Noise for a plain ``[K, B, ...]``, drawn as dropout of ``[B, ...]`` draws it alone."""
    return _noise(group, x.shape[1:], p, x, order=range(x.dim() - 1))


def drops(p: float) -> bool:
    """Whether any trial may drop something: a rate with a path is each one's own."""
    return hasattr(p, "path") or p != 0.0


def _active(p: float, *, training: bool) -> bool:
    if not 0.0 <= plain(p) <= 1.0:
        raise UnfusableError(f"a dropout probability of {p}")
    return training and drops(p)


def _noise(
    group: Group, shape: Sequence[int], p: float, like: Any, *, order: Sequence[int]
) -> torch.Tensor:
    """Noise of shape ``[K, *shape]``; ``order`` are the dimensions of ``shape`` as they lie in memory alone, outermost first.

    Alone, a mask is filled in the order of memory.
    """
    if group.rows is not None and shape[0] != group.batch:
        raise UnfusableError(
            "dropout over other rows than the batch's, while batches differ in size"
        )
    stored = [shape[d] for d in order]
    noise = group.randomness.dropout(stored, p, dtype=like.dtype, device=like.device)
    if list(order) == sorted(order):
        return noise
    draws = group.randomness.draws
    with _disable_current_modes():
        noise = noise.permute(0, *[1 + list(order).index(d) for d in range(len(order))])
    draws[-1] = replace(draws[-1], noise=noise)
    return noise


def _order(x: Packed) -> list[int]:
    """The dimensions that one trial sees, as they lie in memory."""
    if x.group.channels_last and x.dim() == 4:  # it is the pack that lays images out so
        return list(range(4))
    strides = [s for d, s in enumerate(x.value.stride()) if d != x.axis]
    with _disable_current_modes():  # torch knows how
        alone = torch.empty_strided(x.shape, strides, device="meta")
        dense = torch.empty_like(alone).stride()
    return sorted(range(len(dense)), key=lambda d: (-dense[d], x.shape[d] != 1))


def _drop(group: Group, x: Packed, p: float, *, shape: Sequence[int], inplace: bool) -> Packed:
    whole = tuple(shape) == tuple(x.shape)
    order = _order(x) if whole else range(len(shape))
    noise = _noise(group, shape, p, x, order=order).movedim(0, x.axis)
    if inplace:
        x.value.mul_(noise)
        return x
    return group.pack(x.value * noise, x.axis)
