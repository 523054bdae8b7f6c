"""The device of a model, and measuring how fast each worker is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thrifty.core import Clock, HeteroError, MissingExtraError, plain_logger, require
from thrifty.pack import out_of_memory
from thrifty.perf import Power, StepCurve


_log = plain_logger("thrifty.hetero")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters.

    Raises:
        HeteroError: The model has no parameters.
    """
    for parameter in model.parameters():
        return parameter.device
    raise HeteroError("the model has no parameters to train")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device; other values stay as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


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

    A reading is the difference of the devices' cumulative counters since the reading before, so the
    sum of all readings is exact, whenever they are taken. A GPU updates its counter every 20 to
    100 ms. So a shorter step may report nothing, and a later one the energy of several. GPUs before
    Volta have no counter: Zeus polls their watts.

    Counters cover whole devices, so the work of other processes on them counts, too.

    Where RAPL cannot be read, as in most virtual machines, a worker with GPUs counts only these,
    with a warning; ``source`` says what is counted.

    Args:
        gpus: Indices of this worker's GPUs among those in ``CUDA_VISIBLE_DEVICES`` (default: none).
            Zeus numbers GPUs by their PCI bus; where a machine has GPUs of several kinds, PyTorch
            does so only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
        cpus: Indices of this worker's CPU packages (default: none).

    Raises:
        MissingExtraError: Zeus is not installed.
        HeteroError: Neither GPUs nor CPUs are given, or their counters cannot be read.
    """

    def __init__(self, *, gpus: list[int] | None = None, cpus: list[int] | None = None) -> None:
        if not gpus and not cpus:
            raise HeteroError("name the GPUs or the CPU packages that this worker uses")
        self._counters = _open_counters(gpus or [], cpus or [])
        counted = (("NVML", self._counters.gpus), ("RAPL", self._counters.cpus))
        self.source = "+".join(name for name, used in counted if used)

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy according to the counters."""
        return self._counters.joules()


class StepTimer:
    """Measures what a step takes of one worker; checks of the loss do not count.

    Args:
        clock: Clock to measure with.
        meter: Energy meter of this worker.

    Attributes:
        summed_s: Seconds of the last step until the sums over all workers were there, with the
            optimizer's step before it.
        step_s: Seconds of the last whole step.
    """

    def __init__(self, *, clock: Clock, meter: Meter | None) -> None:
        self.summed_s = self.step_s = 0.0
        self._clock = clock
        self._meter = meter
        self._began = self._in_sums_s = self._optimizer_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began, self._in_sums_s = self._clock.monotonic(), 0.0

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Do not count the time in this block as this worker's own work."""
        began = self._clock.monotonic()
        yield
        self._in_sums_s += self._clock.monotonic() - began

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Count the time in this block, the optimizer's step, as work of the following step."""
        began = self._clock.monotonic()
        yield
        self._optimizer_s = self._clock.monotonic() - began

    def busy_s(self, *, check_s: float) -> float:
        """Return the seconds that this worker has worked for the step so far."""
        return self._since(check_s) - self._in_sums_s + self._optimizer_s

    def summed(self, *, check_s: float) -> None:
        """Record that the sums over all workers are there."""
        self.summed_s = self._since(check_s) + self._optimizer_s

    def end(self, *, check_s: float) -> None:
        """Record that the step has ended."""
        self.step_s = self._since(check_s)

    def joules(self, busy_s: float) -> float | None:
        """Return the energy since the last call; None without a meter."""
        if self._meter is None:
            return None
        return self._meter.joules(busy_s=busy_s, whole_s=max(busy_s, self.step_s))

    def _since(self, check_s: float) -> float:
        return self._clock.monotonic() - self._began - check_s


_WINDOW = "thrifty"


class _Counters:
    """The cumulative counters of some devices, and windows for GPUs that have none.

    Args:
        gpus: Indices of GPUs.
        cpus: Indices of CPU packages.
    """

    def __init__(self, gpus: list[int], cpus: list[int]) -> None:
        device = require("zeus.device", extra="energy")
        self.gpus, self.cpus = gpus, cpus
        # Zeus' managers fail where the machine has no such device, so ask only for those in use.
        no_device: Any = None
        self._gpus = device.get_gpus() if gpus else no_device
        self._cpus = device.get_cpus() if cpus else no_device
        self._monitor: Any = None
        self._counted, polled = list[int](), list[int]()
        for gpu in gpus:
            has_counter = self._gpus.supports_get_total_energy_consumption(gpu)
            (self._counted if has_counter else polled).append(gpu)
        self._highest_mj = self._read()
        if polled:
            monitor = require("zeus.monitor", extra="energy")
            self._monitor = monitor.ZeusMonitor(
                gpu_indices=polled, cpu_indices=[], approx_instant_energy=True
            )
            self._monitor.begin_window(_WINDOW)

    def joules(self) -> float:
        """Return the energy since the last call (or since the counters were opened)."""
        # RAPL's counter wraps around. Zeus adds the lost range up to a second later; until then a
        # reading is too low, and the next one above the highest so far makes up for it.
        highest = [max(pair) for pair in zip(self._highest_mj, self._read(), strict=True)]
        spent_mj = sum(highest) - sum(self._highest_mj)
        self._highest_mj = highest
        return spent_mj / 1000 + self._polled_joules()

    def _read(self) -> list[float]:
        """Return the millijoules of each counter."""
        read = [float(self._gpus.get_total_energy_consumption(gpu)) for gpu in self._counted]
        for cpu in self.cpus:
            package = self._cpus.get_total_energy_consumption(cpu)
            read += [float(package.cpu_mj), float(package.dram_mj or 0.0)]
        return read

    def _polled_joules(self) -> float:
        if self._monitor is None:
            return 0.0
        window = self._monitor.end_window(_WINDOW)
        self._monitor.begin_window(_WINDOW)
        return float(sum(window.gpu_energy.values()))


def _open_counters(gpus: list[int], cpus: list[int]) -> _Counters:
    """Open the counters of these devices, or those of the GPUs if RAPL cannot be read."""
    try:
        return _Counters(gpus, cpus)
    except MissingExtraError:
        raise
    except Exception as error:
        if gpus and cpus:
            _log.warning("the energy of CPUs %s is not counted: %s", cpus, error)
            return _open_counters(gpus, [])
        raise HeteroError(
            f"the energy counters of GPUs {gpus} and CPUs {cpus} cannot be read ({error}); declare "
            "a model instead: PowerMeter(Power(idle_w=..., busy_w=...))"
        ) from error


_REPEATS = 3
_MOST_AT_FIRST = 4
"""Largest number of samples to begin with."""


def measure_curve(
    step: Callable[[int], None],
    *,
    max_samples: int,
    clock: Clock,
    min_samples: int = 0,
    budget_s: float = 20.0,
) -> StepCurve:
    """Time whole training steps of 1, 2, 4, ... samples, and fit a speed curve.

    Measuring begins with the smallest size at which the model trains, which the worker then has to
    get: batch normalisation over each worker's share cannot train a single sample. Measuring stops
    at ``max_samples`` samples, where memory ends, or where the next size would exceed ``budget_s``.
    The line through the measured sizes predicts larger batches.

    Args:
        step: Trains one step with the given number of samples, and waits until the device is done.
        max_samples: Largest number of samples to try.
        clock: Clock to measure with.
        min_samples: Minimum number of samples that the worker has to get.
        budget_s: Seconds that measuring may take.

    Raises:
        HeteroError: Not even the smallest size fits into memory.

    >>> from thrifty.testing import VirtualClock
    >>> clock = VirtualClock()
    >>> curve = measure_curve(lambda n: clock.advance(0.1 + 0.01 * n), max_samples=64, clock=clock)
    >>> round(curve.fixed_s, 3), round(curve.sample_s, 3)
    (0.1, 0.01)
    """
    sizes: list[int] = []
    seconds: list[float] = []
    fits: int | None = None
    began = clock.monotonic()
    refused: Exception | None = None
    size = min(max(1, min_samples), max_samples)
    while True:
        try:
            times = [_timed(step, size, clock) for _ in range(_REPEATS + 1)]
        except Exception as error:  # user code may raise anything
            if not out_of_memory(error):
                if sizes:
                    raise
                refused = refused or error
                if size >= min(_MOST_AT_FIRST, max_samples):
                    raise refused from None
                size = min_samples = size + 1
                continue
            if not sizes:
                raise HeteroError(
                    f"a step with {size} sample(s) does not fit into this worker's memory; a "
                    "smaller model would"
                ) from error
            fits = sizes[-1]
            break
        sizes.append(size)
        seconds.append(median(times[1:]))  # the first one warms up
        spent = clock.monotonic() - began
        if size >= max_samples or spent + 2 * (_REPEATS + 1) * seconds[-1] > budget_s:
            break
        size = min(2 * size, max_samples)
    return StepCurve.fit(sizes, seconds, max_samples=fits, min_samples=min_samples)


def _timed(step: Callable[[int], None], size: int, clock: Clock) -> float:
    began = clock.monotonic()
    step(size)
    return max(clock.monotonic() - began, 1e-9)
