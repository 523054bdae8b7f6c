"""Rules for operations on tensors: pointwise functions, views and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._fusable import RULES, UnfusableError, register_rule
from thrifty.pack.fused._packed import Group, Packed, by_vmap


NAMES = (
    "abs", "add", "addcdiv", "addcmul", "atan", "ceil", "clamp", "clamp_max", "clamp_min", "clip",
    "cos", "cosh", "deg2rad", "div", "divide", "eq", "erf", "erfc", "exp", "exp2", "expm1",
    "float_power", "floor", "fmod", "frac", "ge", "gt", "hardshrink", "isfinite", "isnan", "isinf",
    "le", "lerp", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "multiply",
    "nan_to_num", "ne", "neg", "negative", "pow", "reciprocal", "relu", "remainder", "round",
    "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "sub", "subtract", "tan", "tanh",
    "true_divide", "trunc", "where", "xlogy", "celu", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu6", "selu", "silu", "softplus",
    "softshrink", "softsign", "tanhshrink", "threshold", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__",
    "__neg__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "detach", "clone", "contiguous", "float",
    "double", "half", "bfloat16", "long", "int", "bool", "type_as", "to",
)  # fmt: skip

IN_PLACE = (
    "add_", "sub_", "mul_", "div_", "relu_", "clamp_", "clamp_min_", "clamp_max_", "copy_", "fill_",
    "zero_", "pow_", "sqrt_", "exp_", "neg_", "sigmoid_", "tanh_", "lerp_", "addcmul_", "addcdiv_",
    "leaky_relu_", "elu_", "selu_", "masked_fill_", "celu_", "threshold_", "hardtanh_", "__iadd__",
    "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__", "__ixor__", "abs_",
    "ceil_", "floor_", "round_", "sign_", "rsqrt_", "reciprocal_", "square_", "log_", "sin_",
    "cos_", "clip_", "multiply_", "subtract_", "divide_", "nan_to_num_",
)  # fmt: skip


def lined_up(args: tuple[Any, ...]) -> tuple[list[Any], int]:
    """Return the plain tensors of arguments that broadcast against each other, and the trial axis.

    The trial axis is that of the packed argument with the most dimensions, or 0 if a shared tensor
    has more.
    """
    packed = [x for x in args if type(x) is Packed]
    ndim = max(x.dim() for x in args if isinstance(x, torch.Tensor))
    widest = max(packed, key=lambda x: (x.ndim, x.axis > 0))
    axis = widest.axis if widest.ndim == ndim else 0
    return [_line_up(x, ndim=ndim, axis=axis) for x in args], axis


def _line_up(x: Any, *, ndim: int, axis: int) -> Any:
    if type(x) is Packed:
        value = x.value
        if x.ndim < ndim:
            value = value.movedim(x.axis, 0)
            missing = ndim - x.ndim
            value = value[(slice(None), *[None] * missing)]
            return value.movedim(0, axis)
        return value if x.axis == axis else value.movedim(x.axis, axis)
    if isinstance(x, torch.Tensor) and x.dim() > ndim - axis:
        return x.unsqueeze(x.dim() - (ndim - axis))
    return x


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for an element-wise function."""

    def rule(group: Group, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) for x in kwargs.values()):
            return by_vmap(group, function, args, kwargs)
        plain, axis = lined_up(args)
        return group.pack(function(*plain, **kwargs), axis)

    return rule


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for a function that changes its first argument."""

    def rule(group: Group, target: Any, *args: Any, **kwargs: Any) -> Any:
        if type(target) is not Packed:
            raise UnfusableError(
                f"{function.__name__} writes what differs from trial to trial into a tensor "
                "that they share"
            )
        where = {"ndim": target.ndim, "axis": target.axis}
        others = [_line_up(x, **where) for x in args]
        named = {name: _line_up(x, **where) for name, x in kwargs.items()}
        function(target.value, *others, **named)
        return target

    return rule


@register_rule(torch.Tensor.__setitem__)
def setitem(group: Group, target: Any, index: Any, values: Any) -> None:
    """Write values into a slice, or where a mask holds."""
    if type(target) is not Packed:
        raise UnfusableError("it writes what differs from trial to trial into a shared tensor")
    if (
        isinstance(index, torch.Tensor)
        and index.dtype == torch.bool
        and index.dim() == target.dim()
    ):
        if isinstance(values, torch.Tensor) and values.dim():
            raise UnfusableError("it writes a tensor where a mask holds")
        in_place(torch.Tensor.masked_fill_)(group, target, index, values)
        return
    places = index if isinstance(index, tuple) else (index,)
    if any(isinstance(place, torch.Tensor | list) for place in places):
        raise UnfusableError("it writes to places that a tensor or a list names")
    part = group.pack(group.first(target)[(slice(None), *places)])
    in_place(torch.Tensor.copy_)(
        group, part, torch.as_tensor(values) if not isinstance(values, torch.Tensor) else values
    )


def _register_pointwise() -> None:
    for home in (torch, torch.Tensor, F):
        for name, kind in (*[(n, pointwise) for n in NAMES], *[(n, in_place) for n in IN_PLACE]):
            function = getattr(home, name, None)
            if callable(function) and (home is torch.Tensor or not name.startswith("__")):
                RULES[function] = kind(function)


_register_pointwise()


@register_rule(torch.numel)
def numel(group: Group, input: Packed) -> int:
    """Return the number of elements of one trial's tensor."""
    return input.numel()


def query(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for a function of a tensor's dtype."""

    def rule(group: Group, input: Packed) -> Any:
        return function(input.value)

    return rule


@register_rule(torch._nested_tensor_from_mask_left_aligned)
def left_aligned(group: Group, input: Any, mask: Any) -> bool:
    """Return False with gradients on; refuse without gradients.

    ``nn.TransformerEncoder`` asks this in evaluation. Alone and without gradients, it gives zeros
    for padding.
    """
    if torch.is_grad_enabled():
        return False
    raise UnfusableError(
        "nn.TransformerEncoder evaluates on nested tensors; pass enable_nested_tensor=False"
    )


_function: Callable[..., Any]
for _function in (torch.is_floating_point, torch.is_complex):
    RULES[_function] = query(_function)


def like(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.zeros_like`` and similar functions."""

    def rule(group: Group, input: Packed, *args: Any, **kwargs: Any) -> Packed:
        return group.pack(function(input.value, *args, **kwargs), input.axis)

    return rule


def new(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.Tensor.new_zeros`` and similar functions."""

    def rule(group: Group, input: Packed, size: Any, *args: Any, **kwargs: Any) -> Packed:
        if isinstance(size, int):
            size, args = (size, *args), ()
        return group.pack(function(input.value, (group.size, *size), *args, **kwargs))

    return rule


for _function in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like):
    RULES[_function] = like(_function)
for _function in (
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
):
    RULES[_function] = new(_function)


@register_rule(torch.Tensor.view, torch.Tensor.reshape, torch.reshape)
def reshape(group: Group, input: Packed, *shape: Any, **kwargs: Any) -> Any:
    """Compute ``view`` and ``reshape``."""
    wanted = kwargs.get("shape", kwargs.get("size", shape))
    if len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        return group.pack(input.value.view(wanted[0]), input.axis)
    if len(wanted) == 1 and not isinstance(wanted[0], int):
        wanted = wanted[0]
    return _reshaped(group, input, [int(n) for n in wanted])


@register_rule(torch.flatten, torch.Tensor.flatten)
def flatten(group: Group, input: Packed, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Compute ``flatten``."""
    shape = input.shape
    if not shape:
        return _reshaped(group, input, [1])
    first, last = start_dim % len(shape), end_dim % len(shape)
    merged = shape[first : last + 1].numel()
    return _reshaped(group, input, [*shape[:first], merged, *shape[last + 1 :]])


def _reshaped(group: Group, x: Packed, shape: Sequence[int]) -> Packed:
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape = [x.numel() // known if n == -1 else n for n in shape]
    if x.axis == 1 and len(shape) > 1 and shape[0] == x.shape[0]:
        if group.channels_last and x.dim() == 4:  # restore the memory layout that it has alone
            x = group.pack(x.value.contiguous(), 1)
        return group.pack(x.value.reshape(shape[0], group.size, *shape[1:]), 1)
    return group.pack(group.first(x).reshape(group.size, *shape))


OTHERS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        ("all", "amax", "amin", "any", "argmax", "argmin", "cummax", "cummin", "cumprod", "cumsum",
         "logcumsumexp", "logsumexp", "max", "median", "min", "nanmean", "nanmedian", "nansum",
         "prod", "softmax", "log_softmax", "softmin", "std", "std_mean", "var", "var_mean"),
        (0, None),
    ),
    **dict.fromkeys(("argsort", "mode", "sort"), (0, -1)),
    **dict.fromkeys(("norm", "quantile", "nanquantile", "vector_norm"), (1, None)),
    "topk": (1, -1),
    "kthvalue": (1, -1),
}  # fmt: skip
"""Functions that would mix padding with real rows.

For each name: the position of ``dim`` among the arguments after the input, and its default.
"""


def mean_of_rows(group: Group, values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of each trial; ``values`` is ``[K, B, ...]``."""
    if values.dim() > 2:
        values = values.flatten(2).mean(2)
    if group.rows is None:
        return values.mean(1)
    _check_rows(group, values)
    return (values * group.rows).sum(1)


def sum_of_rows(group: Group, values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of each trial; ``values`` is ``[K, B, ...]``."""
    if group.rows is not None:
        _check_rows(group, values)
        values = _real_rows(group, values)
    return values.flatten(1).sum(1)


def _check_rows(group: Group, values: torch.Tensor) -> None:
    """Raise ``UnfusableError`` if the rows of ``[K, B, ...]`` are not those of the batch."""
    if values.dim() < 2 or values.shape[1] != group.batch:
        raise UnfusableError(
            "a loss over other rows than the batch's, while batches differ in size"
        )


def _rows_of(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Return the weights of the rows, shaped to broadcast against ``[K, B, ...]``."""
    assert group.rows is not None
    return group.rows.view(*group.rows.shape, *[1] * (x.dim() - 2))


def over_batch(group: Group, x: Any, dim: Any) -> bool:
    """Return whether a reduction over ``dim`` (None for all) mixes rows, some of which are padding.

    Raises:
        UnfusableError: This cannot be determined, as rows were merged with another dimension.
    """
    if group.rows is None or type(x) is not Packed or not x.dim():
        return False
    dims = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    if 0 not in [d % x.dim() for d in dims]:
        return False
    num = x.shape[0]
    if num > group.batch and num % group.batch == 0:
        raise UnfusableError(
            f"a sum over {num} rows, a multiple of the batch's, while batches differ in size"
        )
    return num == group.batch


def _reduction(
    function: Callable[..., Any],
    *,
    total: Callable[[Group, torch.Tensor], torch.Tensor],
    weighed: Callable[[Group, torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    """Return the rule for ``sum`` or ``mean``.

    Args:
        function: The function.
        total: Used where padding would count; ``total(group, x)`` reduces all dimensions of each
            trial.
        weighed: Used where padding would count; ``weighed(group, x)`` returns numbers that can be
            reduced as if all rows were real.
    """

    def rule(group: Group, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.pop("axis", dim)
        padded = over_batch(group, input, dim)
        if dim is None and not args and not kwargs:
            if not input.dim():
                return group.pack(input.value)
            x = group.first(input)
            return group.pack(total(group, x) if padded else function(x.flatten(1), 1))
        if padded:
            input = group.pack(weighed(group, group.first(input)))
        if dim is not None:
            args = (dim, *args)
        return by_vmap(group, function, (input, *args), kwargs)

    return rule


def _real_rows(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Replace padding by zeros."""
    return torch.where(_rows_of(group, x) > 0, x, 0)


def _scaled_rows(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Replace padding by zeros and scale real rows up to make up for it."""
    rows = _rows_of(group, x)
    return torch.where(rows > 0, x * (rows * group.batch), 0)


def _refused(function: Callable[..., Any], place: int, default: int | None) -> Callable[..., Any]:
    """Return a rule that goes through vmap but refuses reductions over a batch with padding."""

    def rule(group: Group, input: Any, *args: Any, **kwargs: Any) -> Any:
        other = next((a for a in args if isinstance(a, torch.Tensor)), None)
        # with a second tensor, the function works element by element and mixes no rows
        if group.rows is not None and other is None:
            dim = kwargs.get("dim", kwargs.get("axis", default))
            if len(args) > place and not isinstance(args[place], bool):
                dim = args[place]
            if over_batch(group, input, dim):
                raise UnfusableError(
                    f"{function.__name__} over the rows of batches that differ in size"
                )
        return by_vmap(group, function, (input, *args), kwargs)

    return rule


def _register_shapes() -> None:
    for home in (torch, torch.Tensor, torch.nn.functional, torch.linalg):
        for name, (place, default) in OTHERS.items():
            function = getattr(home, name, None)
            if callable(function):
                RULES[function] = _refused(function, place, default)
    for home in (torch, torch.Tensor):
        RULES[home.sum] = _reduction(home.sum, total=sum_of_rows, weighed=_real_rows)
        RULES[home.mean] = _reduction(home.mean, total=mean_of_rows, weighed=_scaled_rows)


_register_shapes()
