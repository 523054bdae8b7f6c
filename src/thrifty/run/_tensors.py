"""Conversion of states between torch tensors and NumPy arrays, without copies if possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thrifty.core import CheckpointError
from thrifty.pack import State


def state_to_arrays(state: State) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a state as NumPy arrays and JSON data.

    NumPy has no bfloat16 and no float8, so those are stored as integers of the same width.
    """
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for key, tensor in state.tensors.items():
        held = tensor.cpu().contiguous()
        try:
            arrays[key] = held.numpy()
        except TypeError:
            width = {1: torch.uint8, 2: torch.int16}[held.element_size()]
            arrays[key] = held.view(width).numpy()
            dtypes[key] = str(held.dtype).removeprefix("torch.")
    return arrays, {"tree": state.tree, "dtypes": dtypes}


def state_from_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> State:
    """Return the state from which ``state_to_arrays`` made arrays and JSON data.

    Raises:
        CheckpointError: The arrays or the JSON data are not the output of ``state_to_arrays``.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for key, array in arrays.items():
            tensor = torch.from_numpy(array.copy() if not array.flags.writeable else array)
            dtype = meta["dtypes"].get(key)
            tensors[key] = tensor if dtype is None else tensor.view(_dtype(dtype))
        return State(tensors=tensors, tree=meta["tree"])
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"this is not the state of a trial ({error})") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no type of numbers")
    return found
