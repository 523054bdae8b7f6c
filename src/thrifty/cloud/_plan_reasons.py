"""What bounds a step, and what keeps a fleet from training: in words."""

from __future__ import annotations

import numpy as np

from thrifty.perf import StepProfile

from ._offer import GIB, Offer
from ._plan_steps import replayed_s


_WAITING = 0.1
"""Share of a step that waits for sums before anybody is told."""


def bound_by(
    profile: StepProfile, *, batch: np.ndarray, compute: np.ndarray, step_s: float
) -> str:
    """What bounds a step that takes ``step_s``.

    Args:
        profile: of a step on the device at hand.
        batch: samples of each worker.
        compute: times the profile's seconds, of each worker.
        step_s: as foretold.
    """
    sums = np.zeros(len(profile.bucket_bytes))
    reading = float((batch * profile.sample_input_s).max())
    alone = float(replayed_s(profile, batch=batch, compute=compute, sums_s=sums))
    if reading >= step_s:
        return "input"
    waiting = 1 - alone / step_s
    if waiting >= _WAITING:
        return f"network: {waiting:.0%} of the step waits for sums".replace("%", " %")
    return "compute"


def misfit(profile: StepProfile, offer: Offer, *, batch: int) -> str:
    """Why a device of this machine does not hold so many samples."""
    memory = offer.device_memory_bytes or 0.0
    samples = "one sample needs" if batch == 1 else f"{batch} samples need"
    return (
        f"{samples} {gib(float(profile.peak_at(batch)))}, a device of {offer} has {gib(memory)}"
    )


def gib(num_bytes: float) -> str:
    """Bytes, to be read."""
    return f"{num_bytes / GIB:.1f} GiB"


def spell_s(seconds: float) -> str:
    """A duration, to be read."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
