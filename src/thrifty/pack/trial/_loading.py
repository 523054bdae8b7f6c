"""The state of a model as checkpoints hold it, and how it is loaded, with quantised layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import StateError
from thrifty.pack._quantized import WEIGHT, plain, quantized_layers
from thrifty.pack._state import state_versions, with_versions


def plain_state(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the state of a model, with packed weights as plain tensors; views, not copies."""
    state = model.state_dict()
    for path in quantized_layers(model):
        name = f"{path}.{WEIGHT}" if path else WEIGHT
        state[name] = plain(state[name])
    return state


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a whole state into a model.

    Raises:
        RuntimeError: The state is not that of such a model.
        StateError: A layer is not quantised as in the state.
    """
    layers = quantized_layers(model)
    if not layers:
        model.load_state_dict(state)
        return
    apart: set[str] = set()
    for path, layer in layers.items():
        prefix, now = f"{path}." if path else "", layer.contents()
        apart |= {prefix + name for name in now}
        held: dict[str, Any] = {name: state.get(prefix + name) for name in now}
        if all(_are_equal(now[name], value) for name, value in held.items()):
            continue
        if not all(_are_alike(now[name], value) for name, value in held.items()):
            raise StateError(
                f"the layer {path!r} is quantised in another way than when the checkpoint was "
                "written; let the function that makes the model quantise it as before, or start a "
                "new study"
            )
        layer.load({name: plain(value).clone() for name, value in held.items()})
    others = {name: value for name, value in state.items() if name not in apart}
    found = model.load_state_dict(with_versions(others, state_versions(state)), strict=False)
    if found.unexpected_keys or set(found.missing_keys) - apart:
        model.load_state_dict(state)  # which says what is wrong


def _are_alike(now: torch.Tensor, value: Any) -> bool:
    like = isinstance(value, torch.Tensor) and value.dtype == now.dtype
    return like and (value.shape == now.shape or now.dim() == 1)  # a text, as bytes


def _are_equal(now: torch.Tensor, value: Any) -> bool:
    return (
        _are_alike(now, value)
        and value.shape == now.shape
        and torch.equal(plain(now), plain(value).to(now.device))
    )
