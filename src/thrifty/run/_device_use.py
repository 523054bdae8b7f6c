"""What a worker has used of its device, as far as it can be measured without changing anything."""

from __future__ import annotations

import importlib
import sys

import torch

from thrifty.core import DeviceUse


def device_use(device: torch.device) -> DeviceUse:
    """Return the device of a worker and the peak memory of its process so far.

    On a GPU, this is what PyTorch has allocated there. Elsewhere, it is the resident memory of the
    process, with everything else that the process holds. The peak is never reset, as user code may
    read it, too, so it is one of the worker and not of a stage.

    >>> device_use(torch.device("cpu")).device
    'cpu'
    """
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        return DeviceUse(device=name, peak_bytes=torch.cuda.max_memory_allocated(device))
    is_cpu = device.type == "cpu"
    return DeviceUse(device=str(device), peak_bytes=_peak_resident_bytes() if is_cpu else None)


def _peak_resident_bytes() -> int | None:
    """Return the peak resident memory of this process; None if the system does not say it."""
    try:
        resource = importlib.import_module("resource")  # which Windows lacks
    except ImportError:
        return None
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
