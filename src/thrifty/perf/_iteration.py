"""How long one data-parallel iteration takes: a replay of its compute and its communication."""

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
    """Seconds of an iteration, by two serial streams with dependencies (Srifty, MLSys 2022; as in the first author's simulator).

    Compute runs forward, then backward; bucket ``k`` may be summed once the slowest worker has come to it, and after bucket ``k - 1``. The optimiser follows when both streams are done.

    All times broadcast, so a call can answer for many fleets.

    Args:
        forward_s: of each worker, [..., workers]; 1 worker stands for equal ones.
        backward_s: the same.
        optimizer_s: the same.
        bucket_ready: share of the backward pass after which each bucket is ready, ascending, [buckets].
        bucket_s: of each bucket's sum, [..., buckets].
        stolen: share of communication during which compute stands still: 0 where a network card does it, up to 1 where the same cores do.
        input_s: to read a worker's samples, [..., workers]; reading goes on beside all the rest.

    Returns:
        Seconds, [...].

    Raises:
        UsageError: there are not as many sums as buckets.

    >>> float(iteration_s(forward_s=[1.0], backward_s=[2.0], optimizer_s=[0.5], bucket_ready=[0.5, 1.0], bucket_s=[2.0, 0.25]))
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
    # Who ends its backward pass first waits for the sums like all others; optimisers run at the same time.
    trained = np.maximum(compute, end) + np.asarray(optimizer_s, float).max(axis=-1)
    reading = np.asarray(input_s, float)
    return np.asarray(np.maximum(trained, reading.max(axis=-1) if reading.ndim else reading))
