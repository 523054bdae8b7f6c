"""The state of a model as checkpoints hold it, and how it is loaded, with quantised layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import StateError
from thrifty.pack._frozen import is_same_memory
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
    apart = _there_already(model, state)
    if not (layers or apart):
        model.load_state_dict(state)
        return
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


def _there_already(model: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that a model has in the same memory already.

    Loading would copy them, and take the memory again that models share. The result is empty if a
    module loads its state by code of its own, which may expect all of it.
    """
    if not all(map(_loads_plainly, model.modules())):
        return set()
    own = model.state_dict()
    return {
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and is_same_memory(own[name], value)
    }


def _loads_plainly(module: torch.nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is torch.nn.Module._load_from_state_dict
        and kind.load_state_dict is torch.nn.Module.load_state_dict
        and kind.set_extra_state is torch.nn.Module.set_extra_state
        and "load_state_dict" not in vars(module)
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
    )


def _are_alike(now: torch.Tensor, value: Any) -> bool:
    like = isinstance(value, torch.Tensor) and value.dtype == now.dtype
    return like and (value.shape == now.shape or now.dim() == 1)  # a text, as bytes


def _are_equal(now: torch.Tensor, value: Any) -> bool:
    return (
        _are_alike(now, value)
        and value.shape == now.shape
        and torch.equal(plain(now), plain(value).to(now.device))
    )
