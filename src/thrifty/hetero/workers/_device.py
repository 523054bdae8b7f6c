"""The device of a model, and moving batches to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import HeteroError


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters.

    Raises:
        HeteroError: The model has no parameters.
    """
    for parameter in model.parameters():
        return parameter.device
    raise HeteroError("the model has no parameters to train")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device; other values stay as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
