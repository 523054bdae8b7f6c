"""Time of one data-parallel iteration, from a replay of its compute and communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import UsageError


def iteration_s(
    *,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    optimizer_s: ArrayLike,
    bucket_ready: Sequence[float],
    bucket_s: ArrayLike,
    stolen: float = 0.0,
    input_s: ArrayLike = 0.0,
) -> np.ndarray:
    """Return the seconds of an iteration, from two serial streams with dependencies.

    The replay follows Srifty (MLSys 2022), as in the first author's simulator. Compute runs the
    forward pass, then the backward pass. The all-reduce of bucket ``k`` starts when the slowest
    worker has reached it and bucket ``k - 1`` is done. The optimizer runs when both streams are
    done.

    All times broadcast, so that one call can answer for many fleets.

    Args:
        forward_s: seconds of each worker's forward pass, [..., workers]; 1 worker stands for equal
            ones.
        backward_s: seconds of each worker's backward pass, [..., workers].
        optimizer_s: seconds of each worker's optimizer, [..., workers].
        bucket_ready: share of the backward pass after which each bucket is ready, ascending,
            [buckets].
        bucket_s: seconds of each bucket's all-reduce, [..., buckets].
        stolen: share of communication time during which compute stalls: 0 if a network card does
            the work, up to 1 if the same cores do.
        input_s: seconds to read a worker's samples, [..., workers]; reading overlaps with
            everything else.

    Returns:
        Seconds, [...].

    Raises:
        UsageError: the numbers of all-reduces and of buckets differ.

    >>> float(
    ...     iteration_s(
    ...         forward_s=[1.0],
    ...         backward_s=[2.0],
    ...         optimizer_s=[0.5],
    ...         bucket_ready=[0.5, 1.0],
    ...         bucket_s=[2.0, 0.25],
    ...     )
    ... )
    4.75
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    sums = np.asarray(bucket_s, float)
    if sums.shape[-1] != len(bucket_ready):
        raise UsageError(
            f"each of {len(bucket_ready)} buckets has a sum, not {sums.shape[-1]} of them"
        )
    end = np.zeros(())
    lost = np.zeros(())
    for index, share in enumerate(bucket_ready):
        ready = (forward + share * backward).max(axis=-1) + lost
        took = sums[..., index]
        end = np.maximum(ready, end) + took
        if share < 1.0:
            lost = lost + stolen * took
    compute = (forward + backward).max(axis=-1) + lost
    # A worker that ends its backward pass early waits for the all-reduces like all others.
    # Optimizers run at the same time on all workers.
    trained = np.maximum(compute, end) + np.asarray(optimizer_s, float).max(axis=-1)
    reading = np.asarray(input_s, float)
    return np.asarray(np.maximum(trained, reading.max(axis=-1) if reading.ndim else reading))
