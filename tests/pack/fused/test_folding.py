"""Sums that are folded into what makes their terms are the same sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from tests.pack._toys import normal
from thrifty.pack.fused._folding import folded, optimized
from thrifty.pack.fused._record import record
from thrifty.pack.fused._tape import bind

from .test_narrowing import LAYERS, PICKS, Picking, recorded, results


pytestmark = pytest.mark.slow


def assert_same_results(program, inputs, *, tolerance=1e-11):
    found = results(folded(program), [each.clone() for each in inputs])
    for one, other in zip(found, results(program, inputs), strict=True):
        assert (one is None) == (other is None)
        if one is not None and one.numel():
            scale = max(1.0, float(other.abs().max()))
            assert float((one - other).abs().max()) <= tolerance * scale


def functions(program):
    return [str(call.function).removeprefix("aten.").split(".")[0] for call in program.calls]


def folds(compute, *shapes, dtype=torch.float64):
    """Assert that folding changes no result, and return the functions of the folded program."""
    inputs = [normal(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    program, _ = record(lambda: [compute(*inputs)], inputs)
    fine = dtype == torch.float64
    assert_same_results(program, inputs, tolerance=1e-12 if fine else 1e-5)
    return functions(folded(program))


# -- what is folded ----------------------------------------------------------------------------


def test_products_are_added_where_the_sum_is():
    found = folds(lambda x, a, b: (x.sin() + a @ b).cos(), (4, 6), (4, 5), (5, 6))
    assert "addmm" in found
    assert "mm" not in found
    assert "add" not in found


def test_products_in_batches_are_added_where_the_sum_is():
    found = folds(lambda x, a, b: (a.bmm(b) + x.sin()).cos(), (3, 4, 6), (3, 4, 5), (3, 5, 6))
    assert "baddbmm" in found


def test_products_that_are_reshaped_first():
    def compute(x, a, b):
        return (x.sin() + (a @ b).view(2, 3, 4)).cos()

    found = folds(compute, (2, 3, 4), (6, 5), (5, 4))
    assert "addmm" in found


def test_the_gradient_of_a_value_with_several_readers_is_one_sum():
    def compute(x, a, b, c):
        x.requires_grad_()
        loss = ((x @ a).sin() * (x @ b).cos() + (x @ c)).sum()
        return torch.autograd.grad(loss, x)[0].neg()

    found = folds(compute, (6, 5), (5, 4), (5, 4), (5, 4))
    assert found.count("addmm") >= 2


def test_products_of_elements():
    found = folds(lambda x, a, b: x.sin() + a * b, (3, 4, 6), (3, 4, 6), (3, 1, 1))
    assert found.count("addcmul") == 1
    assert "mul" not in found


def test_a_term_with_fewer_dimensions_is_spread():
    found = folds(lambda x, a, b: x + a * b, (4, 6), (3, 4, 6), (3, 1, 1))
    assert "addcmul" in found


def test_gradients_of_halves_are_put_together():
    def compute(x, y):
        x.requires_grad_()
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return torch.autograd.grad((turned * y).sum(), x)[0].neg()

    found = folds(compute, (3, 4), (3, 4))
    assert "slice_backward" not in found
    assert found.count("cat") >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_precisions(dtype):
    found = folds(lambda x, a, b: (x.sin() + a @ b) + x * x, (4, 6), (4, 5), (5, 6), dtype=dtype)
    assert "addmm" in found or "addcmul" in found


# -- what is not ---------------------------------------------------------------------------------


def no_fold(compute, *shapes):
    found = folds(compute, *shapes)
    assert not {"addmm", "baddbmm", "addcmul"} & set(found)


def test_a_product_that_something_else_reads():
    def compute(x, a, b):
        y = a @ b
        return (x + y) * y

    no_fold(compute, (4, 6), (4, 5), (5, 6))


def test_a_product_that_is_added_to_itself():
    def compute(a, b):
        y = a @ b
        return y + y

    no_fold(compute, (4, 5), (5, 6))


def test_a_sum_with_a_factor():
    no_fold(lambda x, a, b: torch.add(x, a @ b, alpha=2), (4, 6), (4, 5), (5, 6))


def test_a_product_for_all_trials():
    """A sum of other shape than the product: one product for all, spread over the trials."""
    no_fold(lambda x, a, b: x + (a @ b), (3, 4, 6), (4, 5), (5, 6))


def test_a_product_that_is_turned():
    no_fold(lambda x, a, b: x + (a @ b).t(), (6, 4), (4, 5), (5, 6))


def test_what_is_written_in_place():
    def compute(x, a, b):
        y = a @ b
        z = x.sin()
        out = z + y
        z.add_(1)
        return out * z

    no_fold(compute, (4, 6), (4, 5), (5, 6))


def test_operands_that_are_written_before_the_sum():
    def compute(x, a, b):
        c = a.sin()
        y = c @ b
        c.zero_()
        return x + y + c.sum()

    no_fold(compute, (4, 6), (4, 5), (5, 6))


def test_slices_that_overlap_or_leave_a_gap():
    def overlap(x, y):
        x.requires_grad_()
        return torch.autograd.grad((x[:, :3].sin() * x[:, 1:4]).sum() + y.sum(), x)[0].neg()

    def gap(x, y):
        x.requires_grad_()
        return torch.autograd.grad((x[:, :1].sin() * x[:, 3:]).sum() + y.sum(), x)[0].neg()

    for compute in (overlap, gap):
        assert "slice_backward" in folds(compute, (3, 4), (3, 4))


def test_single_precision_within_double_stays_as_it_is():
    """Another last bit in double precision may become one in single precision."""

    def compute(x, a, b):
        y = (x + a @ b).float().sin()
        return y.double() + a @ b

    inputs = [normal(*shape, seed=n).double() for n, shape in enumerate([(4, 6), (4, 5), (5, 6)])]
    program, _ = record(lambda: [compute(*inputs)], inputs)
    assert folded(program) is program


# -- memory ----------------------------------------------------------------------------------------


def test_a_sum_that_is_read_again_is_not_overwritten():
    def compute(x, a, b):
        y = x.sin()
        return (y + a @ b).cos() * y

    folds(compute, (4, 6), (4, 5), (5, 6))


def test_a_sum_whose_view_is_read_again_is_not_overwritten():
    def compute(x, a, b):
        y = x.sin()
        half = y[:, :3]
        return (y + a @ b)[:, :3].cos() * half

    folds(compute, (4, 6), (4, 5), (5, 6))


def test_a_product_of_the_sum_itself():
    folds(lambda x, a: (x.sin() + x.sin() @ a).cos(), (4, 4), (4, 4))

    def compute(x, a):
        y = x.sin()
        return (y + y @ a).cos()

    folds(compute, (4, 4), (4, 4))


def test_inputs_are_not_overwritten():
    inputs = [normal(*shape, seed=n).double() for n, shape in enumerate([(4, 6), (4, 5), (5, 6)])]
    program, _ = record(lambda: [(inputs[0] + inputs[1] @ inputs[2]).cos()], inputs)
    before = [each.clone() for each in inputs]
    with torch.no_grad():
        bind(optimized(program, device=torch.device("cpu")), inputs)()
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("function", [torch.sin, torch.relu, F.silu, torch.neg])
def test_a_sum_within_a_larger_tensor_goes_on_where_it_is(function):
    """The sum does not lie at the beginning of its buffer; nor does what is computed in place."""
    folds(lambda x, a, b: function(x.tanh()[1:3] + a @ b) * 2, (4, 6), (2, 5), (5, 6))

    def compute(x, a, b):
        return function(torch.addmm(x.tanh()[1:3], a, b)) * 2

    inputs = [normal(*shape, seed=n).double() for n, shape in enumerate([(4, 6), (2, 5), (5, 6)])]
    program, _ = record(lambda: [compute(*inputs)], inputs)
    (found,) = results(program, inputs)
    torch.testing.assert_close(found, compute(*inputs))


@pytest.mark.parametrize("inner", [0, 1])
def test_products_over_nothing(inner):
    folds(lambda x, a, b: (x.sin() + a @ b).cos(), (4, 6), (4, inner), (inner, 6))
    folds(lambda x, a, b: (x.sin() + a.bmm(b)).cos(), (2, 4, 6), (2, 4, inner), (2, inner, 6))


def test_infinite_numbers_and_nan_stay():
    x, a, b = torch.zeros(2, 2), torch.tensor([[1e38, 1e38], [0, 1]]), torch.ones(2, 2) * 1e10
    a[1, 0] = float("nan")
    program, _ = record(lambda: [(x.sin() + a @ b) + x * a], [x, a, b])
    tapes = [bind(each, [x, a, b]) for each in (folded(program), program)]
    for tape in tapes:
        tape()
    found, wanted = (tape.outputs[0] for tape in tapes)
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    torch.testing.assert_close(found, wanted, equal_nan=True)


# -- networks ------------------------------------------------------------------------------------


@pytest.mark.sample(20)
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer, pick):
    for evaluates in (False, True):
        model = Picking(["linear", layer, "gelu"], pick)
        assert_same_results(*recorded(model, evaluates=evaluates))


@given(
    layers=st.lists(st.sampled_from(list(LAYERS)), max_size=6), pick=st.sampled_from(list(PICKS))
)
@settings(max_examples=60, deadline=None)
def test_networks(layers, pick):
    assert_same_results(*recorded(Picking(layers, pick)), tolerance=1e-6)


def test_rotations_of_queries():
    """As in transformers: a rotation by position, whose gradient is a sum of halves."""

    def compute(x, w, v, angles):
        w.requires_grad_()
        q = (x @ w).view(2, 5, 2, 4).transpose(1, 2)
        turned = torch.cat([-q[..., 2:], q[..., :2]], -1)
        q = q * angles.cos() + turned * angles.sin()
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 5, 8)
        return torch.autograd.grad((x + y @ v).square().sum(), w)[0]

    found = folds(compute, (2, 5, 8), (8, 8), (8, 8), (5, 4))
    assert {"addcmul", "cat"} <= set(found)
