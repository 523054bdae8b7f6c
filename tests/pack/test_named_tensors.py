"""Tensors of a model by name are those that PyTorch gives, in its order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thrifty.pack._state import named_tensors


def by_torch(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_as_torch(model):
    found, wanted = named_tensors(model), by_torch(model)
    assert list(found) == list(wanted)
    assert all(found[name] is tensor for name, tensor in wanted.items())


class Own(nn.Module):
    """Names its parameters in a way of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def named_parameters(self, *args, **kwargs):
        return [("mine", self.linear.weight)]


def shared_layer():
    layer = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(layer, nn.BatchNorm1d(2)), layer, nn.Tanh())


def tied_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[1].register_buffer("copy", model[0].bias)
    return model


def with_nothing():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model.register_module("none", None)
    model.register_buffer("empty", None)
    model.register_buffer("own", torch.ones(1), persistent=False)
    return model


def in_a_circle():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_module("parent", model)
    return model


MODELS = {
    "nested": lambda: nn.TransformerEncoderLayer(4, 2),
    "shared layer": shared_layer,
    "tied weights": tied_weights,
    "with nothing": with_nothing,
    "in a circle": in_a_circle,
    "recurrent": lambda: nn.LSTM(2, 3, num_layers=2),
    "own order": Own,
    "own order inside": lambda: nn.Sequential(nn.Linear(2, 2), Own()),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "scripted inside": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_names_and_order_are_those_of_pytorch(name):
    if name == "own order inside":
        # PyTorch asks only the outermost module for its parameters
        assert list(by_torch(MODELS[name]())) == [
            "0.weight",
            "0.bias",
            "1.linear.weight",
            "1.linear.bias",
        ]
    model = MODELS[name]()
    if name.startswith("scripted"):
        assert list(named_tensors(model)) == list(by_torch(model))
        return
    assert_as_torch(model)
