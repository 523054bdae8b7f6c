"""Sums of gradients of slices that are folded into concatenations are the same sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from tests.pack._toys import normal
from thrifty.pack.fused._narrowing import folded, optimized
from thrifty.pack.fused._record import record

from .test_narrowing import LAYERS, PICKS, Picking, recorded, results


pytestmark = pytest.mark.slow


def assert_same_results(program, inputs):
    found = results(folded(program), [each.clone() for each in inputs])
    for one, other in zip(found, results(program, inputs), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def folds(compute, *shapes):
    """Assert that folding changes no bit, and return the functions of the folded program."""
    inputs = [normal(*shape, seed=n).double() for n, shape in enumerate(shapes)]
    program, _ = record(lambda: [compute(*inputs)], inputs)
    assert_same_results(program, inputs)
    return [str(call.function.overloadpacket) for call in folded(program).calls]


def gradient(read):
    """Return a computation of the gradient of what is read of a first tensor."""

    def compute(x, *others):
        x.requires_grad_()
        return torch.autograd.grad(read(x, *others).sum(), x)[0].neg()

    return compute


# -- what is folded ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_gradients_of_two_parts_are_put_together(first, dim):
    def read(x, y):
        return (x.narrow(dim, 0, first).sin() * y).sum() + x.narrow(
            dim, first, 4 - first
        ).cos().sum()

    found = folds(gradient(read), (4, 4, 4), ())
    assert "aten.slice_backward" not in found
    assert found.count("aten.cat") == 1


def test_rotations_of_queries():
    """As in transformers: a rotation by position, whose gradient is a sum of halves."""

    def compute(x, w, v, angles):
        w.requires_grad_()
        q = (x @ w).view(2, 5, 2, 4).transpose(1, 2)
        straight = q * angles.cos()
        q = straight + torch.cat([-q[..., 2:], q[..., :2]], -1) * angles.sin()
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 5, 8)
        return torch.autograd.grad((x + y @ v).square().sum(), w)[0]

    found = folds(compute, (2, 5, 8), (8, 8), (8, 8), (5, 4))
    assert "aten.slice_backward" not in found
    assert found.count("aten.cat") == 2


# -- what is not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:, :3].sin() * x[:, 1:4],
        lambda x: x[:, :1].sin() * x[:, 3:],
        lambda x: x[:, 0:4:2].sin() * x[:, 1:4:2],
        lambda x: x[:2].sin().sum() + x[:, 2:].cos(),
        lambda x: x[:, :2].sin(),
        lambda x: x[:, 1:3].sin() * x[:, 3:],
    ],
    ids=["overlapping", "with a gap", "every second", "of two dimensions", "one", "not from 0"],
)
def test_slices_that_do_not_make_up_a_tensor(read):
    found = folds(gradient(read), (4, 4))
    assert "aten.slice_backward" in found
    assert "aten.cat" not in found


def parts(x, *, sizes=((4, 4), (4, 4)), alpha=1):
    one = torch.ops.aten.slice_backward(x[:, :2].sin(), sizes[0], 1, 0, 2, 1)
    other = torch.ops.aten.slice_backward(
        x[:1, 2:].cos().expand(sizes[1][0], 2), sizes[1], 1, 2, 4, 1
    )
    return one, other


def test_sums_with_a_factor():
    def compute(x):
        return torch.add(*parts(x), alpha=2)

    assert "aten.cat" not in folds(compute, (4, 4))


def test_gradients_of_other_shapes():
    assert "aten.cat" not in folds(lambda x: sum(parts(x, sizes=((4, 4), (1, 4)))), (4, 4))


def test_gradients_that_something_else_reads():
    def compute(x):
        one, other = parts(x)
        return (one + other) * one

    assert "aten.cat" not in folds(compute, (4, 4))


def test_gradients_that_are_written_before_the_sum():
    def compute(x):
        y = x[:, :2].sin()
        one = torch.ops.aten.slice_backward(y, (4, 4), 1, 0, 2, 1)
        y.zero_()
        return one + parts(x)[1] + y.sum()

    assert "aten.cat" not in folds(compute, (4, 4))


def test_gradients_that_are_outputs():
    inputs = [normal(4, 4)]

    def compute():
        one, other = parts(inputs[0])
        return [one + other, one]

    program, _ = record(compute, inputs)
    assert_same_results(program, inputs)


# -- networks ----------------------------------------------------------------------------------


@pytest.mark.sample(20)
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer, pick):
    for evaluates in (False, True):
        program, inputs = recorded(Picking(["linear", layer, "gelu"], pick), evaluates=evaluates)
        assert_same_results(program, inputs)
        assert optimized(program, device=torch.device("cpu")).outputs


@given(
    layers=st.lists(st.sampled_from(list(LAYERS)), max_size=6), pick=st.sampled_from(list(PICKS))
)
@settings(max_examples=60, deadline=None)
def test_networks(layers, pick):
    assert_same_results(*recorded(Picking(layers, pick)))
