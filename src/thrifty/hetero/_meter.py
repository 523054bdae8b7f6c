"""Joules: counted where there are counters, else modelled and marked as such."""

from __future__ import annotations

from typing import Any, Protocol

from thrifty.core import HeteroError, MissingExtraError
from thrifty.perf import Power


class Meter(Protocol):
    """Energy of one worker.

    Attributes:
        source: "modelled", or the counters that are read ("NVML", "RAPL", "NVML+RAPL").
    """

    source: str

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Energy since the last call (or since the meter was made).

        Args:
            busy_s: seconds of that time in which the worker trained.
            whole_s: all seconds of that time.
        """
        ...


class PowerMeter:
    """Modelled: what a declared power model says.

    >>> PowerMeter(Power(idle_w=2.0, busy_w=5.0)).joules(busy_s=3.0, whole_s=4.0)
    17.0
    """

    source = "modelled"

    def __init__(self, power: Power) -> None:
        self._power = power

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """By the model."""
        return self._power.joules(busy_s=busy_s, whole_s=whole_s)


class ZeusMeter:
    """Counted: GPUs by NVML, CPUs and memory by RAPL, read with Zeus.

    Counters are those of whole devices: what others do on them counts, too.

    Args:
        gpus: indices of this worker's GPUs; none unless told.
        cpus: indices of this worker's CPU packages; none unless told.
        monitor: a ``zeus.monitor.ZeusMonitor``; made unless told.

    Raises:
        MissingExtraError: Zeus is not installed.
        HeteroError: neither GPUs nor CPUs are named, or their counters cannot be read.
    """

    def __init__(
        self,
        *,
        gpus: list[int] | None = None,
        cpus: list[int] | None = None,
        monitor: Any = None,
    ) -> None:
        if not gpus and not cpus:
            raise HeteroError("name the GPUs or the CPU packages that this worker uses")
        self.source = "+".join(name for name, used in (("NVML", gpus), ("RAPL", cpus)) if used)
        self._monitor = _monitor(gpus or [], cpus or []) if monitor is None else monitor
        self._monitor.begin_window("thrifty")

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """By the counters."""
        window = self._monitor.end_window("thrifty")
        self._monitor.begin_window("thrifty")
        counted = [window.gpu_energy, window.cpu_energy, window.dram_energy]
        return float(sum(sum(each.values()) for each in counted if each))


def _monitor(gpus: list[int], cpus: list[int]) -> Any:
    try:
        from zeus.monitor import ZeusMonitor  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("zeus", extra="energy") from error
    try:
        return ZeusMonitor(gpu_indices=gpus, cpu_indices=cpus, approx_instant_energy=True)
    except Exception as error:
        raise HeteroError(
            f"the energy counters of GPUs {gpus} and CPUs {cpus} cannot be read ({error}); declare a model instead: PowerMeter(Power(idle_w=..., busy_w=...))"
        ) from error
