"""A simulated host with computational storage devices: speed and energy beside HyperTune's figures.

The papers' abstracts give gains (up to 3.1x in speed and 2.45x in energy) but not what the devices
are capable of. Every number below is an assumption, from data sheets of such parts where there are
any. None was chosen to give the papers' gains. The sweep shows what follows from other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.hetero import Link, Power, SimulatedWorker, StepCurve, simulate_job


ASSUMPTIONS = {
    "host": (
        "one 8-core server CPU of 2017 (AVX-512, about 1.7 GHz under it, one multiply-add "
        "unit): 435 GFLOP/s at best"
    ),
    "device": (
        "four Cortex-A53 at 1.5 GHz, 8 FLOP a cycle each: 48 GFLOP/s at best, so 0.11 of the host"
    ),
    "efficiency": "the same share of its peak on both",
    "model": (
        "MobileNetV2: 0.3 GMAC forward, three times that for a step: 1.8 GFLOP an image; 3.5 "
        "million parameters; 10 % of the host's peak, so 24 images/s"
    ),
    "fixed time of a step": "50 ms on the host, 150 ms on a device",
    "memory": "a device holds 64 images of a step",
    "link": (
        "TCP through NVMe: 1 GB/s each, 0.2 ms a message; ring all-reduce of the gradients, "
        "not hidden behind arithmetic"
    ),
    "power": (
        "server with its drives' bays 120 W waiting, 205 W training; a drive 6 W waiting, 9 "
        "W training: the drives are there, and wait, when the host trains alone"
    ),
    "batch": "256 images a step, of all engines together; the host alone has the same",
}

HOST_SAMPLE_S = 1.8 / (435 * 0.10)
RATIO = 48 / 435
IMAGES = 256
GRADIENT_BYTES = 4 * 3.5e6
LINK = Link(bytes_per_s=1e9, latency_s=2e-4)
HOST_POWER = Power(idle_w=120.0, busy_w=205.0)
DEVICE_POWER = Power(idle_w=6.0, busy_w=9.0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A host with ``devices`` drives, each ``ratio`` times as fast as the host."""

    devices: int
    ratio: float = RATIO

    def workers(self) -> list[SimulatedWorker]:
        host = SimulatedWorker(
            name="host", curve=StepCurve(fixed_s=0.05, sample_s=HOST_SAMPLE_S), power=HOST_POWER
        )
        drives = [
            SimulatedWorker(
                name=f"drive{at}",
                curve=StepCurve(fixed_s=0.15, sample_s=HOST_SAMPLE_S / self.ratio, max_samples=64),
                power=DEVICE_POWER,
            )
            for at in range(self.devices)
        ]
        return [host, *drives]


def gain(cluster: Cluster, *, steps: int) -> dict[str, Any]:
    """Return speed and energy of all engines relative to the host alone with idle drives."""
    workers = cluster.workers()
    alone = simulate_job(workers[:1], batch=IMAGES, num_steps=steps)
    together = simulate_job(
        workers, batch=IMAGES, num_steps=steps, link=LINK, gradient_bytes=GRADIENT_BYTES
    )
    waiting = cluster.devices * DEVICE_POWER.idle_w * alone.seconds / alone.samples
    return {
        "devices": cluster.devices,
        "speed of a device": cluster.ratio,
        "split": (
            f"{together.steps[-1].sizes[0]} + {cluster.devices} x {together.steps[-1].sizes[-1]}"
        )
        if cluster.devices
        else f"{together.steps[-1].sizes[0]}",
        "images/s": together.samples_per_s,
        "times as fast": together.samples_per_s / alone.samples_per_s,
        "J/image": together.joules_per_sample,
        "times less energy": (alone.joules_per_sample + waiting) / together.joules_per_sample,
    }


def sweep(*, quick: bool) -> list[dict[str, Any]]:
    """Sweep over numbers of devices and their speeds."""
    steps = 5 if quick else 60
    counts = (24,) if quick else (0, 4, 8, 16, 24, 36)
    ratios = (RATIO,) if quick else (0.03, 0.06, RATIO, 0.2)
    return [
        gain(Cluster(devices=count, ratio=ratio), steps=steps)
        for ratio in ratios
        for count in counts
    ]
