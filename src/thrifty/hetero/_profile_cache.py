"""Measured step profiles, cached as files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thrifty.core import fingerprint, plain_logger
from thrifty.perf import StepProfile

from ._learner import device_of


_log = plain_logger("thrifty.hetero")


def device_name(device: torch.device) -> str:
    """Return the device's model name; for a CPU also the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s)"


def profile_key(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, sizes: Sequence[int]
) -> str:
    """Return a digest of everything that a profile depends on, except the loss."""
    return fingerprint({
        "parameters": [
            [list(each.shape), str(each.dtype), each.requires_grad]
            for each in model.parameters()
        ],
        "model": repr(model),
        "training": [module.training for module in model.modules()],
        "optimizer": type(optimizer).__qualname__,
        "batch": [
            [list(each.shape), str(each.dtype)]
            if isinstance(each, Tensor)
            else type(each).__name__
            for each in tree_leaves(batch)
        ],
        "sizes": list(sizes),
        "device": device_name(device_of(model)),
        "torch": torch.__version__,
    })


def read_profile(path: Path) -> StepProfile | None:
    """Return the cached profile, or None if there is none or it cannot be read."""
    try:
        return StepProfile.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s holds no profile (%s): measured again", path, error)
        return None


def write_profile(path: Path, profile: StepProfile) -> None:
    """Write a profile atomically; log a warning if the folder cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile.to_json()))
        temporary.replace(path)
    except OSError as error:
        _log.warning("a profile cannot be kept in %s: %s", path.parent, error)
        with suppress(OSError):
            temporary.unlink()
