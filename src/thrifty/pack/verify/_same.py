"""Equality of values, tensors and arrays to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thrifty.pack.identity import parts_of


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors and arrays to the last bit; NaN equals NaN.

    >>> same({"w": torch.tensor([1.0, float("nan")])}, {"w": torch.tensor([1.0, float("nan")])})
    True
    >>> same([1, 2], (1, 2))
    False
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and (bool((one == other).all()) or one.tobytes() == other.tobytes())
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return (
            isinstance(one, list) == isinstance(other, list)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:  # noqa: BLE001 (the user's objects may define any comparison)
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout != other.layout:
        return False
    one, other = one.detach(), other.detach()
    if one.layout != torch.strided:
        return all(map(_same_tensors, parts_of(one), parts_of(other)))
    if one.dtype.is_floating_point or one.dtype.is_complex:
        nan = torch.isnan(one) & torch.isnan(other)
        return bool(((one == other) | nan).all())
    return bool(torch.equal(one, other))
