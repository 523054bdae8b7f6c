from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from thrifty.core import LayerError
from thrifty.nn import KeptGroups, _block_kernels, gyro_conv2d, gyro_linear
from thrifty.nn._masks import Parts, put, put_at_once, take, take_at_once


pytestmark = pytest.mark.slow


@st.composite
def kept(draw, num_parts):
    size, num = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    left = draw(st.integers(1, num))
    groups = [sorted(draw(st.permutations(range(num)))[:left]) for _ in range(num_parts)]
    return KeptGroups(torch.tensor(groups), size, num)


@st.composite
def products(draw):
    """Draw inputs and outputs of a product, each whole or in part, and their sizes."""
    num_parts = draw(st.integers(1, 4))
    inputs, outputs = (draw(st.none() | kept(num_parts)) for _ in range(2))
    sizes = [
        draw(st.integers(1, 6)) if k is None else k.group_size * k.num_groups
        for k in (inputs, outputs)
    ]
    return num_parts, inputs, outputs, *sizes


def normal(*, seed):
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.randn, generator=generator, dtype=torch.float64)


def whole(x, kept, dim):
    return x if kept is None else put(x, kept, dim=dim)


def left(x, kept, dim):
    return x if kept is None else take(x, kept, dim=dim)


@settings(deadline=None)
@given(products(), st.integers(0, 3), st.booleans())
def test_linear_is_a_masked_product(product, rows, with_bias):
    num_parts, inputs, outputs, num_in, num_out = product
    draw = normal(seed=rows)
    weight, bias = draw(num_out, num_in), draw(num_out) if with_bias else None
    x = left(draw(num_parts, rows, num_in), inputs, 2)
    wanted = left(F.linear(whole(x, inputs, 2), weight, bias), outputs, 2)
    torch.testing.assert_close(gyro_linear(x, weight, bias, inputs=inputs, outputs=outputs), wanted)


@settings(deadline=None, max_examples=30)
@given(products(), st.booleans())
def test_convolution_is_a_masked_convolution(product, with_bias):
    num_parts, inputs, outputs, num_in, num_out = product
    draw = normal(seed=num_in)
    weight, bias = draw(num_out, num_in, 3, 2), draw(num_out) if with_bias else None
    x = left(draw(num_parts, 2, num_in, 5, 5), inputs, 2)
    options = {"stride": 2, "padding": 1}
    full = whole(x, inputs, 2).flatten(0, 1)
    out = F.conv2d(full, weight, bias, **options)
    wanted = left(out.reshape(num_parts, 2, *out.shape[1:]), outputs, 2)
    ours = gyro_conv2d(x, weight, bias, inputs=inputs, outputs=outputs, **options)
    torch.testing.assert_close(ours, wanted)


@given(batch=st.integers(1, 20), num=st.integers(1, 8))
def test_parts_split_a_batch_by_sample_and_join_to_it(batch, num):
    parts = Parts.of(batch, num=num)
    x = torch.arange(batch)
    split = parts.split(x)
    assert torch.equal(parts.join(split), x)
    # Each sample is in its part.
    for sample in range(batch):
        assert sample in split[sample * num // batch]


def test_what_does_not_fit():
    some = KeptGroups(torch.tensor([[0]]), 2, 3)
    with pytest.raises(LayerError, match="x has 6 features, and 2 are kept"):
        gyro_linear(torch.ones(1, 4, 6), torch.ones(5, 6), inputs=some)
    with pytest.raises(LayerError, match="x has 6 channels, and 2 are kept"):
        gyro_conv2d(torch.ones(1, 4, 6, 3, 3), torch.ones(5, 6, 1, 1), inputs=some)


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 3, 12), 2), ((2, 3, 12, 4, 4), 2), ((2, 3, 5, 12), 3)]
)
def test_one_call_for_all_parts_gives_what_a_call_for_each_does(shape, dim):
    """On a GPU, launches cost more than the copies."""
    kept = KeptGroups(torch.tensor([[0, 3], [1, 2]]), 3, 4)
    x = torch.randn(shape)
    some = take(x, kept, dim=dim)
    assert torch.equal(take_at_once(x, kept, dim=dim), some)
    assert torch.equal(put_at_once(some, kept, dim=dim), put(some, kept, dim=dim))


# -- products by kernels, with dense ones in their place -------------------------------------


def _dense_product(a, weight, bias, *, contracted, kept, size, transposed):
    """Compute what the kernel does by a whole product."""
    whole = a if contracted is None else put(a, contracted, dim=2)
    out = F.linear(whole, weight.t() if transposed else weight, bias)
    out = out if kept is None else take(out, kept, dim=2)
    assert out.shape[2] == size
    return out


def _dense_weight_gradient(grad, a, weight, *, inputs, outputs, with_weight, with_bias):
    grad = grad if outputs is None else put(grad, outputs, dim=2)
    a = a if inputs is None else put(a, inputs, dim=2)
    of_weight = torch.einsum("pro,pri->oi", grad, a).to(weight.dtype)
    return of_weight if with_weight else None, grad.sum((0, 1)) if with_bias else None


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("trained", ["all", "x", "weight", "bias"])
@pytest.mark.parametrize("rows", [(3,), (2, 3)])
@pytest.mark.parametrize("half", [False, True])
def test_what_surrounds_the_kernels(monkeypatch, gathers, trained, rows, half):
    """Shapes, dtypes under autocast, and gradients that are not required."""
    monkeypatch.setattr(_block_kernels, "INTERPRETED", True)
    monkeypatch.setattr(_block_kernels, "fits", lambda *args, **options: True)
    monkeypatch.setattr(_block_kernels, "gathers", lambda x: gathers and not half)
    monkeypatch.setattr(_block_kernels, "product", _dense_product)
    monkeypatch.setattr(_block_kernels, "weight_gradient", _dense_weight_gradient)
    generator = torch.Generator().manual_seed(0)
    inputs = KeptGroups(torch.tensor([[0, 2], [1, 2]]), 2, 3)
    outputs = KeptGroups(torch.tensor([[1], [0]]), 4, 2)
    leaves = {
        "x": torch.randn(2, *rows, 4, generator=generator),
        "weight": torch.randn(8, 6, generator=generator),
        "bias": torch.randn(8, generator=generator),
    }
    found = []
    for masks in (False, True):
        own = {
            name: leaf.clone().requires_grad_(trained in {"all", name})
            for name, leaf in leaves.items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            if masks:
                whole = put(own["x"], inputs, dim=own["x"].dim() - 1)
                out = F.linear(whole, own["weight"], own["bias"])
                out = take(out, outputs, dim=out.dim() - 1)
            else:
                out = gyro_linear(**own, inputs=inputs, outputs=outputs)
        wanted = [leaf for leaf in own.values() if leaf.requires_grad]
        found.append([out, *torch.autograd.grad(out.sum(), wanted)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours, theirs, rtol=0.05 if half else 1e-5, atol=0.05 if half else 1e-5
        )
