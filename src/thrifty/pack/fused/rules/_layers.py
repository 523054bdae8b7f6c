"""Rules of linear layers, of recurrent cells computed as such, of embeddings and dropout.

Whole recurrent layers are refused, since their kernels take one set of weights.

The kernels of layers of bitsandbytes with frozen, quantised weights take no packed tensors, and are
wrong in double precision. Where programs are recorded and where they are tested, such a layer
computes what it is by definition: the product with its weight in full, which is made from the
packed numbers in each step, and again in the backward pass, once for all trials. Trials that train
alone keep the layers' own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.pack._quantized import QuantizedLayer, layer_of, quantized_layers
from thrifty.pack.fused._fusable import (
    DRAWS,
    NO_RECURRENT_RULE,
    RULES,
    UnfusableError,
    register_rule,
)
from thrifty.pack.fused._packed import Group, Packed, by_vmap
from thrifty.pack.fused._randomness import DrawnBy, plain


CACHE_BYTES = 2**23
"""Size up to which an input that all trials share is read again for each of them."""


@register_rule(F.linear)
def linear(group: Group, input: Any, weight: Any, bias: Any = None) -> Packed:
    """Compute ``x @ weight.T + bias`` for each trial.

    A weight that all trials share is multiplied by the rows of all of them in one product.
    """
    if type(weight) is not Packed and type(bias) is not Packed:
        return group.pack(F.linear(input.value, weight, bias), input.axis)
    if type(weight) is not Packed:
        weight = group.pack(group.first(weight))
    w = group.first(weight)
    b = None if bias is None else group.first(bias)
    if type(input) is not Packed:
        shape = input.shape[:-1]
        rows = input.reshape(math.prod(shape), input.shape[-1])
    else:
        x = group.first(input)
        shape = x.shape[1:-1]
        rows = x.reshape(group.size, math.prod(shape), x.shape[-1])
    out = _Linear.apply(rows, w, b)  # type: ignore[no-untyped-call]
    if out.dim() != len(shape) + 2:
        out = out.reshape(group.size, *shape, w.shape[1])
    # otherwise avoid a reshape: writing into a view costs a copy of its gradient
    return group.pack(out)


class _Linear(torch.autograd.Function):
    """A linear layer with its own gradient formula.

    Autograd's formula gives the weight's gradient transposed and copies it. This one does not.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """Compute the layer of all trials.

        Args:
            ctx: The autograd context.
            x: Input, ``[K, N, I]``, or ``[N, I]`` if all trials share it.
            w: Weights, ``[K, O, I]``.
            b: Biases, ``[K, O]``, or None.

        Returns:
            The output, ``[K, N, O]``.
        """
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None
        if _beyond_cache(x):
            return _read_once(x, w, b)
        shared = x if x.dim() == 3 else _for_all(x, w.shape[0])
        if b is None:
            return torch.bmm(shared, w.transpose(1, 2))
        return torch.baddbmm(b[:, None], shared, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, w and b, each in the layout of its tensor."""
        (grad,) = grads
        x, w = ctx.saved_tensors
        grad_x = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(grad, w)
            grad_x = grad_x if x.dim() == 3 else grad_x.sum(0)
        if _beyond_cache(x):
            grad_w = (grad.transpose(1, 2).reshape(-1, x.shape[0]) @ x).view(w.shape)
        else:
            shared = x if x.dim() == 3 else _for_all(x, w.shape[0])
            grad_w = torch.bmm(grad.transpose(1, 2), shared)
        if ctx.has_bias:
            grad_b = grad.sum(1)
        return grad_x, grad_w, grad_b


def _beyond_cache(x: torch.Tensor) -> bool:
    """Return whether ``x`` is shared by all trials and too large for the cache.

    Such an input comes from memory each time that it is read.
    """
    return x.dim() == 2 and x.numel() * x.element_size() > CACHE_BYTES


def _read_once(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Multiply an input that all trials share by the weights of all in one dense product."""
    size, width, _ = w.shape
    flat = w.reshape(size * width, -1)
    out = F.linear(x, flat, None if b is None else b.reshape(-1))
    return out.view(-1, size, width).transpose(0, 1).contiguous()


def _for_all(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unsqueeze(0) if size == 1 else x.expand(size, *x.shape)


@register_rule(F.embedding)
def embedding(
    group: Group,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Packed:
    """Gather rows of each trial's table, at its own indices or at shared ones."""
    if max_norm is not None:
        raise UnfusableError("nn.Embedding(max_norm=...) changes its weights as it reads them")
    if scale_grad_by_freq or sparse:
        option = "sparse" if sparse else "scale_grad_by_freq"
        raise UnfusableError(f"nn.Embedding({option}=True) has no batched rule")
    if type(weight) is not Packed:
        out = F.embedding(input.value, weight, padding_idx)
        return group.pack(out, input.axis)
    indices = group.first(input) if type(input) is Packed else input.unsqueeze(0)
    table = group.first(weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[1]
    rows = _Embedding.apply(table, indices, padding_idx)  # type: ignore[no-untyped-call]
    return group.pack(rows)


@register_rule(torch.index_add, torch.Tensor.index_add)
def index_add(
    group: Group, input: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> Packed:
    """Add rows at each trial's own places, or at shared ones, in one call for all trials."""
    if not input.dim() or (type(index) is Packed and dim % input.dim()):
        named = {"alpha": alpha}
        out: Packed = by_vmap(group, torch.index_add, (input, dim, index, source), named)
        return out
    into, added = group.first(input), group.first(source)
    if type(index) is not Packed:
        dim = dim % input.dim() + 1
        return group.pack(torch.index_add(into, dim, index, added, alpha=alpha))
    places = group.first(index)
    size, num = into.shape[:2]
    rows = _starts(places, size, num) + places
    # torch refuses a place beyond the rows, but here the next trial's rows follow them
    rows = torch.where((places >= 0) & (places < num), rows, size * num)
    flat = torch.index_add(into.flatten(0, 1), 0, rows.flatten(), added.flatten(0, 1), alpha=alpha)
    return group.pack(flat.view(into.shape))


@register_rule(F.embedding_bag)
def embedding_bag(group: Group, *args: Any, **kwargs: Any) -> Packed:
    """Refuse ``nn.EmbeddingBag``."""
    raise UnfusableError("nn.EmbeddingBag has no batched rule")


class _Embedding(torch.autograd.Function):
    """An embedding that reads the tables in place, as views of the flat state.

    ``F.embedding`` would copy them first.
    """

    @staticmethod
    def forward(
        ctx: Any, tables: torch.Tensor, indices: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        """Gather the rows of all trials.

        Args:
            ctx: The autograd context.
            tables: The tables, ``[K, V, D]``.
            indices: Indices, ``[K, ...]``, or ``[1, ...]`` if all trials share them.
            padding: Index whose row gets no gradient; None for none.

        Returns:
            The rows, ``[K, ..., D]``.
        """
        size, num, width = tables.shape
        if tables.stride()[1:] != (width, 1):
            tables = tables.contiguous()
        ctx.save_for_backward(indices)
        ctx.sizes, ctx.padding = tables.shape, padding
        # one overlapping row per element of the memory, so that a row can begin at any element
        jump = tables.stride(0)
        last = (size - 1) * jump + (num - 1) * width
        rows = tables.as_strided((last + 1, width), (1, 1))
        begin = torch.add(_starts(indices, size, jump), indices, alpha=width)
        # torch refuses an index beyond the table, but here the next trial's rows follow it
        begin = torch.where((indices >= 0) & (indices < num), begin, last + 1)
        return rows.index_select(0, begin.reshape(-1)).view(*begin.shape, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the tables."""
        (indices,) = ctx.saved_tensors
        size, num, _ = ctx.sizes
        rows = _starts(indices, size, num) + indices
        if ctx.padding is not None:
            rows = torch.where(indices == ctx.padding, -1, rows)
        grad = torch.ops.aten.embedding_dense_backward(grads[0], rows, size * num, -1, False)
        return grad.view(ctx.sizes), None, None


def _starts(indices: torch.Tensor, size: int, jump: int) -> torch.Tensor:
    """Return ``k * jump`` for each trial ``k``, shaped to broadcast against ``[K, ...]``."""
    starts = torch.arange(size, device=indices.device) * jump
    return starts.view(-1, *[1] * (indices.dim() - 1))


def dropout(noise_shape: Callable[[Any], Sequence[int]]) -> Callable[..., Any]:
    """Return the rule for ``F.dropout`` and similar functions.

    Args:
        noise_shape: Returns the shape of one trial's mask for an input; it broadcasts against the
            input.
    """

    def rule(
        group: Group, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
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


def _draws(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return _active(p, training=training)


for _function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
    DRAWS[_function] = _draws


@register_rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(
    group: Group, input: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Refuse alpha dropout in training."""
    if not _active(p, training=training):
        return input
    raise UnfusableError("nn.AlphaDropout has no batched rule")


def noise_like(
    group: Group, x: torch.Tensor, p: float, *, drawn_by: DrawnBy = "dropout"
) -> torch.Tensor:
    """Return noise for a plain ``[K, B, ...]``, drawn as dropout of ``[B, ...]`` draws it alone."""
    return _noise(group, x.shape[1:], p, x, order=range(x.dim() - 1), drawn_by=drawn_by)


def drops(p: float) -> bool:
    """Return whether any trial may drop something; a rate with a path differs between trials."""
    return hasattr(p, "path") or p != 0.0


def _active(p: float, *, training: bool) -> bool:
    if not 0.0 <= plain(p) <= 1.0:
        raise UnfusableError(f"a dropout probability of {p}")
    return training and drops(p)


def _noise(
    group: Group,
    shape: Sequence[int],
    p: float,
    like: Any,
    *,
    order: Sequence[int],
    drawn_by: DrawnBy,
) -> torch.Tensor:
    """Return noise of shape ``[K, *shape]``.

    Alone, a mask is filled in the order of memory, so it is drawn in that order here.

    Args:
        group: The group of trials.
        shape: Shape of one trial's mask.
        p: The dropout rate.
        like: A tensor of the same dtype and device.
        order: Dimensions of ``shape`` in the memory order of one trial alone, outermost first.
        drawn_by: See ``DropoutMask``.
    """
    if group.rows is not None and shape[0] != group.batch:
        raise UnfusableError(
            "dropout over other rows than the batch's, while batches differ in size"
        )
    return group.randomness.dropout(shape, p, like=like, order=order, drawn_by=drawn_by)


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
    drawn_by: DrawnBy = "dropout" if whole and not inplace else "bernoulli"
    noise = _noise(group, shape, p, x, order=order, drawn_by=drawn_by)
    noise = noise.movedim(0, x.axis)
    if inplace:
        x.value.mul_(noise)
        return x
    return group.pack(x.value * noise, x.axis)


@register_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(group: Group, *args: Any, **kwargs: Any) -> Any:
    """Refuse whole recurrent layers."""
    raise UnfusableError(NO_RECURRENT_RULE)


@register_rule(torch.Tensor.data_ptr)
def data_ptr(group: Group, *args: Any, **kwargs: Any) -> Any:
    """Refuse to say where one trial's tensor lies; on a GPU, recurrent layers ask that first."""
    raise UnfusableError(
        "it asks where a tensor lies in memory; on a GPU, recurrent layers (nn.LSTM, nn.GRU, "
        "nn.RNN) do so, which have no batched rule"
    )


def simple_cell(activation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.rnn_tanh_cell`` or ``torch.rnn_relu_cell``."""

    def rule(
        group: Group, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Packed:
        out: Packed = activation(linear(group, input, w_ih, b_ih) + linear(group, hx, w_hh, b_hh))
        return out

    return rule


@register_rule(torch.gru_cell)
def gru_cell(
    group: Group, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Compute ``nn.GRUCell``."""
    reset_x, update_x, new_x = linear(group, input, w_ih, b_ih).chunk(3, -1)
    reset_h, update_h, new_h = linear(group, hx, w_hh, b_hh).chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + torch.sigmoid(update_x + update_h) * (hx - new)


@register_rule(torch.lstm_cell)
def lstm_cell(
    group: Group, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any]:
    """Compute ``nn.LSTMCell``."""
    gates = linear(group, input, w_ih, b_ih) + linear(group, hx[0], w_hh, b_hh)
    enter, forget, new, leave = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * hx[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


RULES[torch.rnn_tanh_cell] = simple_cell(torch.tanh)
RULES[torch.rnn_relu_cell] = simple_cell(torch.relu)


# -- quantised layers ------------------------------------------------------------------


QUANTIZED_OPERATORS = frozenset({
    "bitsandbytes::dequantize_4bit",
    "bitsandbytes::dequantize_blockwise",
})  # fmt: skip
"""Operators of quantised layers whose results follow from their arguments alone."""


def product(x: Any, bias: Any, layer: QuantizedLayer) -> Any:
    """Compute ``x @ weight.T + bias``.

    Args:
        x: Input, ``[..., in]``.
        bias: A bias that is not trained, ``[out]``, or None.
        layer: The layer.
    """
    if has_torch_function((x,)):
        return handle_torch_function(product, (x,), x, bias, layer)
    return _Product.apply(x, bias, layer)  # type: ignore[no-untyped-call]


@register_rule(product)
def _packed_product(group: Group, x: Packed, bias: Any, layer: QuantizedLayer) -> Packed:
    """Multiply the rows of all trials at once."""
    return group.pack(product(x.value, bias, layer), x.axis)


class _Product(torch.autograd.Function):
    """The product with a weight in full, which is not kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLayer
    ) -> torch.Tensor:
        """Multiply."""
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.weight(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the input."""
        gradient = gradients[0].to(ctx.dtype)
        return torch.matmul(gradient, ctx.layer.weight(ctx.dtype)), None, None


def _quantized_forward(module: Any, x: Any) -> Any:
    """Compute a quantised layer as a product; see ``Linear4bit.forward`` of bitsandbytes."""
    layer = layer_of(module)
    if layer is None or type(module._parameters["weight"]) is Packed:
        raise UnfusableError("its quantised layers are not held once for all trials")
    if not layer.is_product:
        raise UnfusableError("layers in 8 bits round what goes in by the whole batch")
    given = x.dtype
    if given != torch.float64 and getattr(module, "compute_dtype", None) is not None:
        x = x.to(module.compute_dtype)
    bias = module.bias
    apart = bias is not None and (type(bias) is Packed or bias.requires_grad)
    out = product(x, None if apart else bias, layer)
    return (out + bias if apart else out).to(given)


@cache
def _with_product(kind: Any) -> Any:
    """Return a class of layers that differs from another one in how it computes."""
    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "forward": _quantized_forward}
    )


def compute_products(model: torch.nn.Module) -> None:
    """Let the quantised layers of a model compute products with their weights in full."""
    for layer in quantized_layers(model).values():
        kind: Any = type(layer.module)
        # a forward of the user's own may compute anything
        is_known = kind.forward.__module__.startswith("bitsandbytes.")
        if is_known and "forward" not in vars(layer.module):
            layer.module.__class__ = _with_product(kind)


@contextmanager
def computing_products(model: torch.nn.Module) -> Iterator[None]:
    """Let the quantised layers of a model do so within the context."""
    before = {layer.module: type(layer.module) for layer in quantized_layers(model).values()}
    compute_products(model)
    try:
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind
