"""One buffer holds all gradients and the control numbers that workers exchange."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thrifty.core import HeteroError
from thrifty.hetero.training._flat import FlatGradients


def net_of(*dtypes):
    """Return one layer of each type."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 3).to(dtype) for dtype in dtypes)


def backward(net, factor=1.0):
    torch.manual_seed(1)
    x = torch.randn(5, 4, dtype=torch.double)
    total = sum(layer(x.to(layer.weight.dtype)).double().square().mean() for layer in net)
    (factor * total).backward()


def at_once(change):
    """Return a function that starts a sum which completes immediately."""

    def begin(tensor):
        change(tensor)
        return lambda: None

    return begin


def twin(*dtypes, factor=1.0):
    net = net_of(*dtypes)
    backward(net, factor)
    return net


def assert_same_gradients(net, other, **tolerances):
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **tolerances)


def test_gradients_are_views_of_what_is_summed():
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=2)
    flat.zero()
    backward(net)
    flat.collect()
    assert_same_gradients(net, twin(torch.double))
    flat.control.copy_(torch.tensor([7.0, 8.0]))
    summed = []
    flat.reduce(at_once(lambda tensor: (summed.append(tensor.clone()), tensor.mul_(2.0))))
    grads = [p.grad.flatten() for p in twin(torch.double).parameters()][::-1]
    # Beside the gradients: the control numbers, and flags that both parameters have a gradient.
    told = torch.tensor([7.0, 8.0, 1.0, 1.0], dtype=torch.double)
    assert torch.equal(summed[0], torch.cat([*grads, told]))
    assert len(summed) == 1
    assert_same_gradients(net, twin(torch.double, factor=2.0))
    assert flat.control.tolist() == [14.0, 16.0]


def test_zeroing_begins_anew():
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=2)
    for _ in range(2):
        flat.zero()
        assert not any(p.grad.any() for p in net.parameters())
        assert not flat.control.any()
        backward(net)
        flat.control.fill_(3.0)
        flat.collect()
    assert_same_gradients(net, twin(torch.double))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_dropped_between_steps(to_none):
    net = net_of(torch.double)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    flat = FlatGradients(net.parameters(), num_control=0)
    for _ in range(2):
        flat.zero()
        # Some losses zero gradients themselves: new gradients land elsewhere and are collected.
        optimizer.zero_grad(set_to_none=to_none)
        backward(net)
        flat.collect()
        flat.reduce(at_once(lambda tensor: tensor.mul_(2.0)))
        assert_same_gradients(net, twin(torch.double, factor=2.0))
        optimizer.zero_grad(set_to_none=to_none)


def test_frozen_parameters_are_left_alone():
    net = net_of(torch.float, torch.float)
    net[0].requires_grad_(False)
    flat = FlatGradients(net.parameters(), num_control=0)
    flat.zero()
    backward(net)
    flat.collect()
    assert [p.grad is None for p in net.parameters()] == [True, True, False, False]
    assert flat.num_bytes == 4 * (4 * 3 + 3 + 2)


def test_parameters_without_a_part_in_the_loss_have_no_gradient():
    net = net_of(torch.double, torch.double)
    flat = FlatGradients(net.parameters(), num_control=0)
    flat.zero()
    backward(net[:1])
    flat.collect()
    flat.reduce(at_once(lambda tensor: None))
    assert_same_gradients(net[:1], twin(torch.double))
    assert not any(p.grad is not None and p.grad.any() for p in net[1].parameters())


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.double, torch.float),
        (torch.float, torch.double, torch.float),
        (torch.bfloat16, torch.float),
    ],
    ids=str,
)
def test_each_type_has_a_buffer(dtypes):
    net = net_of(*dtypes)
    flat = FlatGradients(net.parameters(), num_control=3)
    flat.zero()
    backward(net)
    flat.collect()
    summed = []
    flat.control.fill_(1.0)
    flat.reduce(at_once(lambda tensor: (summed.append(tensor.dtype), tensor.mul_(2.0))))
    assert sorted(map(str, summed)) == sorted({str(dtype) for dtype in dtypes})
    assert_same_gradients(net, twin(*dtypes, factor=2.0))
    assert flat.control.tolist() == [2.0] * 3
    assert flat.control.dtype in {torch.float, torch.double}


def test_times_are_told_exactly_beside_gradients_of_half_precision():
    net = net_of(torch.bfloat16)
    flat = FlatGradients(net.parameters(), num_control=2)
    flat.zero()
    flat.control.copy_(torch.tensor([1000.001, 3.0]))
    flat.reduce(at_once(lambda tensor: None))
    assert flat.control.tolist() == pytest.approx([1000.001, 3.0], rel=1e-6)
    assert flat.num_bytes == 2 * 15 + 4 * (2 + 2)


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize(
    "dtypes", [(torch.float,), (torch.double, torch.float), (torch.float, torch.float)], ids=str
)
def test_clipping_is_torch_s(dtypes, max_norm):
    net, other = net_of(*dtypes), twin(*dtypes)
    flat = FlatGradients(net.parameters(), num_control=2)
    flat.zero()
    backward(net)
    flat.collect()
    flat.control.fill_(1e9)  # control numbers are not gradients
    flat.clip(max_norm)
    norm = nn.utils.clip_grad_norm_(other.parameters(), max_norm)
    assert 0.05 < norm < 1e6
    assert_same_gradients(net, other, rtol=1e-6, atol=0)
    assert flat.control.tolist() == [1e9] * 2


def test_sparse_gradients_cannot_be_summed():
    net = nn.Embedding(5, 2, sparse=True)
    flat = FlatGradients(net.parameters(), num_control=0)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(HeteroError, match="sparse gradients cannot be summed"):
        flat.collect()


def test_there_has_to_be_something_to_train():
    for parameters in ([], nn.Linear(2, 2).requires_grad_(False).parameters()):
        with pytest.raises(HeteroError, match="no parameter of the model needs a gradient"):
            FlatGradients(parameters, num_control=0)


def test_a_parameter_that_no_loss_depends_on_has_no_gradient():
    net = net_of(torch.double, torch.double)
    flat = FlatGradients(net.parameters(), num_control=0)
    for _ in range(2):
        flat.zero()
        net[1](torch.ones(2, 4, dtype=torch.double)).sum().backward()
        flat.collect()
        flat.reduce(at_once(lambda tensor: None))
        assert [p.grad is None for p in net.parameters()] == [True, True, False, False]


def test_a_buffer_that_is_replaced_lets_go_of_the_model():
    net = net_of(torch.double)
    old = FlatGradients(net.parameters(), num_control=0)
    old.zero()
    old.close()
    new = FlatGradients(net.parameters(), num_control=0)
    new.zero()
    backward(net)
    old.collect()
    old.reduce(at_once(lambda tensor: None))
    assert all(p.grad is None for p in net.parameters())


# --- sums that overlap with the backward pass


MANY_SUMS = 1e-6
"""Bucket size in MiB, small enough that each parameter gets its own bucket."""


class Sums:
    """Starts sums, and records which ones were started and waited for."""

    def __init__(self):
        self.begun, self.waited = [], []

    def __call__(self, tensor):
        self.begun.append(tensor.clone())

        def wait():
            self.waited.append(tensor.numel())
            tensor.mul_(2.0)

        return wait


def test_buckets_are_summed_as_gradients_come():
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.ones(2, 4)
    flat = FlatGradients(net.parameters(), num_control=2, bucket_cap_mb=MANY_SUMS)
    begin, before = Sums(), []
    net[1].weight.register_hook(lambda _: before.append(len(begin.begun)))
    net[0].weight.register_hook(lambda _: before.append(len(begin.begun)))
    flat.zero(begin)
    net(x).sum().backward()
    # The sums of the last layer's bias and weight start before the first layer's gradients are
    # ready.
    assert before[0] < 2 <= before[1]
    assert not begin.waited
    flat.collect()
    flat.control.fill_(1.0)
    flat.reduce(begin)
    # The control numbers are sent with the rest of the buffer, at the end.
    assert [tensor.numel() for tensor in begin.begun] == begin.waited == [2, 6, 3, 12, 2 + 4]
    twin = copy.deepcopy(net)
    twin.zero_grad()
    (2 * twin(x).sum()).backward()
    assert_same_gradients(net, twin)
    assert flat.control.tolist() == [2.0, 2.0]


def test_a_cap_holds_whole_gradients():
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # 1 MiB each
    flat = FlatGradients(net.parameters(), num_control=1, bucket_cap_mb=2.0)
    begin = Sums()
    flat.zero(begin)
    net(torch.ones(1, 512)).sum().backward()
    flat.collect()
    flat.reduce(begin)
    mib = 2**18  # numbers in a MiB
    assert [tensor.numel() for tensor in begin.begun] == [mib, 2 * mib, 2 * mib, mib + 1 + 6]


@pytest.mark.parametrize("cap", [None, MANY_SUMS])
def test_a_pass_that_is_no_step_sums_nothing(cap):
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=0, bucket_cap_mb=cap)
    flat.zero()
    backward(net)
    flat.collect()
    begin = Sums()
    flat.zero(begin)
    assert not begin.begun
    backward(net)
    assert bool(begin.begun) == (cap is not None)


def test_sums_begin_in_one_order_on_all_workers():
    """The order of sums does not depend on the order of gradients, or on whether there are any."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x, *, first):
            return (
                self.two(self.one(x)) if first == "one" else self.two(x) + self.one(x).sum()
            ).sum()

    orders = []
    for first in ("one", "two", None):
        net, begin = Both(), Sums()
        flat = FlatGradients(net.parameters(), num_control=0, bucket_cap_mb=MANY_SUMS)
        flat.zero(begin)
        if first:
            net(torch.ones(1, 4), first=first).backward()
        flat.collect()
        flat.reduce(begin)
        orders.append([tensor.numel() for tensor in begin.begun])
    assert orders == [[5, 20, 4, 16, 4]] * 3


def test_gradients_that_land_elsewhere_are_taken_in_before_their_sum():
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=0, bucket_cap_mb=MANY_SUMS)
    flat.zero(begin := Sums())
    torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
    backward(net)
    flat.collect()
    flat.reduce(begin)
    assert_same_gradients(net, twin(torch.double, factor=2.0))


def test_a_gradient_that_changes_after_its_sum_has_begun_is_refused():
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=0, bucket_cap_mb=MANY_SUMS)
    flat.zero(Sums())
    backward(net)
    with pytest.raises(HeteroError, match=r"goes backward more than once.*bucket_cap_mb=None"):
        backward(net)


def test_several_passes_are_one_gradient_without_overlap():
    net = net_of(torch.double)
    flat = FlatGradients(net.parameters(), num_control=0)
    flat.zero(begin := Sums())
    backward(net, 0.25)
    backward(net, 0.75)
    flat.collect()
    flat.reduce(begin)
    assert_same_gradients(net, twin(torch.double, factor=2.0))
