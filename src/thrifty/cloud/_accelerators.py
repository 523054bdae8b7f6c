"""Data sheets of devices: what their speed is guessed from until it is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device.

    Args:
        tflops: single precision, peak.
        gb_s: memory bandwidth.
        memory_gib: of it.
        inner_gb_s: what a ring over the devices of one machine carries, roughly half of the data sheet's link.
    """

    tflops: float
    gb_s: float
    memory_gib: float
    inner_gb_s: float

    @property
    def speed(self) -> float:
        """A number to compare devices by: training is bound by arithmetic here and by memory there, so the geometric mean of both."""
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
"""By SkyPilot's names; figures from the makers' data sheets."""

VCPU = Accelerator(tflops=0.035, gb_s=4.0, memory_gib=0.0, inner_gb_s=5.0)
"""One hardware thread of a server's processor, roughly."""
