"""Data sheets of devices, from which speeds are estimated until they are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Data sheet of one device.

    Args:
        tflops: peak TFLOP/s in single precision.
        gb_s: memory bandwidth in GB/s.
        memory_gib: memory in GiB.
        inner_gb_s: bandwidth in GB/s of a ring over the devices of one machine, roughly half of the
            data sheet's link.
    """

    tflops: float
    gb_s: float
    memory_gib: float
    inner_gb_s: float

    @property
    def speed(self) -> float:
        """Geometric mean of compute and memory bandwidth, to compare devices by.

        Training is bound partly by arithmetic and partly by memory, so both count.
        """
        return math.sqrt(self.tflops * self.gb_s)


ACCELERATORS = {
    "K80": Accelerator(tflops=4.1, gb_s=240, memory_gib=12, inner_gb_s=5),
    "M60": Accelerator(tflops=4.8, gb_s=160, memory_gib=8, inner_gb_s=5),
    "P4": Accelerator(tflops=5.5, gb_s=192, memory_gib=8, inner_gb_s=5),
    "P100": Accelerator(tflops=9.3, gb_s=732, memory_gib=16, inner_gb_s=8),
    "V100": Accelerator(tflops=15.7, gb_s=900, memory_gib=16, inner_gb_s=60),
    "V100-32GB": Accelerator(tflops=15.7, gb_s=900, memory_gib=32, inner_gb_s=60),
    "T4": Accelerator(tflops=8.1, gb_s=320, memory_gib=16, inner_gb_s=6),
    "L4": Accelerator(tflops=30.3, gb_s=300, memory_gib=24, inner_gb_s=10),
    "A10": Accelerator(tflops=31.2, gb_s=600, memory_gib=24, inner_gb_s=10),
    "A10G": Accelerator(tflops=31.2, gb_s=600, memory_gib=24, inner_gb_s=10),
    "L40S": Accelerator(tflops=91.6, gb_s=864, memory_gib=48, inner_gb_s=20),
    "A100": Accelerator(tflops=19.5, gb_s=1555, memory_gib=40, inner_gb_s=150),
    "A100-80GB": Accelerator(tflops=19.5, gb_s=2039, memory_gib=80, inner_gb_s=150),
    "H100": Accelerator(tflops=67.0, gb_s=3350, memory_gib=80, inner_gb_s=220),
    "H200": Accelerator(tflops=67.0, gb_s=4800, memory_gib=141, inner_gb_s=220),
}
"""Accelerators by SkyPilot's names; figures from the makers' data sheets."""

VCPU = Accelerator(tflops=0.035, gb_s=4.0, memory_gib=0.0, inner_gb_s=5.0)
"""One hardware thread of a server processor, roughly."""
