"""States of the tensor side as arrays of the store, without copies where the memory allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thrifty.pack import State


def state_to_arrays(state: State) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """NumPy arrays and JSON. NumPy has no bfloat16 (nor float8): those travel as integers of their width."""
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
    """The state that ``state_to_arrays`` took apart."""
    tensors: dict[str, torch.Tensor] = {}
    for key, array in arrays.items():
        tensor = torch.from_numpy(array.copy() if not array.flags.writeable else array)
        dtype = meta["dtypes"].get(key)
        tensors[key] = tensor if dtype is None else tensor.view(getattr(torch, dtype))
    return State(tensors=tensors, tree=meta["tree"])
