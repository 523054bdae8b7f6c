"""What is known about each kind of machine, and how long a step takes on it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from thrifty.cloud._hardware import HardwareEstimates, precision_of
from thrifty.cloud._networks import NetworkPriors
from thrifty.cloud._offer import Interval, Offer
from thrifty.cloud._workload import ObservedSteps, Workload
from thrifty.core import size_text
from thrifty.perf import CollectiveModel, Link, Precision, StepProfile, iteration_s, ring_s


_QUANTILES = (0.5, 0.05, 0.95)
"""Median, low and high."""

FACTORS = ("compute", "inner", "network")
"""Factors that measured steps correct, in the order of ``ObservedSteps.slopes``."""

_NEAR = 0.05
"""How far a derivative by a factor looks: a step has kinks where a sum is just hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Estimates for several kinds of machines; intervals have a first axis of median, low, high.

    Attributes:
        compute: Factor on the profile's seconds, [3, kinds].
        precisions: Precision in which each kind trains, [kinds].
        gain: Factor of this precision, which ``compute`` contains, [3, kinds].
        network: Factor on the seconds of sums between machines, [3, kinds].
        inner: Factor on the seconds of sums inside a machine, [3, kinds].
        links: Bandwidth (bytes/s) and latency (s) between machines, then inside them, [4, kinds].
        per_node: Devices of a machine, [kinds].
        usable: Bytes of a device that a program is sure to get, [kinds].
        most: Samples that fit into one device at the upper end of their memory, [kinds].
        pack_ratio: Seconds of a joint step of 1, 2, ... trainings of a study, relative to one,
            [packs, kinds]; infinite where they do not fit.
        accumulates: Whether a device may train more than that, in micro-batches.
        measured: Instance types whose all-reduces were measured, [kinds]; "" for the others.
        collectives: Model of these measurements; None if there are none.
        priors: What is known of machines where nothing was measured.
        widths: Factor on the logarithm of a step's interval on one machine, and on several,
            [2, kinds].
        observed: Measured steps of this training on these machines, [kinds]; None for none.
        quantiles: Quantile of measured all-reduces for each entry of the first axis.
    """

    compute: np.ndarray
    precisions: tuple[Precision, ...]
    gain: np.ndarray
    network: np.ndarray
    inner: np.ndarray
    links: np.ndarray
    per_node: np.ndarray
    usable: np.ndarray
    most: np.ndarray
    pack_ratio: np.ndarray
    accumulates: bool
    measured: tuple[str, ...]
    collectives: CollectiveModel | None
    priors: NetworkPriors
    widths: np.ndarray
    observed: tuple[ObservedSteps | None, ...]
    quantiles: tuple[float, ...] = _QUANTILES

    @classmethod
    def of(
        cls, offers: Sequence[Offer], *, estimates: HardwareEstimates, workload: Workload
    ) -> Devices:
        """Return the estimates, with one kind for each offer.

        Raises:
            CloudError: Nothing is known of a device's speed, or the estimates were calibrated to
                another training.
        """
        profile = workload.profile
        estimates.check_profile(profile)
        chosen = [
            precision_of(offer, allowed=workload.precisions, profile=profile, estimates=estimates)
            for offer in offers
        ]
        gain = _ends([each for _, each in chosen])
        # Results of a profile's layers may need twice its bytes in float32; fewer in 16 bits are no
        # promise, because weights and gradients keep theirs.
        usable = [
            estimates.usable_bytes(offer)
            / (2 if precision == "float32" != profile.precision else 1)
            for offer, (precision, _) in zip(offers, chosen, strict=True)
        ]
        holds = {memory: profile.max_batch(memory) for memory in set(usable)}
        collectives = estimates.collectives(offers)
        known = () if collectives is None else collectives.names
        return cls(
            compute=gain * _ends([estimates.compute(offer) for offer in offers]),
            precisions=tuple(each for each, _ in chosen),
            gain=gain,
            network=_ends([estimates.network(offer) for offer in offers]),
            inner=_ends([estimates.inner(offer) for offer in offers]),
            links=np.array([_numbers(estimates.link(offer)) for offer in offers]).T,
            per_node=np.array([offer.accelerator_count for offer in offers]),
            usable=np.array(usable),
            most=np.array([holds[memory] for memory in usable]),
            pack_ratio=_pack_ratio(workload, offers, usable),
            accumulates=workload.accumulation == "allowed",
            measured=tuple(
                offer.instance_type if offer.instance_type in known else "" for offer in offers
            ),
            collectives=collectives,
            priors=estimates.networks,
            widths=np.array([
                [estimates.networks.width(offer, several=several) for offer in offers]
                for several in (False, True)
            ]),
            # Steps were measured in the profile's precision, and tell nothing of another one.
            observed=tuple(
                estimates.observed.get(offer.instance_type)
                if precision == profile.precision
                else None
                for offer, (precision, _) in zip(offers, chosen, strict=True)
            ),
        )

    def __len__(self) -> int:
        return self.per_node.size

    def __getitem__(self, rows: slice | np.ndarray | list[int]) -> Devices:
        return Devices(
            compute=self.compute[:, rows],
            precisions=tuple(np.array(self.precisions, object)[rows]),
            gain=self.gain[:, rows],
            network=self.network[:, rows],
            inner=self.inner[:, rows],
            links=self.links[:, rows],
            per_node=self.per_node[rows],
            usable=self.usable[rows],
            most=self.most[rows],
            pack_ratio=self.pack_ratio[:, rows],
            accumulates=self.accumulates,
            measured=tuple(np.array(self.measured, object)[rows]),
            collectives=self.collectives,
            priors=self.priors,
            widths=self.widths[:, rows],
            observed=tuple(np.array(self.observed, object)[rows]),
            quantiles=self.quantiles,
        )

    def nearby(self) -> Devices:
        """Return the medians, then each factor a little larger: compute, inner, network."""
        factors = {
            name: getattr(self, name)[0] * np.where(np.arange(4) == place, 1 + _NEAR, 1.0)[:, None]
            for place, name in enumerate(FACTORS, start=1)
        }
        return replace(self.with_factors(factors), quantiles=(0.5,) * 4)

    def with_factors(self, factors: Mapping[str, np.ndarray]) -> Devices:
        """Return a copy with some of the factors replaced, by their names in ``FACTORS``."""
        return replace(
            self,
            compute=factors.get("compute", self.compute),
            inner=factors.get("inner", self.inner),
            network=factors.get("network", self.network),
        )

    def limit(self, global_batch: int) -> np.ndarray:
        """Return the samples of a step that a device can train, [kinds]."""
        most = np.minimum(self.most, global_batch)
        out: np.ndarray = np.where(most > 0, global_batch, 0) if self.accumulates else most
        return out

    def num_micro(self, batch: np.ndarray) -> np.ndarray:
        """Return how many micro-batches a device makes of its samples; 0: they do not fit.

        They are as few as fit, so that as much as possible of the exchange overlaps.

        Args:
            batch: Samples of a device, [..., kinds].
        """
        num = np.maximum(1, -(-batch // np.maximum(1, self.most)))
        out: np.ndarray = np.where(batch <= self.limit(np.iinfo(int).max), num, 0)
        return out

    def sums_s(self, bucket_bytes: ArrayLike, nodes: np.ndarray) -> np.ndarray:
        """Return the seconds of each bucket's all-reduce, [3, kinds, sizes, buckets].

        Args:
            bucket_bytes: Bytes of each gradient bucket.
            nodes: Numbers of machines, [sizes].
        """
        speed, latency, inner_speed, inner_latency = self.links[..., None, None]
        between = ring_s(bucket_bytes, nodes[:, None], speed, latency)
        inside = ring_s(bucket_bytes, self.per_node[:, None, None], inner_speed, inner_latency)
        out: np.ndarray = (
            self.network[..., None, None] * between + self.inner[..., None, None] * inside
        )
        if self.collectives is not None:
            for kind, name in enumerate(self.measured):
                if name:
                    for end, quantile in enumerate(self.quantiles):
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
        offer.fabric,
    )


def _ends(intervals: Sequence[Interval]) -> np.ndarray:
    return np.array([(each.median, each.low, each.high) for each in intervals]).T


def _numbers(link: Link) -> tuple[float, ...]:
    return link.bytes_per_s, link.latency_s, link.inner_bytes_per_s, link.inner_latency_s


def _pack_ratio(workload: Workload, offers: Sequence[Offer], usable: Sequence[float]) -> np.ndarray:
    """Return ``Devices.pack_ratio``: the last measured pack is the largest."""
    packs = workload.packs
    if packs is None:
        return np.ones((1, len(offers)))
    one_bytes = float(workload.profile.high_peak_at(workload.global_batch))
    out = np.full((max(packs.step_s), len(offers)), np.inf)
    for k in range(1, len(out) + 1):
        more = packs.memory(k) / packs.memory(1) if packs.memory_bytes else k
        fits = np.array([
            k == 1 or (offer.accelerator_count == 1 and more * one_bytes <= memory)
            for offer, memory in zip(offers, usable, strict=True)
        ])
        out[k - 1, fits] = packs.time(k) / packs.time(1)
    return out


_CHUNK = 2**13
"""Fleets that are computed together; more would not fit into the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSteps:
    """Steps on 1, 2, ... equal machines.

    Attributes:
        step_s: Seconds: median, low, high, [3, kinds, sizes]; infinite where samples do not fit.
        replay_s: Median seconds by the replay alone, [kinds, sizes].
        batch: Samples of each device, [kinds, sizes].
        num_micro: Micro-batches of each device, [kinds, sizes]; 0 where samples do not fit.
    """

    step_s: np.ndarray
    replay_s: np.ndarray
    batch: np.ndarray
    num_micro: np.ndarray


def equal_steps(
    profile: StepProfile, devices: Devices, *, global_batch: int, most_nodes: int
) -> EqualSteps:
    """Return data-parallel steps on 1 to ``most_nodes`` machines of each kind.

    The batch is split equally. A device has at least one sample, and no more at a time than fit
    into its memory.
    """
    nodes = np.arange(1, most_nodes + 1)
    workers = devices.per_node[:, None] * nodes
    batch = -(-global_batch // workers)
    num_micro = devices.num_micro(batch.T).T
    step_s = np.empty((3, *batch.shape))
    rows = max(1, _CHUNK // most_nodes)
    for first in range(0, len(devices), rows):
        part = slice(first, first + rows)
        few = devices[part]
        step_s[:, part] = replayed_s(
            profile,
            batch=batch[part, :, None],
            num_micro=num_micro[part, :, None],
            compute=few.compute[..., None, None],
            sums_s=few.sums_s(profile.bucket_bytes, nodes),
        )
    fits = (num_micro > 0) & (workers <= global_batch)
    replay_s = step_s[0].copy()
    step_s = widened(
        step_s * devices.priors.rest(workers),
        compute=devices.compute[..., None],
        widths=np.where(workers > 1, devices.widths[(nodes > 1).astype(int)].T, 1.0),
    )
    for kind, seen in enumerate(devices.observed):
        if seen is not None:
            step_s[:, kind] = seen.ends(
                *replay_slopes(
                    profile,
                    devices[[kind]],
                    batch=batch[kind],
                    num_micro=num_micro[kind],
                    nodes=nodes,
                ),
                nodes=nodes,
                per_node=np.full(most_nodes, devices.per_node[kind]),
                batch=batch[kind],
                wider=devices.priors.observed,
            )
    return EqualSteps(
        step_s=np.where(fits, step_s, np.inf), replay_s=replay_s, batch=batch, num_micro=num_micro
    )


def widened(steps_s: np.ndarray, *, compute: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return steps whose interval is wider by what the devices' speed does not explain.

    Args:
        steps_s: Median, low, high, [3, ...].
        compute: Factor on the computation: median, low, high, [3, ...].
        widths: Factor on the logarithm of the rest of the interval, [...].
    """
    rest = steps_s * compute[0] / (steps_s[0] * compute)
    sides = np.stack([np.ones_like(rest[0]), np.minimum(rest[1], 1), np.maximum(rest[2], 1)])
    out: np.ndarray = steps_s * sides ** (widths - 1)
    return out


def replay_slopes(
    profile: StepProfile,
    devices: Devices,
    *,
    batch: np.ndarray,
    num_micro: np.ndarray,
    nodes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the median seconds of steps on one kind of machine, and their log derivatives.

    Args:
        profile: Profile of a step on the profiled device.
        devices: One kind.
        batch: Samples per device, [steps].
        num_micro: Equal parts of these samples, one after the other, [steps].
        nodes: Machines, [steps].

    Returns:
        Seconds, [steps], and derivatives by ``FACTORS``, [steps, 3].
    """
    near = devices.nearby()
    steps = replayed_s(
        profile,
        batch=batch[:, None],
        num_micro=num_micro[:, None],
        compute=near.compute[..., None],
        sums_s=near.sums_s(profile.bucket_bytes, nodes)[:, 0],
    )
    return steps[0] * devices.priors.rest(nodes * devices.per_node[0])[0], slopes_of(steps)


def slopes_of(steps: np.ndarray) -> np.ndarray:
    """Return log derivatives by ``FACTORS`` of steps on ``Devices.nearby``, [..., 3].

    Args:
        steps: Seconds with the medians, then with each factor a little larger, [4, ...].
    """
    out: np.ndarray = np.moveaxis(np.log(steps[1:] / steps[0]) / math.log1p(_NEAR), 0, -1)
    return out


def replayed_s(
    profile: StepProfile,
    *,
    batch: np.ndarray,
    num_micro: np.ndarray,
    compute: np.ndarray,
    sums_s: np.ndarray,
) -> np.ndarray:
    """Return the seconds of a step of workers with these batches; the axes broadcast.

    All micro-batches of a worker but the last pass forward and backward without an exchange.

    Args:
        profile: Profile of a step on the profiled device.
        batch: Samples of each worker, [..., workers].
        num_micro: Equal parts of a worker's batch, one after the other, [..., workers].
        compute: Factor on the profile's seconds, [..., workers].
        sums_s: Seconds of each bucket's all-reduce, [..., buckets].
    """
    others = np.maximum(num_micro, 1) - 1
    each = batch / (others + 1)
    forward, backward = profile.forward_at(each), profile.backward_at(each)
    return iteration_s(
        forward_s=compute * (forward + others * (forward + backward)),
        backward_s=compute * backward,
        optimizer_s=compute * (profile.optimizer_s + profile.overhead_s),
        bucket_ready=profile.bucket_ready,
        bucket_s=sums_s,
        input_s=batch * profile.sample_input_s,
    )


_WAITING = 0.1
"""Least share of a step spent waiting for all-reduces to call the step network-bound."""


def bound_by(
    profile: StepProfile,
    *,
    batch: np.ndarray,
    num_micro: np.ndarray,
    compute: np.ndarray,
    replay_s: float,
) -> str:
    """Return what bounds a step that takes ``replay_s``: input, network or compute.

    Args:
        profile: Profile of a step on the profiled device.
        batch: Samples of each worker.
        num_micro: Micro-batches of each worker.
        compute: Factor on the profile's seconds, for each worker.
        replay_s: Median seconds of the step by the replay alone.
    """
    sums = np.zeros(len(profile.bucket_bytes))
    reading = float((batch * profile.sample_input_s).max())
    alone = float(
        replayed_s(profile, batch=batch, num_micro=num_micro, compute=compute, sums_s=sums)
    )
    if reading >= replay_s:
        return "input"
    waiting = 1 - alone / replay_s
    if waiting >= _WAITING:
        return f"network: {waiting:.0%} of the step waits for sums".replace("%", " %")
    return "compute"


def misfit(profile: StepProfile, offer: Offer, *, batch: int, usable: float) -> str:
    """Return why a device of this machine may not hold a batch in its ``usable`` bytes."""
    samples = "one sample needs" if batch == 1 else f"{batch} samples need"
    needed, at_most = float(profile.peak_at(batch)), float(profile.high_peak_at(batch))
    return (
        f"{samples} {size_text(needed)} (at most {size_text(at_most)}), a device of {offer} has "
        f"{size_text(offer.device_memory_bytes or 0.0)} (at least {size_text(usable)} usable)"
    )


def spell_s(seconds: float) -> str:
    """Return a duration as readable text."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
