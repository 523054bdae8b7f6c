"""Estimates for every kind of machine among the offers, as columns to compute with."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from thrifty.perf import CollectiveModel, Link, StepProfile, ring_s

from ._beliefs import Beliefs
from ._fleet import Interval
from ._offer import Offer


_QUANTILES = (0.5, 0.05, 0.95)
"""Median, low and high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Estimates for several kinds of machines; intervals have a first axis of median, low, high.

    Attributes:
        compute: factor on the profile's seconds, [3, kinds].
        network: factor on the seconds of the links, [3, kinds].
        links: bandwidth (bytes/s) and latency (s) between machines, then inside them, [4, kinds].
        per_node: devices of a machine, [kinds].
        most: samples that fit into one device, [kinds].
        measured: instance types whose all-reduces were measured, [kinds]; "" for the others.
        collectives: model of these measurements; None if there are none.
    """

    compute: np.ndarray
    network: np.ndarray
    links: np.ndarray
    per_node: np.ndarray
    most: np.ndarray
    measured: tuple[str, ...]
    collectives: CollectiveModel | None

    @classmethod
    def of(cls, offers: Sequence[Offer], *, beliefs: Beliefs, profile: StepProfile) -> Devices:
        """Return the estimates, with one kind for each offer.

        Raises:
            CloudError: nothing is known of a device's speed.
        """
        holds: dict[float | None, int] = {}
        for memory in {offer.device_memory_bytes for offer in offers}:
            holds[memory] = profile.most(math.inf if memory is None else memory)
        collectives = beliefs.collectives(offers)
        known = () if collectives is None else collectives.names
        return cls(
            compute=_ends([beliefs.compute(offer) for offer in offers]),
            network=_ends([beliefs.network(offer) for offer in offers]),
            links=np.array([_numbers(beliefs.link(offer)) for offer in offers]).T,
            per_node=np.array([offer.accelerator_count for offer in offers]),
            most=np.array([holds[offer.device_memory_bytes] for offer in offers]),
            measured=tuple(
                offer.instance_type if offer.instance_type in known else "" for offer in offers
            ),
            collectives=collectives,
        )

    def __len__(self) -> int:
        return self.per_node.size

    def __getitem__(self, rows: slice | np.ndarray) -> Devices:
        return Devices(
            compute=self.compute[:, rows],
            network=self.network[:, rows],
            links=self.links[:, rows],
            per_node=self.per_node[rows],
            most=self.most[rows],
            measured=tuple(np.array(self.measured, object)[rows]),
            collectives=self.collectives,
        )

    def sums_s(self, bucket_bytes: ArrayLike, nodes: np.ndarray) -> np.ndarray:
        """Return the seconds of each bucket's all-reduce, [3, kinds, sizes, buckets].

        Args:
            bucket_bytes: bytes of each gradient bucket.
            nodes: numbers of machines, [sizes].
        """
        between, latency, inner, inner_latency = self.links[..., None, None]
        seconds = ring_s(bucket_bytes, nodes[:, None], between, latency)
        inside = ring_s(bucket_bytes, self.per_node[:, None, None], inner, inner_latency)
        out: np.ndarray = self.network[..., None, None] * (seconds + inside)
        if self.collectives is not None:
            for kind, name in enumerate(self.measured):
                if name:
                    for end, quantile in enumerate(_QUANTILES):
                        out[end, kind] = self.collectives.seconds(
                            name,
                            num_bytes=np.asarray(bucket_bytes, float),
                            nodes=nodes[:, None],
                            per_node=int(self.per_node[kind]),
                            quantile=quantile,
                        )
        return out


def kind_of(offer: Offer) -> Hashable:
    """Return the key of everything that a step's time depends on: not the place, not the price."""
    return (
        offer.instance_type,
        offer.accelerator,
        offer.accelerator_count,
        None if math.isnan(offer.vcpus) else offer.vcpus,
        offer.device_memory_bytes,
        offer.baseline_gbps,
        offer.peak_gbps,
    )


def _ends(intervals: Sequence[Interval]) -> np.ndarray:
    return np.array([(each.median, each.low, each.high) for each in intervals]).T


def _numbers(link: Link) -> tuple[float, ...]:
    return link.bytes_per_s, link.latency_s, link.inner_bytes_per_s, link.inner_latency_s
