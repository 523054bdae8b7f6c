"""Rules for attention and for losses, which treat the trials as more rows of the batch.

The mean of a loss is over each trial's own rows. The sum over trials then has each trial's own
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.pack.fused._fusable import DRAWS, RULES, UnfusableError, register_rule
from thrifty.pack.fused._packed import Group, Packed, by_vmap
from thrifty.pack.fused._randomness import DrawnBy

from ._layers import drops, linear, noise_like
from ._tensor_operations import mean_of_rows, sum_of_rows


@register_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    group: Group,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Packed:
    """Compute attention in one call over ``K * B`` rows.

    With dropout it is computed step by step, since each trial has its own masks.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    ndim = query.dim()
    leading = {tuple(x.shape[:-2] if not enable_gqa else x.shape[:-3]) for x in (query, key, value)}
    if len(leading) > 1 or ndim < 3:  # query, key and value broadcast against each other
        if drops(dropout_p):
            raise UnfusableError("attention with dropout over batches that broadcast")
        args = (query, key, value, attn_mask)
        return by_vmap(  # type: ignore[no-any-return]
            group, F.scaled_dot_product_attention, args, options
        )
    q, k, v = (group.first(x) for x in (query, key, value))
    shape = q.shape[:2]
    mask = _mask(group, attn_mask, ndim=ndim, batch=shape[1])
    if drops(dropout_p):
        if mask is not None:
            mask = mask.reshape(*(shape if len(mask) > 1 else (1, 1)), *mask.shape[1:])
        return group.pack(_with_dropout(group, q, k, v, mask, dropout_p, **options))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    return group.pack(out.unflatten(0, shape))  # type: ignore[no-untyped-call]


DRAWS[F.scaled_dot_product_attention] = lambda *_, dropout_p=0.0, **__: drops(dropout_p)


def _mask(group: Group, mask: Any, *, ndim: int, batch: int) -> torch.Tensor | None:
    """Return a mask that broadcasts against ``[K * B, ..., L, S]`` with ``ndim`` dimensions."""
    if mask is None:
        return None
    if type(mask) is not Packed:
        if mask.dim() < ndim or mask.shape[0] == 1:
            return mask[(None,) * (ndim - mask.dim())]  # type: ignore[no-any-return]
        return mask.expand(group.size, *mask.shape).flatten(0, 1)  # type: ignore[no-any-return]
    whole = group.first(mask)
    whole = whole[(slice(None), *[None] * (ndim - mask.dim()))]
    return whole.expand(-1, batch, *whole.shape[2:]).flatten(0, 1)


def _with_dropout(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute attention as torch does without a fused kernel, on ``[K, B, ..., L, E]``."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    drawn_by = _drawn_by(q[0], k[0], v[0], None if mask is None else mask[0], **options)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = (q * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    if is_causal:
        if mask is not None:
            raise UnfusableError("attention with both attn_mask and is_causal")
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores + _additive(mask, q.dtype)
    # softmax that gives zeros where everything is masked
    weights: torch.Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return (weights * noise_like(group, weights, dropout_p, drawn_by=drawn_by)) @ v


_KERNELS: Mapping[int, DrawnBy] = {0: "dropout", 2: "attention"}
"""What draws masks in the kernels for attention that ``_fused_sdp_choice`` numbers."""


def _drawn_by(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> DrawnBy:
    """Return what draws the mask of one trial alone.

    Raises:
        UnfusableError: It is a kernel whose masks no function gives.
    """
    with _disable_current_modes():
        if mask is not None:
            mask = mask.expand(*q.shape[:-1], k.shape[-2])
        kernel = torch._fused_sdp_choice(
            q, k, v, mask, 0.5, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if kernel not in _KERNELS:
        raise UnfusableError(
            f"attention with dropout in {q.dtype} on this GPU draws its masks within a kernel that "
            "packs cannot follow"
        )
    return _KERNELS[kernel]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask; True in a boolean mask means that a position may be attended to."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


@register_rule(F.multi_head_attention_forward)
def multi_head_attention(
    group: Group,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Packed, Packed | None]:
    """Compute ``nn.MultiheadAttention``.

    Inputs and outputs are ``[L, B, E]``. In between, the batch comes first.
    """
    if bias_k is not None or bias_v is not None or static_k is not None or static_v is not None:
        raise UnfusableError("nn.MultiheadAttention(add_bias_kv=True) has no batched rule")
    if add_zero_attn:
        raise UnfusableError("nn.MultiheadAttention(add_zero_attn=True) has no batched rule")
    if is_causal and attn_mask is None:
        raise UnfusableError("is_causal is a hint about attn_mask, which is missing")
    batched = query.dim() == 3
    weights = in_proj_weight
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    heads = _project(group, (query, key, value), weights, in_proj_bias, num_heads=num_heads)
    p = dropout_p if training else 0.0
    seen: Packed | None = None
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # trust the hint that attn_mask is causal
    else:
        is_causal = False
    mask = _merged(group, attn_mask, key_padding_mask, like=heads[0])
    if need_weights:
        out, used = _by_hand(group, heads, mask, p)
        used = used.mean(2) if average_attn_weights else used
        seen = group.pack(used if batched else used.squeeze(1))
    else:
        out = scaled_dot_product_attention(group, *heads, mask, p, is_causal).value
    rows = group.pack(out.permute(0, 3, 1, 2, 4).flatten(3))  # [K, L, B, E]
    whole = linear(group, rows, out_proj_weight, out_proj_bias).value
    return group.pack(whole if batched else whole.squeeze(2)), seen


def _project(
    group: Group, inputs: tuple[Any, Any, Any], weights: Any, bias: Any, *, num_heads: int
) -> tuple[Packed, Packed, Packed]:
    """Return queries, keys and values, ``[B, H, L, E / H]`` each."""
    query, key, value = inputs
    b = None if bias is None else group.first(bias)
    if isinstance(weights, tuple):
        parts = [(x, group.first(w), 1) for x, w in zip(inputs, weights, strict=True)]
    else:
        w = group.first(weights)
        if key is not value:
            parts = [(x, part, 1) for x, part in zip(inputs, w.chunk(3, 1), strict=True)]
        elif query is key:
            parts = [(query, w, 3)]
        else:
            num = w.shape[1] // 3
            parts = [(query, w[:, :num], 1), (key, w[:, num:], 2)]
    out: list[Packed] = []
    begin = 0
    for x, part, num in parts:
        end = begin + part.shape[1]
        shift = None if b is None else group.pack(b[:, begin:end])
        y = linear(group, _batch_first(group, x), group.pack(part), shift).value
        y = y.unflatten(3, (num, num_heads, -1)).transpose(2, 4)  # [K, B, H, num, L, E / H]
        out += [group.pack(t) for t in y.unbind(3)]
        begin = end
    return out[0], out[1], out[2]


def _batch_first(group: Group, x: Any) -> Any:
    if type(x) is not Packed:
        return x.transpose(0, 1) if x.dim() == 3 else x.unsqueeze(0)
    whole = group.first(x)
    return group.pack(whole.transpose(1, 2) if x.dim() == 3 else whole.unsqueeze(1))


def _merged(group: Group, attention: Any, padding: Any, *, like: Packed) -> Any:
    """Return both masks of ``nn.MultiheadAttention`` as one additive mask.

    It has four dimensions and is packed if either mask is.
    """
    batch, num_heads = like.shape[:2]
    masks = []
    if attention is not None:
        size = (1, 1) if attention.dim() == 2 else (batch, num_heads)
        masks.append(_added(group, attention, (*size, *attention.shape[-2:]), like.dtype))
    if padding is not None:
        masks.append(_added(group, padding, (batch, 1, 1, padding.shape[-1]), like.dtype))
    if len(masks) < 2:
        return masks[0] if masks else None
    if any(type(mask) is Packed for mask in masks):
        return group.pack(group.first(masks[0]) + group.first(masks[1]))
    return masks[0] + masks[1]


def _added(group: Group, mask: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return an additive mask of a given shape.

    Unlike in ``_additive``, True in a boolean mask means that a position must not be attended to.
    """
    plain = group.first(mask) if type(mask) is Packed else mask
    if plain.dtype == torch.bool:
        plain = _additive(~plain, dtype)
    if type(mask) is Packed:
        return group.pack(plain.reshape(group.size, *shape))
    return plain.reshape(shape)


def _by_hand(
    group: Group, heads: tuple[Packed, Packed, Packed], mask: Any, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention and its weights after dropout."""
    q, k, v = (group.first(x) for x in heads)
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
    if mask is not None:
        scores = scores + (group.first(mask) if type(mask) is Packed else mask)
    weights = F.softmax(scores, -1)
    if drops(p):
        weights = weights * noise_like(group, weights, p)
    return weights @ v, weights


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
