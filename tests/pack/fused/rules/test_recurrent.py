from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pack.fused.twin import check, normal, refused


pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("function", [torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
def test_recurrent_functions_are_refused(function):
    options = (True, 1, 0.0, True, False, False)
    refused(
        "recurrent layers.*no batched rule",
        lambda m, x: function(x, (x, x) if function is torch.lstm else x, [x], *options),
        normal(4, 3),
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("shared", [False, True])
def test_recurrent_layers_are_refused(kind, shared):
    refused(
        "recurrent layers.*no batched rule",
        lambda m, x: m(x)[0],
        normal(4, 2, 3, shared=shared),
        make=lambda: kind(3, 5),
    )


@pytest.mark.parametrize(
    "kind",
    [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda i, o: nn.RNNCell(i, o, nonlinearity="relu")],
)
@pytest.mark.parametrize("shared", [False, True])
def test_cells_are_linear_layers(kind, shared):
    def forward(module, *steps):
        state = None
        for x in steps:
            state = module(x, state)
        return state

    check(
        forward,
        lambda s: [normal(4, 3, seed=s, shared=shared), normal(4, 3, seed=s + 5)],
        make=lambda: kind(3, 5),
    )
