"""The device of a model, and measuring how fast each worker is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thrifty.core import Clock, HeteroError, plain_logger, require
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

    Counters cover whole devices, so the work of other processes on them counts, too. A GPU updates
    its counter every 20 to 100 ms. So a shorter step may report nothing, and a later one the energy
    of several; their sum is right.

    Where RAPL cannot be read, as in most virtual machines, a worker with GPUs counts only these,
    with a warning; ``source`` says what is counted.

    Args:
        gpus: Indices of this worker's GPUs (default: none).
        cpus: Indices of this worker's CPU packages (default: none).
        monitor: A ``zeus.monitor.ZeusMonitor`` (default: created).

    Raises:
        MissingExtraError: Zeus is not installed.
        HeteroError: Neither GPUs nor CPUs are given, or their counters cannot be read.
    """

    def __init__(
        self, *, gpus: list[int] | None = None, cpus: list[int] | None = None, monitor: Any = None
    ) -> None:
        if not gpus and not cpus:
            raise HeteroError("name the GPUs or the CPU packages that this worker uses")
        if monitor is None:
            monitor, cpus = _begun(gpus or [], cpus or [])
        else:
            monitor.begin_window(_WINDOW)
        self.source = "+".join(name for name, used in (("NVML", gpus), ("RAPL", cpus)) if used)
        self._monitor = monitor

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy according to the counters."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The energy consumption of one or more GPUs")
            window = self._monitor.end_window(_WINDOW)
        self._monitor.begin_window(_WINDOW)
        counted = [window.gpu_energy, window.cpu_energy, window.dram_energy]
        return float(sum(sum(each.values()) for each in counted if each))


_WINDOW = "thrifty"


def _begun(gpus: list[int], cpus: list[int]) -> tuple[Any, list[int]]:
    """Return a monitor with an open window, and the CPU packages that it counts."""
    ZeusMonitor = require("zeus.monitor", extra="energy").ZeusMonitor
    try:
        monitor = ZeusMonitor(
            gpu_indices=gpus, cpu_indices=cpus, approx_instant_energy=not _have_counters(gpus)
        )
        # A CPU package without RAPL is only noticed here.
        monitor.begin_window(_WINDOW)
    except Exception as error:
        if gpus and cpus:
            _log.warning("the energy of CPUs %s is not counted: %s", cpus, error)
            return _begun(gpus, [])
        raise HeteroError(
            f"the energy counters of GPUs {gpus} and CPUs {cpus} cannot be read ({error}); declare "
            "a model instead: PowerMeter(Power(idle_w=..., busy_w=...))"
        ) from error
    return monitor, cpus


def _have_counters(gpus: list[int]) -> bool:
    """Return whether all GPUs count joules; those before Volta only tell their watts.

    Where there is a counter, Zeus must not estimate a window in which it stood still: the counter's
    next update covers that time, too, and it would count twice.
    """
    known = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return all(torch.cuda.get_device_capability(gpu) >= (7, 0) for gpu in gpus if gpu in known)


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
