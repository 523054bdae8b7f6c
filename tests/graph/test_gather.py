from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from thrifty.core import GraphError
from thrifty.graph._batch import Memory
from thrifty.graph._features import gather_features


pytestmark = pytest.mark.slow


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def features(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def every_half(dtype):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return patterns.view(dtype).reshape(128, 512)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(width=st.integers(0, 70), nodes=st.lists(st.integers(0, 8), max_size=50), wide=st.booleans())
def test_gathering_is_indexing(dtype, width, nodes, wide):
    x = features(9, width, dtype=dtype)
    rows = torch.tensor(nodes, dtype=torch.int64)
    wanted = x[rows].float() if wide else x[rows]
    got = gather_features(x, rows, dtype=torch.float32 if wide else None)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_becomes_the_float_that_torch_makes_of_it(dtype):
    x = every_half(dtype)
    got = gather_features(x, torch.arange(128), dtype=torch.float32)
    assert torch.equal(bits(got), bits(x.float()))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_stays_as_it_is(dtype):
    x = every_half(dtype)
    assert torch.equal(bits(gather_features(x, torch.arange(128))), bits(x))


def test_nan_and_infinity_stay_bit_by_bit():
    x = torch.tensor([[0x7FC00001, 0x7F800001, -1, 0x7F800000]], dtype=torch.int32)
    got = gather_features(x.view(torch.float32), torch.tensor([0]))
    assert torch.equal(bits(got), x)


def test_small_halves_do_not_depend_on_how_the_thread_rounds():
    x = torch.full((1, 40), 1, dtype=torch.int16).view(torch.float16)
    wanted = torch.full((1, 40), 2.0**-24)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        got = gather_features(x, torch.tensor([0]), dtype=torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, wanted)


def test_features_may_be_memory_mapped(tmp_path):
    values = np.arange(60, dtype=np.float32).reshape(12, 5)
    np.save(tmp_path / "x.npy", values)
    x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    got = gather_features(x, torch.tensor([11, 0, 11]))
    assert got.tolist() == values[[11, 0, 11]].tolist()


def test_rows_are_written_to_borrowed_memory():
    memory = Memory()
    x = features(9, 4)
    first = gather_features(x, torch.tensor([1, 2]), memory=memory)
    place = first.data_ptr()
    del first
    second = gather_features(x, torch.tensor([3, 4]), memory=memory)
    assert second.data_ptr() == place
    assert torch.equal(second, x[[3, 4]])


def test_rows_of_fresh_memory_lie_on_the_cpu_whatever_the_default_is():
    with torch.device("meta"):
        got = gather_features(torch.ones(2, 3, device="cpu"), torch.tensor([1], device="cpu"))
    assert got.device.type == "cpu"


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float64),
    ],
)
def test_other_dtypes_are_refused(stored, wanted):
    with pytest.raises(GraphError, match=rf"dtype={wanted}: .* graph.replace"):
        gather_features(features(2, 2, dtype=stored), torch.tensor([0]), dtype=wanted)
