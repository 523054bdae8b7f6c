"""Calls in double precision with tensors that are stored in single precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thrifty.pack.fused._record import record
from thrifty.pack.fused._structure import doubled, named, upcast
from thrifty.pack.fused._tape import bind


def model_of(seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))


LOWER = ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias")
TOKENS = torch.tensor([[0, 3, 6], [1, 1, 2]])


def test_a_step_is_that_of_a_model_in_double_precision():
    whole, base = model_of().double(), doubled(model_of(), besides=LOWER)
    for name, parameter in (*whole.named_parameters(), *base.named_parameters()):
        parameter.requires_grad_(name not in LOWER)
    assert {p.dtype for p in base[1].parameters()} == {torch.float32}
    whole(TOKENS).square().sum().backward()
    with upcast(named(base, LOWER)), torch.autograd.set_multithreading_enabled(False):
        base(TOKENS).square().sum().backward()
    assert torch.equal(base[3].weight.grad, whole[3].weight.grad)
    assert base[3].weight.grad.dtype == torch.float64


def test_a_recorded_copy_is_made_in_each_step():
    stored, x = torch.ones(3, 3), torch.ones(1, 3, dtype=torch.float64)

    def compute():
        with upcast([stored]):
            return [x @ stored.t()]

    program, _ = record(compute, [x, stored])
    tape = bind(program, [x, stored])
    stored.fill_(2.0)
    tape()
    assert tape.outputs[0].tolist() == [[6.0, 6.0, 6.0]]


def test_views_stay_what_they_are_and_are_known():
    weight = torch.randn(3, 4)
    with upcast([weight]):
        turned = weight.t()
        product = torch.randn(2, 4, dtype=torch.float64) @ turned
    assert turned.dtype == torch.float32
    assert product.dtype == torch.float64


def test_other_tensors_keep_their_precision():
    weight, other = torch.randn(3), torch.randn(3)
    with upcast([weight]):
        assert (other + other).dtype == torch.float32
        assert (weight + other).dtype == torch.float64
        assert weight.to(torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: torch.add(t, t, out=t),
        lambda t: torch._foreach_add_([t], 1.0),
        lambda t: F.batch_norm(torch.randn(4, 3, dtype=torch.float64), t, t.clone(), training=True),
    ],
)
def test_what_is_stored_is_never_written_to(write):
    stored = torch.ones(3)
    with upcast([stored]), pytest.raises(RuntimeError, match="is to stay as it is"):
        write(stored)
    assert torch.equal(stored, torch.ones(3))


def test_statistics_are_read_in_evaluation():
    mean, var = torch.zeros(3), torch.ones(3)
    x = torch.randn(4, 3, dtype=torch.float64)
    with upcast([mean, var]):
        out = F.batch_norm(x, mean, var, training=False)
    torch.testing.assert_close(out, F.batch_norm(x, mean.double(), var.double()))


def test_nothing_to_do():
    double, whole = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.long)
    with upcast([double, whole]):
        assert (double + whole).dtype == torch.float64
    model = doubled(model_of(), besides=())
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_shared_tensor_that_gets_memory_of_its_own_meanwhile_is_still_known():
    """Taking its address for writing, as ``data_ptr`` does, copies it."""
    stored = torch.ones(3, 3)
    lent = torch._lazy_clone(stored)
    with upcast([lent]):
        lent.data_ptr()
        product = torch.ones(1, 3, dtype=torch.float64) @ lent.t()
    assert product.dtype == torch.float64


def test_a_product_of_a_stored_tensor_and_one_in_single_precision():
    """Positions in Llama's rotations are in single precision, whatever the model is in."""
    stored, positions = torch.randn(1, 3, 1), torch.arange(4.0)[None, None]
    with upcast([stored]):
        product = stored @ positions
        positions += stored.sum()
    assert product.dtype == torch.float64
    assert torch.equal(product, stored.double() * torch.arange(4.0).double())
    assert positions.dtype == torch.float32
