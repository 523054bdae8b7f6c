"""Cost of exchanging gradients, from nominal bandwidth and latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A ring over machines, and a ring inside each of them; the slowest link sets the pace.

    Args:
        bytes_per_s: bandwidth between machines.
        latency_s: latency of each message between machines.
        inner_bytes_per_s: bandwidth between the devices of a machine.
        inner_latency_s: latency of each message between them.

    Raises:
        UsageError: a bandwidth is not positive, or a latency is negative.

    >>> Link(bytes_per_s=1e9).all_reduce_s(num_bytes=1e9, nodes=2)
    1.0
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    inner_bytes_per_s: float = math.inf
    inner_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.inner_bytes_per_s > 0):
            raise UsageError(
                f"a link carries something: bytes_per_s={self.bytes_per_s}, "
                f"inner_bytes_per_s={self.inner_bytes_per_s}"
            )
        if not (self.latency_s >= 0 and self.inner_latency_s >= 0):
            raise UsageError(
                f"a latency is not negative: latency_s={self.latency_s}, "
                f"inner_latency_s={self.inner_latency_s}"
            )

    def all_reduce_s(self, *, num_bytes: float, nodes: int, per_node: int = 1) -> float:
        """Return the seconds of an all-reduce, inside and between machines.

        A ring of ``n`` members sends 2 (n - 1) messages, each of 1/n of the bytes.

        Args:
            num_bytes: bytes to sum.
            nodes: number of machines.
            per_node: devices per machine.
        """
        return float(
            ring_s(num_bytes, nodes, self.bytes_per_s, self.latency_s)
            + ring_s(num_bytes, per_node, self.inner_bytes_per_s, self.inner_latency_s)
        )


def ring_s(  # noqa: PLR0917 -- the symbols of a formula
    num_bytes: ArrayLike, members: ArrayLike, bytes_per_s: ArrayLike, latency_s: ArrayLike
) -> np.ndarray:
    """Return the seconds of a ring all-reduce; arguments broadcast (Patarasuk and Yuan, 2009)."""
    n = np.maximum(np.asarray(members, float), 1.0)
    share = np.asarray(num_bytes, float) / n / np.asarray(bytes_per_s, float)
    out: np.ndarray = 2 * (n - 1) * (np.asarray(latency_s, float) + share)
    return out
