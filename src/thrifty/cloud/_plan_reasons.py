"""Texts on what bounds a step, and on what keeps a fleet from training."""

from __future__ import annotations

import numpy as np

from thrifty.perf import StepProfile

from ._offer import GIB, Offer
from ._plan_steps import replayed_s


_WAITING = 0.1
"""Least share of a step spent waiting for all-reduces to call the step network-bound."""


def bound_by(
    profile: StepProfile, *, batch: np.ndarray, compute: np.ndarray, step_s: float
) -> str:
    """Return what bounds a step that takes ``step_s``: input, network or compute.

    Args:
        profile: profile of a step on the profiled device.
        batch: samples of each worker.
        compute: factor on the profile's seconds, for each worker.
        step_s: estimated seconds of the step.
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
    """Return why a device of this machine cannot hold ``batch`` samples."""
    memory = offer.device_memory_bytes or 0.0
    samples = "one sample needs" if batch == 1 else f"{batch} samples need"
    return (
        f"{samples} {gib(float(profile.peak_at(batch)))}, a device of {offer} has {gib(memory)}"
    )


def gib(num_bytes: float) -> str:
    """Return a number of bytes as readable text."""
    return f"{num_bytes / GIB:.1f} GiB"


def spell_s(seconds: float) -> str:
    """Return a duration as readable text."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
