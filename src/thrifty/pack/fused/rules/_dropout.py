"""Rules for dropout, with each trial's own mask, drawn before the step."""

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
    """Return the rule for ``F.dropout`` and similar functions.

    Args:
        noise_shape: Returns the shape of one trial's mask for an input; it broadcasts against the
            input.
    """

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
    """Return a function for the shape of a mask with one number per channel.

    Args:
        without_batch: Rank of an input that has no batch dimension.
    """

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
    """Refuse alpha dropout in training."""
    if not _active(p, training=training):
        return input
    raise UnfusableError("nn.AlphaDropout has no batched rule")


def noise_like(group: Group, x: torch.Tensor, p: float) -> torch.Tensor:
    """Return noise for a plain ``[K, B, ...]``, drawn as dropout of ``[B, ...]`` draws it alone."""
    return _noise(group, x.shape[1:], p, x, order=range(x.dim() - 1))


def drops(p: float) -> bool:
    """Return whether any trial may drop something; a rate with a path differs between trials."""
    return hasattr(p, "path") or p != 0.0


def _active(p: float, *, training: bool) -> bool:
    if not 0.0 <= plain(p) <= 1.0:
        raise UnfusableError(f"a dropout probability of {p}")
    return training and drops(p)


def _noise(
    group: Group, shape: Sequence[int], p: float, like: Any, *, order: Sequence[int]
) -> torch.Tensor:
    """Return noise of shape ``[K, *shape]``.

    Alone, a mask is filled in the order of memory, so it is drawn in that order here.

    Args:
        group: The group of trials.
        shape: Shape of one trial's mask.
        p: The dropout rate.
        like: A tensor of the same dtype and device.
        order: Dimensions of ``shape`` in the memory order of one trial alone, outermost first.
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
    """Return the dimensions that one trial sees in the memory order that it has alone."""
    if x.group.channels_last and x.dim() == 4:  # only the pack uses this layout, not the trial
        return list(range(4))
    strides = [s for d, s in enumerate(x.value.stride()) if d != x.axis]
    with _disable_current_modes():  # torch itself works out the strides
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
