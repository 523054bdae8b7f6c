from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.pack.fused.twin import check, integers, normal, refused
from thrifty.pack.fused.rules._tensor_operations import IN_PLACE, NAMES


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


HOMES = {"torch": torch, "Tensor": torch.Tensor, "F": F}
BINARY = {
    "add", "div", "divide", "eq", "float_power", "fmod", "ge", "gt", "le", "logaddexp",
    "logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "multiply",
    "ne", "pow", "remainder", "sub", "subtract", "true_divide", "xlogy", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__rpow__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__",
    "type_as", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "add_", "sub_",
    "mul_", "div_", "copy_", "pow_", "multiply_", "subtract_", "divide_",
}  # fmt: skip
OF_BITS = {"__and__", "__or__", "__xor__", "__invert__", "__iand__", "__ior__", "__ixor__"}
OPTIONS = {
    "clamp": (-0.5, 0.5), "clip": (-0.5, 0.5), "clamp_": (-0.5, 0.5), "clip_": (-0.5, 0.5),
    "clamp_min": (0.1,), "clamp_max": (0.1,), "clamp_min_": (0.1,), "clamp_max_": (0.1,),
    "threshold": (0.1, 7.0), "threshold_": (0.1, 7.0), "to": (torch.float32,), "fill_": (2.5,),
}  # fmt: skip
TERNARY = {"addcdiv", "addcmul", "lerp", "addcdiv_", "addcmul_", "lerp_"}
SPECIAL = {"where", "masked_fill", "masked_fill_"}
OF_ONE = {
    "maximum",
    "minimum",
    "logical_and",
    "logical_or",
    "logical_xor",
    "float_power",
    "type_as",
    "__ipow__",
    "xlogy",
    "logaddexp",
}  # these do not take a scalar as the other operand


def called(home, name):
    if home is torch.Tensor:
        return lambda x, *args: getattr(x, name)(*args)
    return getattr(home, name)


def functions(names):
    return [
        pytest.param(called(home, name), name, id=f"{label}.{name}")
        for label, home in HOMES.items()
        for name in names
        if callable(getattr(home, name, None)) and (home is torch.Tensor or name[0] != "_")
    ]


def operands(count, seed=0, *, shapes=None):
    shapes = shapes or [(4, 3, 5)] * count
    return [normal(*shape, seed=seed + 10 * i, axis=i % 2) for i, shape in enumerate(shapes)]


def positive(x):
    return x.abs() + 0.3


def kind(name):
    return next(
        (
            k
            for k, names in (
                ("bits", OF_BITS),
                ("two", BINARY),
                ("three", TERNARY),
                ("special", SPECIAL),
            )
            if name in names
        ),
        "one",
    )


@pytest.mark.sample(60)
@pytest.mark.parametrize(("function", "name"), functions(NAMES))
def test_every_function(function, name):
    args = OPTIONS.get(name, ())
    match kind(name):
        case "bits" if name == "__invert__":
            check(lambda m, x: function(x), lambda s: [integers(9, 4, 3, seed=s, axis=1)])
        case "bits":
            check(
                lambda m, x, y: function(x, y),
                lambda s: [integers(9, 4, 3, seed=s), integers(9, 3, seed=s + 3)],
            )
        case "one":
            check(lambda m, x: function(x, *args), lambda s: operands(1, s))
            check(
                lambda m, x: function(positive(x), *args), lambda s: [normal(4, 3, seed=s, axis=1)]
            )
        case "two":
            check(lambda m, x, y: function(positive(x), positive(y)), lambda s: operands(2, s))
            check(
                lambda m, x, y: function(x, y), lambda s: operands(2, s, shapes=[(4, 3, 5), (5,)])
            )
            if name not in OF_ONE:
                check(lambda m, x: function(x, 2.0), lambda s: operands(1, s))
        case "three":
            check(lambda m, x, y, z: function(x, y, positive(z)), lambda s: operands(3, s))
        case "special" if name == "where":
            check(
                lambda m, x, y, z: torch.where(x > 0, y, z),
                lambda s: operands(3, s, shapes=[(3, 5), (4, 3, 5), (5,)]),
            )
        case "special":
            check(
                lambda m, x, y: function(x, y > 0, 1.5),
                lambda s: operands(2, s, shapes=[(4, 3, 5), (3, 5)]),
            )


@pytest.mark.sample(40)
@pytest.mark.parametrize(("function", "name"), functions(IN_PLACE))
@pytest.mark.parametrize("axis", [0, 1])
def test_every_function_in_place(function, name, axis):
    args = OPTIONS.get(name, ())

    def changed(*rest):
        def forward(module, x, *others):
            y = positive(x) if x.is_floating_point() else x + 0
            z = function(y, *others, *rest)
            return (y, y * 2, z)

        return forward

    def inputs(*shapes):
        return lambda s: [
            normal(4, 3, 5, seed=s, axis=axis),
            *[normal(*shape, seed=s + 10 * i + 10, axis=i % 2) for i, shape in enumerate(shapes)],
        ]

    match kind(name):
        case "bits":
            check(
                changed(),
                lambda s: [integers(9, 4, 3, seed=s, axis=axis), integers(9, 3, seed=s + 3)],
            )
        case "one":
            check(changed(*args), inputs())
        case "two":
            check(changed(), inputs((4, 3, 5)))
            check(changed(), inputs((5,)))
            check(changed(2.0), inputs())
        case "three":
            check(changed(), inputs((4, 3, 5), (5,)))
        case "special":
            check(lambda m, x, y: function(x * 2, y > 0, 1.5), inputs((3, 5)))


SHAPES = [(), (5,), (3, 5), (1, 5), (4, 3, 5), (4, 1, 5), (4, 1, 1)]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("left", "right"), list(itertools.product(SHAPES, SHAPES)))
def test_shapes_that_broadcast(left, right):
    """Shapes broadcast at any position of the trial dimension, and with a shared operand."""
    for axis, other in itertools.product(range(len(left) + 1), range(len(right) + 1)):
        places = [({"axis": axis}, {"axis": other})]
        if not axis:
            places.append(({"shared": True}, {"axis": other}))
        if not other:
            places.append(({"axis": axis}, {"shared": True}))
        for first, second in places:
            check(
                lambda m, x, y: (x + y, x * y, torch.where(x > y, x, y)),
                lambda s, first=first, second=second: [
                    normal(*left, seed=s, **first),
                    normal(*right, seed=s + 5, **second),
                ],
                tape=axis == other == 0,
            )


def test_operators_of_tensors_are_fused():
    def forward(module, x, y):
        z = 1 + x - y * 2 / (3 - x.abs()) + 2**x + (-y) ** 2 + abs(x) - 1 / (y.abs() + 1)
        z += x
        z -= 2 * y
        z *= 1.5
        z /= y.abs() + 1
        return z, (x > y) & ~(x < 0) | (y == 0), (x >= 0) ^ (y <= 0), x % 2, x != y

    check(forward, lambda s: operands(2, s))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_writing_into_parts(axis):
    def forward(module, x, y):
        x = x * 2
        x[:, 0] = y
        x[1:, 2] = 0.5
        x[0, 1, 3:] += 1
        x[..., 4] = y[..., :3]
        x[None, 2] = torch.ones(5, dtype=torch.float64)
        z = x * 1
        z[z > 0.7] = 0.0
        x[0] = z[1]
        return x, z

    check(forward, lambda s: [normal(4, 3, 5, seed=s, axis=axis), normal(5, seed=s + 4)])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.where(x > 0, y, 1.5),
        lambda x, y: torch.where(x > 0, 1.5, y),
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.full_like(x, 2.0) + y,
    ],
)
def test_numbers_beside_tensors(call):
    check(lambda m, x, y: call(x, y), lambda s: operands(2, s))


def test_named_arguments():
    check(lambda m, x, y: torch.clamp(x, min=y), lambda s: operands(2, s))
    check(lambda m, x, y: torch.add(x, other=y, alpha=3), lambda s: operands(2, s))
    check(lambda m, x, y: (x * 1).clamp_(min=y), lambda s: operands(2, s))
    check(lambda m, x, y: (x * 1).add_(y, alpha=3), lambda s: operands(2, s))
    check(lambda m, x: F.relu(x * 1, inplace=True), lambda s: operands(1, s))


SHARED = torch.ones(4, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: SHARED.add_(x),
        lambda x: SHARED.__iadd__(x),
        lambda x: SHARED.__setitem__(0, x[0]),
        lambda x: SHARED.copy_(x),
    ],
)
def test_what_all_share_is_not_written_into(change):
    refused("share", lambda m, x: change(x), normal(4, 3))
    assert SHARED.eq(1).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.__setitem__([0, 1], 0.0), "a tensor or a list names"),
        (lambda x: x.__setitem__(torch.tensor([0, 1]), 0.0), "a tensor or a list names"),
        (lambda x: x.__setitem__(x > 0, x[0]), "writes a tensor where a mask holds"),
        (lambda x: x[x > 0], "dynamic|data-dependent|vmap"),
    ],
)
def test_what_is_refused(change, reason):
    refused(reason, lambda m, x: change(x), normal(4, 3))


def test_reading_a_value_is_refused():
    for read in (
        float,
        int,
        bool,
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
    ):
        refused("reads the value", lambda m, x, r=read: r(x), normal())
