from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, strategies as st

from tests.graph.layers._blocks import (
    adjacency,
    block_of,
    blocks,
    features,
    means,
    random_block,
    shared,
)
from thrifty.graph import _aggregate
from thrifty.graph._aggregate import (
    _AggregateKind,
    _gather_back_by_index,
    _gather_by_index,
    mean_and_own,
    neighbor_mean,
    neighbor_sum,
    transposed,
)
from thrifty.graph.kernels import COMPILED


pytestmark = pytest.mark.slow


def joined(block, x):
    return torch.cat([means(block) @ x, x[: block.num_dst]], dim=1)


CASES = {
    "sum": (neighbor_sum, lambda block, x: adjacency(block) @ x),
    "mean": (neighbor_mean, lambda block, x: means(block) @ x),
    "mean and own": (mean_and_own, joined),
}
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
all_cases = pytest.mark.parametrize(("fast", "slow"), CASES.values(), ids=CASES)


@all_cases
@given(block=blocks(), width=st.integers(1, 5))
def test_values_and_gradients_are_those_of_a_dense_matrix(fast, slow, block, width):
    x, y = (features(block.num_src, width, requires_grad=True) for _ in range(2))
    ours, theirs = fast(x, block), slow(block, y)
    torch.testing.assert_close(ours, theirs)
    grad = features(block.num_dst, ours.shape[1], seed=1)
    ours.backward(grad)
    theirs.backward(grad)
    torch.testing.assert_close(x.grad, y.grad)


@all_cases
@forward_mode
def test_second_and_forward_derivatives(fast, slow):
    block = random_block(4, 6)
    x = features(6, 2, requires_grad=True)
    call = lambda x: fast(x, block) ** 2  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (x,))
    assert torch.autograd.gradcheck(call, (x,), check_forward_ad=True)


@all_cases
@forward_mode
def test_forward_derivative_of_what_needs_no_gradient(fast, slow):
    block = random_block(4, 6)
    x, tangent = features(6, 2), features(6, 2, seed=1)
    fast(x, block)
    _, ours = torch.func.jvp(lambda x: fast(x, block), (x,), (tangent,))
    torch.testing.assert_close(ours, slow(block, tangent))


@given(block=blocks(), width=st.integers(1, 3), mean=st.booleans(), own=st.booleans())
def test_index_operations_do_the_same(block, width, mean, own):
    how = _AggregateKind(mean=mean, own=own)
    x = features(block.num_src, width, requires_grad=True)
    fast = {(False, False): neighbor_sum, (True, False): neighbor_mean, (True, True): mean_and_own}
    if (mean, own) not in fast:
        return
    out = fast[mean, own](x, block)
    torch.testing.assert_close(out, _gather_by_index(x.detach(), block, how))
    grad = features(*out.shape, seed=1)
    out.backward(grad)
    torch.testing.assert_close(x.grad, _gather_back_by_index(grad, block, how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype):
    # In float16, 2048 + 1 is 2048.
    block = block_of([[0, *[1] * 64]], 2)
    x = torch.tensor([[2048.0], [1.0]], dtype=dtype)
    assert neighbor_sum(x, block).item() == 2112


@given(block=blocks())
def test_transposed_rows_list_the_edges_of_each_source(block):
    starts, destinations, edges = (a.tolist() for a in transposed(block))
    owners = block.destinations().tolist()
    assert len(starts) == block.num_src + 1
    assert starts[-1] == block.num_edges
    for source in range(block.num_src):
        mine = edges[starts[source] : starts[source + 1]]
        assert mine == [e for e, s in enumerate(block.indices.tolist()) if s == source]
        assert destinations[starts[source] : starts[source + 1]] == [owners[e] for e in mine]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_starts_of_either_width(dtype):
    block = block_of([[1], []], 2, indptr_dtype=dtype)
    assert neighbor_sum(torch.tensor([[1.0], [2.0]]), block).tolist() == [[2], [0]]


def test_features_that_are_not_contiguous():
    block = random_block(5, 9)
    x = features(4, 9).t()
    torch.testing.assert_close(neighbor_mean(x, block), means(block) @ x)


def test_threads_do_not_change_a_bit(monkeypatch):
    block = random_block(300 if COMPILED else 20, 500, most=9)
    x = features(500, 7, dtype=torch.float32, requires_grad=True)
    results = []
    for least, threads in ((2**60, 1), (1, 3)):
        monkeypatch.setattr(_aggregate, "LEAST_WORK", least)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        out = mean_and_own(x, block)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_threads_share_the_rows_of_a_block(monkeypatch):
    monkeypatch.setattr(_aggregate, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    ranges, names, lock = [], set(), threading.Lock()

    def kernel(indptr, begin, end):
        with lock:
            ranges.append((begin, end))
            names.add(threading.current_thread().name)

    indptr = torch.tensor([0, 90, *range(91, 101)]).numpy()
    _aggregate.by_rows(kernel, indptr, width=8)
    assert sorted(ranges) == [(0, 1), (1, 1), (1, 1), (1, 11)]
    assert len(names) > 1


def test_a_thread_hands_on_its_error(monkeypatch):
    monkeypatch.setattr(_aggregate, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def kernel(indptr, begin, end):
        if begin:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _aggregate.by_rows(kernel, torch.arange(9).numpy(), width=8)


def test_a_fork_starts_threads_of_its_own():
    before = _aggregate._threads()
    _aggregate._forget()
    assert _aggregate._threads() is not before


def test_what_needs_no_gradient_is_made_once():
    block, x = shared(random_block(4, 6)), features(6, 2)
    assert mean_and_own(x, block) is mean_and_own(x, block)
    assert mean_and_own(x, block) is not mean_and_own(x.clone(), block)


def test_what_nobody_shares_is_not_remembered():
    block, x = random_block(4, 6), features(6, 2)
    assert mean_and_own(x, block) is not mean_and_own(x, block)


def test_what_is_remembered_dies_with_the_features():
    block, x = shared(random_block(4, 6)), features(6, 2)
    mean_and_own(x, block)
    remembered = block.once("aggregated", dict)
    assert len(remembered) == 1
    del x
    gc.collect()
    assert not remembered


def test_the_death_of_older_features_forgets_nothing():
    block = shared(random_block(4, 6))
    old, new = features(6, 2), features(6, 2, seed=1)
    mean_and_own(old, block)
    kept = mean_and_own(new, block)
    del old
    gc.collect()
    assert mean_and_own(new, block) is kept


def test_inference_tensors_are_not_remembered():
    block = shared(random_block(4, 6))
    with torch.inference_mode():
        x = features(6, 2)
        first = neighbor_sum(x, block)
        x.mul_(2)
        torch.testing.assert_close(neighbor_sum(x, block), 2 * first)


def test_remembered_sums_and_means_are_not_mixed_up():
    block, x = shared(block_of([[0, 1]], 2)), torch.tensor([[1.0], [3.0]])
    assert neighbor_sum(x, block).item() == 4
    assert neighbor_mean(x, block).item() == 2
    assert mean_and_own(x, block).tolist() == [[2, 1]]
