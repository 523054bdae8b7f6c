"""Setup of a data-parallel training, and many setups as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Devices and batch of a data-parallel step.

    Args:
        placement: devices used on each machine.
        batch: samples per device.

    Raises:
        UsageError: a machine has no device, or the batch is not positive.

    >>> Setup(placement=(4, 2), batch=32).num_devices
    6
    """

    placement: tuple[int, ...]
    batch: float

    def __post_init__(self) -> None:
        if not self.placement or min(self.placement) < 1:
            raise UsageError(
                f"each machine of a placement has 1 device or more, not {self.placement}"
            )
        if not 0 < self.batch < math.inf:
            raise UsageError(f"a batch is positive, not {self.batch}")

    @property
    def num_devices(self) -> int:
        """Devices on all machines."""
        return sum(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Setups as arrays, each of shape [setups].

    Attributes:
        batch: samples per device.
        nodes: number of machines.
        devices: devices on all machines.
        most: devices on the fullest machine.
        least: devices on the emptiest machine.
    """

    batch: np.ndarray
    nodes: np.ndarray
    devices: np.ndarray
    most: np.ndarray
    least: np.ndarray

    @classmethod
    def of(cls, setups: Sequence[Setup]) -> Columns:
        """Return the setups as arrays."""
        return cls(
            batch=np.array([setup.batch for setup in setups], float),
            nodes=np.array([len(setup.placement) for setup in setups], float),
            devices=np.array([setup.num_devices for setup in setups], float),
            most=np.array([max(setup.placement) for setup in setups], float),
            least=np.array([min(setup.placement) for setup in setups], float),
        )

    @property
    def apart(self) -> np.ndarray:
        """1 if several machines take part, else 0."""
        return (self.nodes > 1).astype(float)

    @property
    def together(self) -> np.ndarray:
        """1 if several devices of a single machine take part, else 0."""
        out: np.ndarray = ((self.nodes == 1) & (self.devices > 1)).astype(float)
        return out
