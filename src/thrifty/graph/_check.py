"""Checks of user input: numbers and nodes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch

from thrifty.core import GraphError


def at_least(least: int, **options: Any) -> None:
    """Check that all options are integers of at least ``least``.

    Raises:
        GraphError: an option is not an integer, or too small.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise GraphError(f"{name}={value!r}; give an integer of at least {least}")


def checked_nodes(nodes: Any, *, num_nodes: int, name: str) -> np.ndarray:
    """Return node numbers as int64, shape ``(num,)``.

    Args:
        nodes: node numbers to check.
        num_nodes: number of nodes in the graph.
        name: what error messages call one of the nodes.

    Raises:
        GraphError: the numbers are not integers, or a node does not exist.
    """
    array = _array(nodes, name=name)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        hint = "; give np.flatnonzero(mask) for a mask" if array.dtype.kind == "b" else ""
        raise GraphError(
            f"{name}s have shape {array.shape} and dtype {array.dtype}; give node numbers, "
            f"integers of shape (num,){hint}"
        )
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= num_nodes:
            bad = low if low < 0 else high
            there = f"nodes 0 to {num_nodes - 1}" if num_nodes else "no nodes"
            raise GraphError(f"{name} {bad} does not exist: the graph has {there}")
    # Kernels are compiled for one kind of array.
    return np.require(array, np.int64, ["C", "W"])


def _array(nodes: Any, *, name: str) -> np.ndarray:
    if isinstance(nodes, torch.Tensor):
        # NumPy does not know all dtypes of torch; none of those it lacks are integers.
        nodes = nodes.detach().cpu()
        return nodes.double().numpy() if nodes.is_floating_point() else nodes.numpy()
    try:
        return np.asarray(nodes)
    except ValueError as error:
        raise GraphError(
            f"{name}s are no array: {error}; give node numbers, integers of shape (num,)"
        ) from None
