"""Seconds of a step, computed for many fleets at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thrifty.perf import StepProfile, iteration_s

from ._plan_devices import Devices


_CHUNK = 2**13
"""Fleets that are computed together; more would not fit into the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSteps:
    """Steps on 1, 2, ... equal machines.

    Attributes:
        step_s: seconds: median, low, high, [3, kinds, sizes]; infinite where samples do not fit.
        batch: samples of each device, [kinds, sizes].
    """

    step_s: np.ndarray
    batch: np.ndarray


def equal_steps(
    profile: StepProfile, devices: Devices, *, global_batch: int, most_nodes: int
) -> EqualSteps:
    """Return data-parallel steps on 1 to ``most_nodes`` machines of each kind.

    The batch is split equally. A device has at least one sample, and no more than fit into its
    memory.
    """
    nodes = np.arange(1, most_nodes + 1)
    workers = devices.per_node[:, None] * nodes
    batch = -(-global_batch // workers)
    step_s = np.empty((3, *batch.shape))
    rows = max(1, _CHUNK // most_nodes)
    for first in range(0, len(devices), rows):
        part = slice(first, first + rows)
        few = devices[part]
        step_s[:, part] = replayed_s(
            profile,
            batch=batch[part, :, None],
            compute=few.compute[..., None, None],
            sums_s=few.sums_s(profile.bucket_bytes, nodes),
        )
    fits = (batch <= devices.most[:, None]) & (workers <= global_batch)
    return EqualSteps(step_s=np.where(fits, step_s, np.inf), batch=batch)


def replayed_s(
    profile: StepProfile, *, batch: np.ndarray, compute: np.ndarray, sums_s: np.ndarray
) -> np.ndarray:
    """Return the seconds of a step of workers with these batches; the axes broadcast.

    Args:
        profile: profile of a step on the profiled device.
        batch: samples of each worker, [..., workers].
        compute: factor on the profile's seconds, [..., workers].
        sums_s: seconds of each bucket's all-reduce, [..., buckets].
    """
    return iteration_s(
        forward_s=compute * profile.forward_at(batch),
        backward_s=compute * profile.backward_at(batch),
        optimizer_s=compute * (profile.optimizer_s + profile.overhead_s),
        bucket_ready=profile.bucket_ready,
        bucket_s=sums_s,
        input_s=batch * profile.sample_input_s,
    )
