"""A state converted to bytes and back is the same state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import SafetensorError

from thrifty.core import TaskError
from thrifty.hetero.workers._membership import from_bytes, to_bytes

from .jobs import data, loss, model


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(value):
    data = to_bytes(value)
    assert (data.dtype, data.dim()) == (torch.uint8, 1)
    return from_bytes(data)


@given(plain)
def test_plain_values_come_back(value):
    assert there_and_back(value) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.randn(3, 4).t(),
        torch.randn(5)[::2],
        torch.randn(4).bfloat16(),
        torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.double),
        torch.tensor([True, False]),
        torch.randn(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_tensors_come_back_bit_by_bit(tensor):
    back = there_and_back({"a": [tensor]})["a"][0]
    assert back.dtype == tensor.dtype
    torch.testing.assert_close(back, tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert not back.requires_grad


def test_training_goes_on_from_it():
    def trained(net, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net, data()[:16]).backward()
            optimizer.step()
        return net

    def fresh():
        net = model(norm=True)
        return net, torch.optim.Adam(net.parameters(), lr=0.01)

    net, optimizer = fresh()
    trained(net, optimizer, 3)
    state = there_and_back({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    other, again = fresh()
    other.load_state_dict(state["net"])
    again.load_state_dict(state["optimizer"])
    trained(net, optimizer, 3)
    trained(other, again, 3)
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


def test_tied_parameters_come_back():
    weight = torch.randn(2, 2)
    back = there_and_back({"one": weight, "two": weight, "part": weight[0]})
    assert torch.equal(back["one"], weight)
    assert torch.equal(back["two"], weight)
    assert torch.equal(back["part"], weight[0])


def test_bytes_are_a_copy():
    weight = torch.ones(2)
    data = to_bytes({"weight": weight})
    weight.zero_()
    one, two = from_bytes(data), from_bytes(data)
    one["weight"].zero_()
    assert two["weight"].tolist() == [1.0, 1.0]


def test_bytes_may_be_followed_by_nothing_else_than_their_tensors():
    """An extra byte is an error, not another state."""
    data = to_bytes({"weight": torch.ones(2)})
    with pytest.raises(SafetensorError, match="deserializing"):
        from_bytes(torch.cat([data, data[:1]]))


def test_what_would_need_pickle_is_refused():
    with pytest.raises(TaskError, match="stored without pickle"):
        to_bytes({"x": object()})


def test_a_model_s_state_keeps_the_versions_of_its_modules():
    """Without them, torch asks for a counter that this layer does not have."""

    def net():
        layer = torch.nn.BatchNorm1d(3)
        layer.num_batches_tracked = None
        return torch.nn.Sequential(layer)

    state = net().state_dict()
    back = there_and_back({"model": state})["model"]
    assert back._metadata == state._metadata
    net().load_state_dict(back)
