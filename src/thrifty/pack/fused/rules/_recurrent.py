"""Rules for recurrent cells, computed as linear layers.

Whole recurrent layers are refused, since their kernels take one set of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES, UnfusableError, register_rule

from ._layers import linear


@register_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(group: Group, *args: Any, **kwargs: Any) -> Any:
    """Refuse whole recurrent layers."""
    raise UnfusableError("recurrent layers (nn.LSTM, nn.GRU, nn.RNN) have no batched rule")


def simple_cell(activation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.rnn_tanh_cell`` or ``torch.rnn_relu_cell``."""

    def rule(
        group: Group,
        input: Any,
        hx: Any,
        w_ih: Any,
        w_hh: Any,
        b_ih: Any = None,
        b_hh: Any = None,
    ) -> Packed:
        out: Packed = activation(
            linear(group, input, w_ih, b_ih) + linear(group, hx, w_hh, b_hh)
        )
        return out

    return rule


@register_rule(torch.gru_cell)
def gru_cell(
    group: Group,
    input: Any,
    hx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """Compute ``nn.GRUCell``."""
    reset_x, update_x, new_x = linear(group, input, w_ih, b_ih).chunk(3, -1)
    reset_h, update_h, new_h = linear(group, hx, w_hh, b_hh).chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + torch.sigmoid(update_x + update_h) * (hx - new)


@register_rule(torch.lstm_cell)
def lstm_cell(
    group: Group,
    input: Any,
    hx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> tuple[Any, Any]:
    """Compute ``nn.LSTMCell``."""
    gates = linear(group, input, w_ih, b_ih) + linear(group, hx[0], w_hh, b_hh)
    enter, forget, new, leave = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * hx[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


RULES[torch.rnn_tanh_cell] = simple_cell(torch.tanh)
RULES[torch.rnn_relu_cell] = simple_cell(torch.relu)
