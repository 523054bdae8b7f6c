"""Energy meters: hardware counters where available, otherwise a power model, marked as such."""

from __future__ import annotations

from typing import Any, Protocol

from thrifty.core import HeteroError, MissingExtraError
from thrifty.perf import Power


class Meter(Protocol):
    """Measures the energy of one worker.

    Attributes:
        source: "modelled", or the counters that are read ("NVML", "RAPL", "NVML+RAPL").
    """

    source: str

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy since the last call (or since the meter was made).

        Args:
            busy_s: Seconds of that time in which the worker trained.
            whole_s: All seconds of that time.
        """
        ...


class PowerMeter:
    """Modelled energy, from a declared power model.

    >>> PowerMeter(Power(idle_w=2.0, busy_w=5.0)).joules(busy_s=3.0, whole_s=4.0)
    17.0
    """

    source = "modelled"

    def __init__(self, power: Power) -> None:
        self._power = power

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy according to the model."""
        return self._power.joules(busy_s=busy_s, whole_s=whole_s)


class ZeusMeter:
    """Measured energy: GPUs by NVML, CPUs and memory by RAPL, read with Zeus.

    Counters cover whole devices, so the work of other processes on them counts, too.

    Args:
        gpus: Indices of this worker's GPUs (default: none).
        cpus: Indices of this worker's CPU packages (default: none).
        monitor: A ``zeus.monitor.ZeusMonitor`` (default: created).

    Raises:
        MissingExtraError: Zeus is not installed.
        HeteroError: Neither GPUs nor CPUs are given, or their counters cannot be read.
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
        """Return the energy according to the counters."""
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
            f"the energy counters of GPUs {gpus} and CPUs {cpus} cannot be read ({error}); declare "
            "a model instead: PowerMeter(Power(idle_w=..., busy_w=...))"
        ) from error
