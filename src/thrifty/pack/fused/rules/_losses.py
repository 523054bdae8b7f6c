"""Rules for losses: the mean is over each trial's own rows.

The sum over trials then has each trial's own gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._fusable import RULES, UnfusableError
from thrifty.pack.fused._packed import Group, Packed, by_vmap

from ._tensor_operations import mean_of_rows, sum_of_rows


PADDED = "while batches differ in size"
WEIGHTED_BY_ELEMENT = frozenset({
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.multi_margin_loss,
    F.multilabel_soft_margin_loss,
})  # fmt: skip
"""Losses whose weights scale elements and do not change what the sum is divided by."""


def of_classes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``F.cross_entropy`` and ``F.nll_loss``: one call over ``K * B`` rows."""

    def rule(group: Group, input: Any, target: Any, weight: Any = None, **kwargs: Any) -> Packed:
        if target.dtype.is_floating_point:  # with probabilities, weights belong to elements
            kwargs["weight"] = weight
            if group.rows is None:
                return by_vmap(  # type: ignore[no-any-return]
                    group, function, (input, target), kwargs
                )
            return _by_rows(group, function, (input, target), kwargs)
        if type(weight) is Packed or input.dim() < 2 or _is_legacy(kwargs):
            if group.rows is not None:
                raise UnfusableError(f"these options of {function.__name__} {PADDED}")
            return by_vmap(  # type: ignore[no-any-return]
                group, function, (input, target), {"weight": weight, **kwargs}
            )
        labels = group.first(target)
        reduction = kwargs.pop("reduction", "mean")
        rows = group.first(input).flatten(0, 1), labels.flatten(0, 1)
        losses = function(*rows, weight=weight, reduction="none", **kwargs).view(labels.shape)
        if reduction != "mean":
            return _reduced(group, losses, reduction)
        counted = labels != kwargs.get("ignore_index", -100)
        if weight is not None:
            counted = counted * weight[torch.where(counted, labels, 0)]
        if group.rows is None:
            return group.pack(losses.flatten(1).sum(1) / counted.flatten(1).sum(1))
        share = mean_of_rows(group, counted.to(losses.dtype))
        return group.pack(mean_of_rows(group, losses) / share)

    return rule


def of_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for other losses, which go through vmap.

    Where batches differ in size, losses are computed row by row, then reduced over each trial's own
    rows.
    """

    def rule(group: Group, *args: Any, **kwargs: Any) -> Packed:
        # vmap has no good rule for losses where only one argument differs from trial to trial
        args = tuple(group.pack(group.first(x)) if isinstance(x, torch.Tensor) else x for x in args)
        if group.rows is None:
            return by_vmap(group, function, args, kwargs)  # type: ignore[no-any-return]
        weighted = kwargs.get("weight") is not None and function not in WEIGHTED_BY_ELEMENT
        if weighted or _is_legacy(kwargs):
            raise UnfusableError(f"these options of {function.__name__} {PADDED}")
        return _by_rows(group, function, args, kwargs)

    return rule


def _is_legacy(options: dict[str, Any]) -> bool:
    return options.get("size_average") is not None or options.get("reduce") is not None


def _by_rows(
    group: Group, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Packed:
    reduction = kwargs.get("reduction", "mean")
    each = group.first(by_vmap(group, function, args, {**kwargs, "reduction": "none"}))
    if reduction == "batchmean":  # of F.kl_div
        each = each.flatten(2).sum(2) if each.dim() > 2 else each
        reduction = "mean"
    return _reduced(group, each, reduction)


def _reduced(group: Group, losses: torch.Tensor, reduction: str) -> Packed:
    if reduction == "none":
        return group.pack(losses)
    if reduction == "mean":
        return group.pack(mean_of_rows(group, losses))
    return group.pack(sum_of_rows(group, losses))


def divergence(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> torch.Tensor:
    """Compute ``F.kl_div`` from operations that vmap supports."""
    if log_target:
        each = target.exp() * (target - input)
    else:
        each = torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return each.sum() / input.shape[0]
    return _whole(each, reduction)


def gaussian(
    input: torch.Tensor,
    target: torch.Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.gaussian_nll_loss`` without its check of the sign of ``var``."""
    if isinstance(var, torch.Tensor):
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        var = var + (var.clamp(min=eps) - var).detach()  # gradients pass the clamp, as in torch
    else:
        var = torch.full_like(input, max(var, eps))
    each = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _whole(each + 0.5 * math.log(2 * math.pi) if full else each, reduction)


def _whole(each: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.mean()


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(group: Group, *args: Any, **kwargs: Any) -> Any:
        if group.rows is not None:
            raise UnfusableError(f"{function.__name__} {PADDED}")
        return by_vmap(group, function, args, kwargs)

    return rule


_function: Callable[..., Any]
for _function in (F.cross_entropy, F.nll_loss):
    RULES[_function] = of_classes(_function)
for _function in (
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss,
    F.hinge_embedding_loss, F.huber_loss, F.l1_loss,
    F.margin_ranking_loss, F.mse_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss,
    F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
):  # fmt: skip
    RULES[_function] = of_elements(_function)
RULES[F.kl_div] = of_elements(divergence)
RULES[F.gaussian_nll_loss] = of_elements(gaussian)
RULES[F.ctc_loss] = _refused(F.ctc_loss)
