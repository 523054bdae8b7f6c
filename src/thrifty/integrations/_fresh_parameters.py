"""Frozen parameters, which a checkpoint leaves out because a fresh model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from thrifty.pack import borrowed_streams
from thrifty.pack._frozen import digest_of
from thrifty.pack._state import fill_in as filled_state, leave_out as state_without


Digests = Mapping[str, str]
"""Digests of tensors by name."""


def frozen_digests(
    model: torch.nn.Module, *, kept: Mapping[str, Any], make: Callable[[], torch.nn.Module]
) -> tuple[Any, Digests]:
    """Return the digests of the parameters that checkpoints of a trial may leave out.

    These are frozen parameters that a second fresh model has, too. They are looked for before the
    first epoch; later ones leave out what they have found in the checkpoint.

    Args:
        model: A fresh model.
        kept: What the last epoch left; empty before the first one.
        make: Makes another fresh model.

    Returns:
        The model to train, and the digests. It is the one that was made last: user code may have
        noted down which one that is.
    """
    if kept:
        # Checkpoints of before have all parameters.
        return model, kept.get("frozen", {})
    first = _digests(model)
    if not first:
        return model, {}
    with borrowed_streams():
        model = make()
        second = _digests(model)
    return model, {name: digest for name, digest in first.items() if second.get(name) == digest}


def leave_out(state: Mapping[str, Any], digests: Digests) -> tuple[Mapping[str, Any], Digests]:
    """Leave out of a model's state what has these digests, and return their digests."""
    left_out = {
        name: digest
        for name, digest in digests.items()
        if _is_dense(state.get(name)) and digest_of(state[name]) == digest
    }
    if not left_out:
        return state, {}
    return state_without(state, left_out), left_out


def fill_in(
    state: Mapping[str, Any], digests: Digests, *, model: torch.nn.Module
) -> Mapping[str, Any]:
    """Return a model's state with what ``leave_out`` has left out.

    Args:
        state: The state.
        digests: The digests of what was left out.
        model: A fresh model.

    Raises:
        StateError: The fresh model has not what was left out.
    """
    fresh = model.state_dict() if digests else {}
    filled, _ = filled_state(
        state, digests, fresh=fresh, digest_of=lambda name: digest_of(fresh[name])
    )
    return filled


def _digests(model: torch.nn.Module) -> Digests:
    return {
        name: digest_of(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and _is_dense(parameter)
    }


def _is_dense(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized)
