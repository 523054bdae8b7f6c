from __future__ import annotations

import numpy as np
import pytest
import torch

from thrifty.graph._gnn import relu_dropout
from thrifty.graph.kernels import COMPILED


def drop(x, p=0.25, *, seed=0):
    torch.manual_seed(seed)
    return relu_dropout(x, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_scaled_and_the_rest_is_zero(dtype):
    x = torch.randn(101, 7, dtype=dtype)
    out = drop(x)
    kept = out != 0
    assert torch.equal(out[kept], (x.relu() * x.new_tensor(1 / 0.75))[kept])
    assert not out[x <= 0].any()


def test_each_element_is_kept_as_often_as_it_should_be():
    draws = np.stack([(drop(torch.ones(8, 25), 0.3, seed=seed) > 0) for seed in range(400)])
    kept = draws.mean(0)
    # Five standard deviations of a mean of 400 draws, for 200 elements.
    assert np.abs(kept - 0.7).max() < 5 * np.sqrt(0.21 / 400)
    assert abs(kept.mean() - 0.7) < 5 * np.sqrt(0.21 / 400 / 200)


def test_neighbors_in_memory_are_dropped_independently():
    kept = (drop(torch.ones(200_000 if COMPILED else 20_000), 0.5) > 0).double() - 0.5
    for lag in (1, 2, 3, 64):
        both = float((kept[lag:] * kept[:-lag]).mean()) * 4
        assert abs(both) < 5 / np.sqrt(len(kept))


def test_the_stream_of_torch_decides():
    x = torch.rand(50, 3)
    assert torch.equal(drop(x, seed=1), drop(x, seed=1))
    assert not torch.equal(drop(x, seed=1), drop(x, seed=2))


def test_a_gradient_goes_through_what_was_kept():
    x = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    out = relu_dropout(x * 1.0, 0.4, inplace=True)
    (grad,) = torch.autograd.grad((out * 2).sum(), x)
    wanted = torch.where(out > 0, 2 / 0.6, 0.0).double()
    assert torch.allclose(grad, wanted)


def test_threads_do_not_change_a_mask():
    x = torch.rand(300_001 if COMPILED else 3_001)
    before = torch.get_num_threads()
    try:
        found = []
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            found.append(drop(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_in_place_is_the_same():
    x = torch.randn(9, 3)
    torch.manual_seed(0)
    assert torch.equal(relu_dropout(x.clone(), 0.25, inplace=True), drop(x))


def test_everything_is_dropped_where_everything_should_be():
    assert not drop(torch.ones(9, 3), 1.0).any()


def test_what_kernels_do_not_take_is_left_to_torch():
    x = torch.ones(64, 64).bfloat16()
    torch.manual_seed(0)
    wanted = torch.dropout(x, 0.5, train=True)
    assert torch.equal(drop(x, 0.5), wanted)
    strided = torch.rand(6, 4).t()
    assert drop(strided, 0.5).shape == (4, 6)
