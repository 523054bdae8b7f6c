"""Rules for element-wise functions, which only need their arguments aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed, by_vmap
from thrifty.pack.fused._registry import RULES, UnfusableError, register_rule


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


def _register() -> None:
    for home in (torch, torch.Tensor, F):
        for name, kind in (
            *[(n, pointwise) for n in NAMES],
            *[(n, in_place) for n in IN_PLACE],
        ):
            function = getattr(home, name, None)
            if callable(function) and (home is torch.Tensor or not name.startswith("__")):
                RULES[function] = kind(function)


_register()
